"""Lists of names, compared with what the watches said: whether a first list is complete, and what is gone unseen.

A watch alone tells neither. kopf says that it is ready before it has listed anything, an object that was deleted
while no watch was open is never mentioned again, and a watch that dies of an error of the API is not missed by kopf.
So names (not objects) are listed at the start until the watches
have delivered each of them, then once a minute, and at once when a watch has begun anew. The same rounds decide what
is watched: the kinds whose CRDs are there, and the pods that the policies select.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

from kubernetes.aio.client import ApiException

from thunderagent_epp.telemetry import logs
from thunderagent_operator.api import PODS, POLICIES, POOLS, Api, ApiError, Kind, Listed, error_text
from thunderagent_operator.cluster import Cluster
from thunderagent_operator.handlers import Watches

log = logs.logger("operator")

INTERVAL_SECONDS: Final = 60.0
CATCH_UP_SECONDS: Final = 0.25
"""Between two lists while a watch has not delivered what is there."""
FAILED_SECONDS: Final = 2.0
LOOKED_FOR_SECONDS: Final = 2.0
"""Between two looks while a policy refers to an InferencePool and there is no CRD of InferencePools."""
STUCK_SECONDS: Final = 15.0
"""A watch that delivers nothing for so long of what it lacks is begun anew."""


class Census:
    """Lists until cancelled. ``synced`` tells that what is known is what there is; ``caught_up`` is called then."""

    def __init__(
        self,
        api: Api,
        cluster: Cluster,
        watches: Watches,
        namespaces: Collection[str],
        caught_up: Callable[[], None],
    ) -> None:
        self._caught_up = caught_up
        self._api = api
        self._cluster = cluster
        self._watches = watches
        self._namespaces: tuple[str | None, ...] = tuple(sorted(namespaces)) or (None,)
        self._wanted = asyncio.Event()
        self._problem: str | None = None
        self.synced = asyncio.Event()
        self._missing: dict[Kind, tuple[int, float]] = {}
        """How many objects a watch has not delivered, and since when it is so many."""
        self._stale: dict[Kind, tuple[Mapping[str, str], float]] = {}
        """Objects of which a list showed another version than is known, with the known one, and since when."""
        self.complete = False
        """Whether everything was known at least once."""
        self._listed_at: float | None = None

    def listed_age_seconds(self) -> float | None:
        """Time since the API last answered all lists; None before the first time."""
        return None if self._listed_at is None else asyncio.get_running_loop().time() - self._listed_at

    def soon(self) -> None:
        """List again without waiting for the minute."""
        self._wanted.set()

    async def run(self) -> None:
        """List, compare, wait."""
        while True:
            self._wanted.clear()
            try:
                missing = await self._take()
            except ApiError as error:
                wait: float | None = FAILED_SECONDS
                self._log(error_text(error))
            else:
                self._log(None)
                wait = CATCH_UP_SECONDS if missing else None
                if not missing and not self.synced.is_set():
                    self.complete = True
                    self.synced.set()
                    self._caught_up()
            await (self._rest() if wait is None else asyncio.sleep(wait))

    async def _rest(self) -> None:
        """Wait for the next minute, or until there is reason to look sooner."""
        clock = asyncio.get_running_loop().time
        until = clock() + (STUCK_SECONDS if self._stale else INTERVAL_SECONDS)
        while not self._wanted.is_set() and clock() < until:
            if POOLS not in self._watches.kinds and self._cluster.lacks_pools():
                await asyncio.sleep(LOOKED_FOR_SECONDS)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKED_FOR_SECONDS):
                    await self._wanted.wait()

    async def _take(self) -> int:
        """One round: follow what there is and what is selected, then compare. Returns how much is missing."""
        kinds = await self._api.served((POLICIES, POOLS))
        if kinds != self._watches.kinds:
            await self._watches.watch(kinds)
        if POLICIES not in kinds:
            raise ApiException(status=404, reason="the ThunderAgentPolicy CRD is not installed")
        missing = 0
        for kind in (POLICIES, POOLS):
            missing += await self._compare(kind, "") if kind in kinds else 0
        selectors = self._cluster.selectors()
        if missing == 0 and not self._watches.covers(selectors):
            self.synced.clear()
            await self._watches.select(selectors)
        if selectors:
            missing += await self._compare(PODS, self._watches.pod_filter)
        self._listed_at = asyncio.get_running_loop().time()
        return missing

    async def _compare(self, kind: Kind, label_selector: str) -> int:
        began = asyncio.get_running_loop().time()
        listed: dict[str, Listed] = {}
        for namespace in self._namespaces:
            listed |= await self._api.names(kind, namespace, label_selector)
        found = self._cluster.compare(kind, listed, began)
        if self._is_stuck(kind, len(found.missing), began) or self._is_dead(kind, found.stale, began):
            log.warning("a watch does not deliver what is there; it begins anew", kind=kind.plural)
            self._missing.pop(kind, None)
            self._stale.pop(kind, None)
            await self._watches.begin_anew(kind)
        return len(found.missing)

    def _is_stuck(self, kind: Kind, missing: int, now: float) -> bool:
        """Whether a watch has long delivered nothing of what is missing."""
        before, since = self._missing.get(kind, (0, now))
        if not missing:
            self._missing.pop(kind, None)
        elif not before or missing < before:
            self._missing[kind] = (missing, now)
        return bool(missing) and now - since > STUCK_SECONDS

    def _is_dead(self, kind: Kind, stale: Mapping[str, str], now: float) -> bool:
        """Whether a watch has long delivered nothing of what a list showed as changed."""
        before, since = self._stale.get(kind, ({}, now))
        still = {key: version for key, version in before.items() if stale.get(key) == version}
        if still:
            return now - since > STUCK_SECONDS
        if stale:
            self._stale[kind] = (stale, now)
        else:
            self._stale.pop(kind, None)
        return False

    def _log(self, problem: str | None) -> None:
        """Say once that the API does not answer, and once that it does."""
        if problem != self._problem:
            if problem is not None:
                log.warning("the API cannot be listed; it is tried again", problem=problem)
            elif self._problem is not None:
                log.info("the API can be listed again")
        self._problem = problem
