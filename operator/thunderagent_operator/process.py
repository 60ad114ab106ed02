"""One operator process: watches, probes, feed, statuses and leadership, put together and taken apart.

kopf has threads of its own; everything else is in one loop. An operator does all its work whether it leads or not,
but for two things: it serves the feed and writes statuses only while it holds the Lease, and it serves the feed only
once it knows every policy there is, since a policy it does not know is told to be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry

from thunderagent_epp.feed.tls import TlsFiles
from thunderagent_epp.telemetry import logs
from thunderagent_epp.telemetry.pages import PageServer
from thunderagent_epp.telemetry.signals import stop_signals
from thunderagent_operator.api import PODS, Api, Kind, connect
from thunderagent_operator.census import Census
from thunderagent_operator.cluster import Body, Cluster, Policy
from thunderagent_operator.conditions import Findings
from thunderagent_operator.feed import FeedServer
from thunderagent_operator.handlers import Watches
from thunderagent_operator.leadership import Leadership
from thunderagent_operator.probes.http import HttpFetch
from thunderagent_operator.probes.prober import Prober
from thunderagent_operator.reconciler import Reconciler
from thunderagent_operator.status_writer import StatusWriter
from thunderagent_operator.telemetry import OperatorMetrics, ProbeMetrics

log = logs.logger("operator")

LEASE_NAME: Final = "thunderagent-operator"

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """What an operator is started with. No ``namespaces``: the whole cluster. ``tls`` None: a feed in plaintext.

    ``lease_namespace`` None: the namespace of this pod, outside of a cluster ``default``. ``feed_host`` and
    ``http_host`` empty: every interface. Ports are 0 to 65535, 0 takes a free one.
    """

    namespaces: tuple[str, ...] = ()
    feed_host: str = ""
    feed_port: int = 9004
    http_host: str = ""
    http_port: int = 9091
    tls: TlsFiles | None = None
    lease_namespace: str | None = None
    lease_name: str = LEASE_NAME
    identity: str | None = None


class OperatorError(Exception):
    """The operator cannot be started as asked; the text is one line."""


async def operate(options: OperatorOptions) -> None:
    """Run an operator until SIGTERM or SIGINT.

    Raises OperatorError without a cluster to talk to, FeedTlsError or OSError when the feed cannot be served as asked.
    """
    try:
        client = await connect()
    except ConfigException as error:
        raise OperatorError(f"no cluster to talk to: {error}") from None
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        with stop_signals() as stop:
            operator = Operator(options, Api(client), CollectorRegistry(auto_describe=True))
            fetch = await stack.enter_async_context(HttpFetch())
            await operator.start(fetch, stack)
            leadership = Leadership(
                client,
                options.lease_namespace or own_namespace(),
                options.lease_name,
                options.identity or own_identity(),
                won=operator.lead,
                lost=operator.follow,
            )
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(work) for work in (*operator.work(), leadership.run())]
                await stop.wait()
                log.info("stopping")
                # The Lease goes first: the next leader serves while this one takes leave of its pickers.
                for task in reversed(tasks):
                    task.cancel()
        await operator.stop()
        log.info("stopped")


class Operator:
    """Everything but leadership, which tells it to `lead` and to `follow`."""

    def __init__(self, options: OperatorOptions, api: Api, metrics: CollectorRegistry) -> None:
        self._options = options
        self._leading = False
        self._registry = metrics
        self._metrics = OperatorMetrics(metrics)
        self.feed = FeedServer(
            _address(options.feed_host, options.feed_port), tls=options.tls, changed=lambda policy: self._due(policy)
        )
        self.cluster = Cluster(lambda policy: self._due(policy), time.monotonic)
        self._watches = Watches(options.namespaces, self._deliver)
        self._census = Census(api, self.cluster, self._watches, options.namespaces, self._all_due)
        self._statuses = StatusWriter(api, self.cluster)
        self._reconciler: Reconciler | None = None
        self._prober: Prober | None = None
        self._wake = asyncio.Event()
        self._pages = PageServer("ThunderAgent operator", metrics, healthy=self._healthy, ready=self._ready, pages={})

    async def start(self, fetch: HttpFetch, stack: contextlib.AsyncExitStack) -> None:
        """Listen, and begin to watch."""
        self._prober = Prober(fetch, lambda key: self._due(key.policy), ProbeMetrics(self._registry))
        self._reconciler = Reconciler(
            self.cluster,
            self._prober,
            self.feed,
            pods_are_known=self._pods_are_known,
            reported=self._report,
        )
        self._metrics.watch(
            leading=lambda: self._leading,
            policies=lambda: len(self.cluster.policies),
            pickers=lambda: sum(self.feed.followed.values()),
            listed_age_seconds=self._census.listed_age_seconds,
            status_failures=lambda: self._statuses.failures,
        )
        http_port = await self._pages.start(self._options.http_host, self._options.http_port)
        stack.push_async_callback(self._pages.stop)
        await self.feed.start()
        log.info(
            "operating",
            namespaces=list(self._options.namespaces) or "all",
            feed_port=self.feed.port,
            http_port=http_port,
            tls=self._options.tls is not None,
        )

    def work(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Everything that runs until it is cancelled."""
        assert self._reconciler is not None
        assert self._prober is not None
        return (
            self._census.run(),
            self._reconciler.run(),
            self._prober.run(),
            self._statuses.run(),
            self._serve_when_ready(),
        )

    async def stop(self) -> None:
        """Take leave of the pickers, and of the API."""
        await asyncio.gather(self.feed.stop(1.0), self._watches.stop())

    def lead(self) -> None:
        """Hold the Lease from now on."""
        self._leading = True
        self._statuses.lead(True)
        self._wake.set()

    def follow(self) -> None:
        """Hold the Lease no more."""
        self._leading = False
        self._statuses.lead(False)
        self.feed.pause()

    async def _serve_when_ready(self) -> None:
        """Serve the feed as soon as this operator leads and every policy there is was looked at."""
        assert self._reconciler is not None
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._census.synced.wait()
            await self._reconciler.settled()
            if self._leading:
                self.feed.serve()

    def _deliver(self, kind: Kind, event: str | None, body: Body) -> None:
        began_anew = self.cluster.take(kind, event, body)
        # What is selected changes with a policy or its pool; pods come by the thousand.
        if began_anew or (kind is not PODS and not self._watches.covers(self.cluster.selectors())):
            self._census.soon()

    def _due(self, policy: str) -> None:
        if self._reconciler is not None:
            self._reconciler.due(policy)

    def _all_due(self) -> None:
        for policy in list(self.cluster.policies):
            self._due(policy)

    def _pods_are_known(self, policy: Policy) -> bool:
        assert policy.source is not None
        return self._census.synced.is_set() and self._watches.covers({policy.source.selector})

    def _report(self, policy: str, found: Findings | None) -> None:
        self._statuses.take(policy, found)

    def _healthy(self) -> str | None:
        return None if self._watches.alive else "a watch has ended"

    def _ready(self) -> str | None:
        return None if self._census.complete else "the first lists are not complete"


def own_identity() -> str:
    """Who holds the Lease. In a pod its name: a container that is restarted leads at once, as it did before."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}_{uuid4().hex[:8]}"


def own_namespace() -> str:
    """The namespace this pod is in; ``default`` outside of a cluster."""
    if name := os.environ.get("POD_NAMESPACE"):
        return name
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text().strip() or "default"
    return "default"


def _address(host: str, port: int) -> str:
    host = host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
