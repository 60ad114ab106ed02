"""A kopf operator in a thread and event loop of its own, kept running until it is stopped.

kopf does the listing and watching. It stops by cancelling every task in its loop, and it ends for good on what it
takes for a permanent failure (a role that is not bound yet, a login that fails while the API is away); so it gets a
loop it may tear down, and whoever started one can rely on it to be there. Handlers run in that thread: they pass what
they got on to the main loop and keep nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import kopf

from thunderagent_epp.telemetry import logs

log = logs.logger("operator")

# What it warns of is expected here (no signals in a thread, no right to see namespaces); its errors are the requests
# that fail while the API is away, each at each try, which the census says once.
logging.getLogger("kopf").setLevel(logging.CRITICAL)

RESTART_SECONDS: Final = 2.0
"""From kopf's end to its next start."""

STOP_SECONDS: Final = 10.0

LIST_CHUNK: Final = 100
"""Objects of a list held at once. Whole pods are large, and thousands of them at once would stay in memory for good."""


class _Endless:
    """Delays before each next try of a request to the API, without an end: kopf ends with its delays."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2, 3)
        while True:
            yield 5


class _NoDifferences(kopf.DiffBaseStorage):
    """Remembers nothing of an object: kopf copies each one it hears of to find what changed, and nobody asks."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


class KopfThread:
    """Runs the handlers of ``registry`` for some namespaces, or for all when there are none.

    ``label_selector`` is asked at each start; where it is not empty, the API server filters pods by it.
    Made and used in one thread.
    """

    def __init__(
        self,
        name: str,
        registry: kopf.OperatorRegistry,
        namespaces: Collection[str],
        label_selector: Callable[[], str] = str,
    ) -> None:
        self._name = name
        self._registry = registry
        self._namespaces = tuple(namespaces)
        self._label_selector = label_selector
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to list and watch."""
        assert not self.alive, "started once"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name=f"kopf-{self._name}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End it, and wait until nothing more will be handled; one that hangs is left behind to end when it can."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join, STOP_SECONDS)
            if thread.is_alive():
                log.warning("watching does not end; it is left behind", what=self._name)

    def _run(self, stop: threading.Event) -> None:
        said: str | None = None
        while not stop.is_set():
            try:
                asyncio.run(
                    kopf.operator(
                        registry=self._registry,
                        settings=self._settings(),
                        clusterwide=not self._namespaces,
                        namespaces=self._namespaces,
                        standalone=True,
                        stop_flag=stop,
                    )
                )
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                say = log.debug if problem == said else log.warning
                say("watching ended; it begins again", what=self._name, problem=problem)
                said = problem
            stop.wait(RESTART_SECONDS)

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        # It would ask for rights to list and watch CRDs and namespaces; the census sees to what comes and goes.
        settings.scanning.disabled = True
        settings.networking.error_backoffs = _Endless()
        settings.networking.request_timeout = 30.0
        settings.networking.connect_timeout = 5.0
        settings.persistence.diffbase_storage = _NoDifferences()
        settings.watching.chunk_size = LIST_CHUNK
        # A watch that says nothing for so long may hang on a connection that is no more.
        settings.watching.server_timeout = 240
        settings.watching.client_timeout = 300.0
        settings.watching.reconnect_backoff = 0.2
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5
        if selector := self._label_selector():
            settings.watching.label_selectors["", "v1", "pods"] = selector
        return settings


def registry() -> kopf.OperatorRegistry:
    """A registry that logs in as `api.connect` does: by KUBECONFIG, as a pod, by the user's kubeconfig."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        as_pod = None if "KUBECONFIG" in os.environ else kopf.login_with_service_account(**given)
        return as_pod or kopf.login_with_kubeconfig(**given)

    return made
