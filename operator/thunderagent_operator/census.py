"""Lists of names, compared with what the watches said: whether a first list is complete, and what is gone unseen.

A watch alone tells neither. kopf says that it is ready before it has listed anything, and an object that was deleted
while no watch was open is never mentioned again. So names (not objects) are listed at the start until the watches
have delivered each of them, then once a minute, and at once when a watch has begun anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from kubernetes.aio.client import ApiException

from thunderagent_epp.telemetry import logs
from thunderagent_operator.api import PODS, POLICIES, POOLS, Api, ApiError, Kind
from thunderagent_operator.cluster import Cluster
from thunderagent_operator.handlers import Watches

log = logs.logger("operator")

INTERVAL_SECONDS: Final = 60.0
CATCH_UP_SECONDS: Final = 0.25
"""Between two lists while a watch has not delivered what is there."""
FAILED_SECONDS: Final = 2.0


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
        self._listed_at: float | None = None

    def listed_age_seconds(self) -> float | None:
        """Time since the API last answered all lists; None before the first time."""
        return None if self._listed_at is None else time.monotonic() - self._listed_at

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
                wait = FAILED_SECONDS
                self._log(_text(error))
            else:
                self._log(None)
                wait = CATCH_UP_SECONDS if missing else INTERVAL_SECONDS
                if not missing and not self.synced.is_set():
                    self.synced.set()
                    self._caught_up()
            if wait != INTERVAL_SECONDS:
                await asyncio.sleep(wait)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wanted.wait()

    async def _take(self) -> int:
        """One round: follow what the policies select, then compare everything. Returns how much is missing."""
        missing = await self._compare(POLICIES, "") + await self._compare(POOLS, "")
        selectors = self._cluster.selectors()
        if missing == 0 and not self._watches.covers(selectors):
            self.synced.clear()
            await self._watches.select(selectors)
        if selectors:
            missing += await self._compare(PODS, self._watches.pod_filter)
        self._listed_at = time.monotonic()
        return missing

    async def _compare(self, kind: Kind, label_selector: str) -> int:
        began = time.monotonic()
        names: dict[str, str] = {}
        for namespace in self._namespaces:
            listed = await self._api.names(kind, namespace, label_selector)
            if listed is None and kind is POLICIES:
                raise ApiException(status=404, reason="the ThunderAgentPolicy CRD is not installed")
            names |= listed or {}
        return len(self._cluster.compare(kind, names, began))

    def _log(self, problem: str | None) -> None:
        """Say once that the API does not answer, and once that it does."""
        if problem != self._problem:
            if problem is not None:
                log.warning("the API cannot be listed; it is tried again", problem=problem)
            elif self._problem is not None:
                log.info("the API can be listed again")
        self._problem = problem


def _text(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return f"{type(error).__name__}: {error}"
