"""The kopf handlers: thin, they only pass on what a watch says.

Plain events and nothing else: no handler that would make kopf write a finalizer or an annotation, and no index, whose
cost grows with the square of the pods. Policies and InferencePools are watched by one kopf, and begun anew when their
CRDs come and go. Pods are watched by a second one, filtered at the server by what the policies select, and begun anew
with another filter when a policy selects what the present one does not let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import kopf

from thunderagent_epp.telemetry import logs
from thunderagent_operator.api import PODS, Kind
from thunderagent_operator.cluster import Body
from thunderagent_operator.kopf_thread import KopfThread, registry
from thunderagent_operator.selectors import PodSelector, common_filter

log = logs.logger("operator")

Deliver = Callable[[Kind, str | None, Body], None]
"""Called in the main loop with kind, event type and object."""


class Watches:
    """The two kopf operators; nothing is watched at first. ``deliver`` is called in the loop that made this."""

    def __init__(self, namespaces: Collection[str], deliver: Deliver) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._namespaces = namespaces
        self._selected: frozenset[PodSelector] = frozenset()
        self.pod_filter = ""
        self.kinds: frozenset[Kind] = frozenset()
        """What is watched beside pods."""
        self._objects: KopfThread | None = None
        self._pods = KopfThread("pods", self._registry(PODS), namespaces, lambda: self.pod_filter)

    @property
    def alive(self) -> bool:
        """Whether what should be watched is."""
        return (self._objects is None or self._objects.alive) and (self._pods.alive or not self._selected)

    async def watch(self, kinds: Collection[Kind]) -> None:
        """Watch the objects of exactly these kinds, which the API has, from a list of them on. Pods are apart."""
        if self._objects is not None:
            await self._objects.stop()
        self.kinds, self._objects = frozenset(kinds), None
        if kinds:
            self._objects = KopfThread("policies", self._registry(*kinds), self._namespaces)
            self._objects.start()

    async def stop(self) -> None:
        """Watch nothing any more."""
        objects = () if self._objects is None else (self._objects.stop(),)
        await asyncio.gather(*objects, self._pods.stop())

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

    async def begin_anew(self, kind: Kind) -> None:
        """Watch a kind that is watched from a new list on."""
        if kind is PODS:
            await self.select(self._selected)
        else:
            await self.watch(self.kinds)

    def _registry(self, *kinds: Kind) -> kopf.OperatorRegistry:
        made = registry()
        for kind in kinds:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=made)(self._pass_on(kind))
        return made

    def _pass_on(self, kind: Kind) -> Callable[..., Coroutine[Any, Any, None]]:
        async def pass_on(*, event: kopf.RawEvent, **_: Any) -> None:
            self._loop.call_soon_threadsafe(self._deliver, kind, event["type"], event["object"])

        return pass_on
