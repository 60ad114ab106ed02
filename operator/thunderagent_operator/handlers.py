"""The kopf handlers: thin, they only pass on what a watch says.

Plain events and nothing else: no handler that would make kopf write a finalizer or an annotation, and no index, whose
cost grows with the square of the pods. Policies and InferencePools are watched as long as the operator runs. Pods are
watched by a second kopf, filtered at the server by what the policies select, and begun anew with another filter when
a policy selects what the present one does not let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import kopf

from thunderagent_epp.telemetry import logs
from thunderagent_operator.api import PODS, POLICIES, POOLS, Kind
from thunderagent_operator.cluster import Body
from thunderagent_operator.kopf_thread import KopfThread, registry
from thunderagent_operator.selectors import PodSelector, common_filter

log = logs.logger("operator")

Deliver = Callable[[Kind, str | None, Body], None]
"""Called in the main loop with kind, event type and object."""


class Watches:
    """The two kopf operators. ``deliver`` is called in the loop that made this."""

    def __init__(self, namespaces: Collection[str], deliver: Deliver) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._selected: frozenset[PodSelector] = frozenset()
        self.pod_filter = ""
        policies, pods = registry(), registry()
        self._pass_on(policies, POLICIES)
        self._pass_on(policies, POOLS)
        self._pass_on(pods, PODS)
        self._policies = KopfThread("policies", policies, namespaces)
        self._pods = KopfThread("pods", pods, namespaces, lambda: self.pod_filter)

    @property
    def alive(self) -> bool:
        """Whether what should be watched is."""
        return self._policies.alive and (self._pods.alive or not self._selected)

    def start(self) -> None:
        """Watch policies and InferencePools; pods as soon as there is something to select."""
        self._policies.start()

    async def stop(self) -> None:
        """Watch nothing any more."""
        await asyncio.gather(self._policies.stop(), self._pods.stop())

    def covers(self, selectors: Collection[PodSelector]) -> bool:
        """Whether the pods that these select are watched."""
        return self._selected.issuperset(selectors)

    async def select(self, selectors: Collection[PodSelector]) -> None:
        """Watch the pods that these select."""
        await self._pods.stop()
        self._selected = frozenset(selectors)
        if self._selected:
            self.pod_filter = common_filter(self._selected)
            log.info("watching pods", selector=self.pod_filter or "every pod")
            self._pods.start()

    def _pass_on(self, to: kopf.OperatorRegistry, kind: Kind) -> None:
        async def pass_on(*, event: kopf.RawEvent, **_: Any) -> None:
            self._loop.call_soon_threadsafe(self._deliver, kind, event["type"], event["object"])

        kopf.on.event(kind.group, kind.version, kind.plural, registry=to)(pass_on)
