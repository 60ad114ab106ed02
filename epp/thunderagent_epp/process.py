"""One picker process: puts feed, director, servers and signals together, and takes them apart in order.

`cli.py` calls `serve` with what the user asked for. Nothing is decided here but the order: the feed's first look at
its source comes before any port is bound, so that a bad file ends the command instead of a half-started server; and
at the end readiness goes before requests are refused, and running answers go last (extproc.md, *Process*).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol
from uuid import uuid4

import grpc

from thunderagent_epp.extproc.conformance import ConformancePicker
from thunderagent_epp.extproc.director import DEFAULT_MAX_HELD_BYTES, Director
from thunderagent_epp.extproc.health import EXT_PROC_SERVICE, Health
from thunderagent_epp.extproc.ports import listen, named_by
from thunderagent_epp.extproc.server import DEFAULT_MAX_BODY_BYTES, Server
from thunderagent_epp.extproc.tls import server_credentials
from thunderagent_epp.feed.operator_feed import OperatorFeed, Unready
from thunderagent_epp.feed.static_file import StaticFileFeed
from thunderagent_epp.feed.tls import TlsFiles
from thunderagent_epp.feed.wire import Counters
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.http import status_server
from thunderagent_epp.telemetry.logs import logger
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.signals import stop_signals
from thunderagent_epp.telemetry.status import Readiness

_log = logger("extproc")


class Feed(Protocol):
    """Where snapshots come from while the picker runs."""

    async def run(self) -> NoReturn:
        """Publish every snapshot until cancelled."""


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """Snapshots from a file, by what ``feed`` makes of its path, of what takes the snapshots and of the metrics.

    Whoever adds something to what the file says, such as capacities learnt from the workers, puts another one here.
    """

    path: Path
    feed: Callable[[Path, Callable[[Snapshot], None], Metrics], Feed] = StaticFileFeed


@dataclass(frozen=True, slots=True)
class OperatorFeedOptions:
    """Snapshots from an operator at ``target`` (``host:port``), for the policy ``namespace/name``.

    ``tls`` None: in plaintext. ``identity`` is how the operator tells this picker from others, None for the pod's
    or host's name and something random.
    """

    target: str
    policy: str
    tls: TlsFiles | None = None
    identity: str | None = None


@dataclass(frozen=True, slots=True)
class Conformance:
    """No snapshots: requests say where they go, as the Gateway API Inference Extension's conformance suite has it.

    ``endpoints`` are the pool's, by host and port; none: whatever a request names.
    """

    endpoints: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PickerOptions:
    """What a picker process is started with.

    An empty ``host`` is every interface. Ports are 0 to 65535, 0 takes a free one. Byte limits are > 0, durations are
    seconds ≥ 0. Without ``tls_certificate`` the picker's port has a self-signed one, with ``plaintext`` no TLS.
    """

    source: PolicyFile | OperatorFeedOptions | Conformance
    host: str = ""
    grpc_port: int = 9002
    health_port: int = 9003
    http_port: int = 9090
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    plaintext: bool = False
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_held_bytes: int = DEFAULT_MAX_HELD_BYTES
    drain_delay_seconds: float = 5.0
    drain_timeout_seconds: float = 600.0


async def serve(options: PickerOptions) -> None:
    """Run a picker until SIGTERM or SIGINT, then drain it; a second signal ends it at once.

    Raises PolicyFileError, FeedTlsError, CertificateError, ValueError or OSError when it cannot be started as asked.
    """
    metrics = Metrics()
    health = Health()
    await health.set_ready(False)
    readiness = asyncio.Event()
    picker, works = _picker(options, metrics, readiness.set)
    metrics.watch(picker.gauges)
    credentials = None if options.plaintext else server_credentials(options.tls_certificate, options.tls_key)
    server = Server(
        picker,
        metrics,
        max_body_bytes=options.max_body_bytes,
        services=[lambda grpc_server: health.add_to(grpc_server, EXT_PROC_SERVICE)],
    )
    picker.watch_streams(lambda: server.open_streams)
    status = status_server(metrics, picker.status, lambda: picker.readiness)
    host = options.host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")

    async with contextlib.AsyncExitStack() as stack:
        with named_by("--http-port", host):
            http_port = await status.start(options.host, options.http_port)
        stack.push_async_callback(status.stop)
        with named_by("--health-port", host):
            health_port = await _serve_health(health, host, options.health_port, stack)
        with named_by("--grpc-port", host):
            grpc_port = await server.start(host, options.grpc_port, credentials)
        stack.push_async_callback(server.stop, 0)
        _log.info(
            "listening",
            host=host,
            grpc_port=grpc_port,
            health_port=health_port,
            http_port=http_port,
            tls=not options.plaintext,
        )
        with stop_signals() as stop:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    *(running.create_task(work()) for work in works),
                    running.create_task(_follow_readiness(picker, health, readiness)),
                ]
                await stop.wait()
                stop.clear()
                drained = running.create_task(_drain(options, picker, server, readiness))
                stopped = running.create_task(stop.wait())
                await asyncio.wait((drained, stopped), return_when=asyncio.FIRST_COMPLETED)
                for task in (*tasks, drained, stopped):
                    task.cancel()
        _log.info("stopped")


def _picker(
    options: PickerOptions, metrics: Metrics, readiness_changed: Callable[[], None]
) -> tuple[Director | ConformancePicker, list[Callable[[], Coroutine[Any, Any, None]]]]:
    """The picker that was asked for, and what is to run beside it until it stops."""
    if isinstance(options.source, Conformance):
        fixture = ConformancePicker(metrics, options.source.endpoints)
        readiness_changed()
        _log.warning("conformance mode: clients choose the endpoints; not for real traffic")
        return fixture, [fixture.run]
    director = Director(metrics, max_held_bytes=options.max_held_bytes)

    def apply(snapshot: Snapshot) -> None:
        director.apply(snapshot)
        readiness_changed()

    return director, [_feed(options.source, director, metrics, apply, readiness_changed).run, director.run]


def _feed(
    source: PolicyFile | OperatorFeedOptions,
    director: Director,
    metrics: Metrics,
    apply: Callable[[Snapshot], None],
    readiness_changed: Callable[[], None],
) -> Feed:
    """Where snapshots come from."""
    if isinstance(source, PolicyFile):
        return source.feed(source.path, apply, metrics)

    def unready(reason: Unready | None) -> None:
        director.set_unready(None if reason is None else Readiness(reason.value))
        readiness_changed()

    feed = OperatorFeed(
        source.target,
        source.policy,
        source.identity or f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid4().hex[:8]}",
        apply,
        counters=lambda: Counters.of(director.gauges()),
        unready=unready,
        tls=source.tls,
    )
    metrics.watch_feed(lambda: feed.connected, lambda: feed.refusals)
    return feed


async def _drain(
    options: PickerOptions, picker: Director | ConformancePicker, server: Server, readiness: asyncio.Event
) -> None:
    """Let go in order: readiness, then holds and new requests, then the answers that still run."""
    _log.info("draining", delay_seconds=options.drain_delay_seconds, timeout_seconds=options.drain_timeout_seconds)
    picker.retire()
    readiness.set()
    # Until every proxy has seen the change of readiness, new requests still come, and are served.
    await asyncio.sleep(options.drain_delay_seconds)
    picker.drain()
    await server.drain(options.drain_timeout_seconds)


async def _follow_readiness(picker: Director | ConformancePicker, health: Health, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await health.set_ready(picker.readiness is Readiness.OK)


async def _serve_health(health: Health, host: str, port: int, stack: contextlib.AsyncExitStack) -> int:
    """Serve health by itself, in plaintext: a kubelet's gRPC probes speak no TLS. Returns the port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health.add_to(server)
    bound = listen(server, host, port)
    await server.start()
    stack.push_async_callback(server.stop, None)
    return bound
