"""Asks workers what they can hold, and again, without end: `follow` and `forget` come from the handlers, `changed`
goes back to them, and `capacity` answers what is known at any time.

Theory of operation. Each followed worker has a time when it is due; a heap holds these times, and one loop takes the
earliest, so thousands of workers cost neither thousands of tasks nor thousands of timers. At most ``concurrency``
probes run at once. What is due next after a probe:

====================  ==========================================================================================
capacity told         after the policy's interval, one tenth up or down so that workers do not march in step; where
                      so many are followed that the process would do little else, later and a few together
answered, not told    after 1 s, then 2 s, 4 s, … up to the interval: the engine is still starting
failed                after 1 s, then 2 s, 4 s, … up to a minute, shortened by a random half at most
worker is not live    not until it is
new incarnation       at once
====================  ==========================================================================================

A capacity belongs to an incarnation. A probe that does not tell it leaves the last one of this incarnation in force
(kubernetes.md, *Capacity*) and shows in ``trouble``; a new incarnation knows nothing. An answer of a probe that began
before the incarnation changed is thrown away.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Final, NamedTuple, NoReturn

from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.telemetry import logs
from thunderagent_operator.probes.auto import probe_of
from thunderagent_operator.probes.http import Address, Fetch, ProbeError
from thunderagent_operator.probes.reading import Capacity, UnreadableError
from thunderagent_operator.telemetry import ProbeMetrics, ProbeResult

CONCURRENCY: Final = 32
RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 60.0
INTERVAL_SECONDS_MIN: Final = 0.1
CONFIRMATIONS_PER_SECOND_MAX: Final = 15.0
"""A KV cache does not change its size while its engine runs: asking again only confirms, and may take its time."""
TOGETHER_SECONDS: Final = 1.0
"""Confirmations that are put off anyway are made together, once in so long: to wake for each of them alone costs an
idle process three times as much."""

log = logs.logger("operator")


class ProbeKey(NamedTuple):
    """One rank as one policy (``namespace/name``) sees it: two policies may ask the same worker differently."""

    policy: str
    worker: WorkerRank


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """What to probe and how. ``engine`` is a policy's, not ``none``; ``engine_label`` the value of the pod's label."""

    address: Address
    incarnation: str
    live: bool = True
    engine: str = "auto"
    engine_label: str | None = None
    interval_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a worker. ``capacity`` None: unknown. ``trouble``: why the last probe did not tell; None: it
    did, or there was none yet."""

    capacity: Capacity | None = None
    trouble: str | None = None


_NOTHING: Final = Known()


@dataclass(slots=True, eq=False)
class _Followed:
    """One incarnation asked in one way. ``live`` and the interval alone change in the target of one."""

    target: ProbeTarget
    known: Known = _NOTHING
    due: float | None = None
    """When it is to be probed next; None while it is not, or is being probed. A heap entry of another time is void."""
    probing: bool = False
    misses: int = 0
    """Probes in a row that did not tell the capacity."""
    failing: bool = False


class Prober:
    """Follows workers while `run` runs. All of it belongs to one event loop.

    ``changed`` is called with a worker's key whenever `known` has another answer for it.
    """

    def __init__(
        self,
        fetch: Fetch,
        changed: Callable[[ProbeKey], None],
        metrics: ProbeMetrics,
        *,
        random: Random | None = None,
        concurrency: int = CONCURRENCY,
    ) -> None:
        self._fetch = fetch
        self._changed = changed
        self._metrics = metrics
        self._random = random or Random()
        self._slots = asyncio.Semaphore(concurrency)
        self._followed: dict[ProbeKey, _Followed] = {}
        self._failing = 0
        self._heap: list[tuple[float, int, ProbeKey, _Followed]] = []
        self._turn = count()
        self._sooner = asyncio.Event()
        metrics.watch(lambda: len(self._followed), lambda: self._failing)

    def follow(self, key: ProbeKey, target: ProbeTarget) -> None:
        """Probe a worker from now on, or from now on in this way. Costs nothing when nothing changed."""
        before = self._followed.get(key)
        if before is not None and before.target == target:
            return
        if before is not None and _asked_alike(before.target, target):
            self._retarget(key, before, target)
            return
        same_cache = before is not None and before.target.incarnation == target.incarnation
        # A new object, so that the answer of a probe that still runs finds nobody to tell.
        followed = _Followed(target, Known(before.known.capacity) if before and same_cache else _NOTHING)
        if before is not None:
            self._drop(before)
        self._followed[key] = followed
        if target.live:
            self._schedule(key, followed, 0)
        if before is not None and before.known != followed.known:
            self._changed(key)

    def forget(self, key: ProbeKey) -> None:
        """Probe a worker no longer, and know nothing of it."""
        followed = self._followed.pop(key, None)
        if followed is not None:
            self._drop(followed)

    def known(self, key: ProbeKey) -> Known:
        """What is known of a worker's incarnation that is followed now."""
        followed = self._followed.get(key)
        return _NOTHING if followed is None else followed.known

    async def run(self) -> NoReturn:
        """Probe what is followed until cancelled; then no probe runs any more."""
        async with asyncio.TaskGroup() as probes:
            while True:
                await self._slots.acquire()
                key, followed = await self._next_due()
                followed.due, followed.probing = None, True
                probes.create_task(self._probe(key, followed))

    async def _next_due(self) -> tuple[ProbeKey, _Followed]:
        clock = asyncio.get_running_loop().time
        while True:
            while self._heap and self._heap[0][3].due != self._heap[0][0]:
                heapq.heappop(self._heap)
            wait = self._heap[0][0] - clock() if self._heap else None
            if wait is not None and wait <= 0:
                _, _, key, followed = heapq.heappop(self._heap)
                return key, followed
            self._sooner.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._sooner.wait()

    async def _probe(self, key: ProbeKey, followed: _Followed) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            result, capacity, trouble = await self._ask(followed.target)
        finally:
            self._slots.release()
        self._metrics.ended(result, clock() - started)
        followed.probing = False
        if self._followed.get(key) is not followed or not followed.target.live:
            return
        self._learn(key, followed, result, capacity, trouble)
        self._schedule(key, followed, self._pause(followed))

    async def _ask(self, target: ProbeTarget) -> tuple[ProbeResult, Capacity | None, str | None]:
        plan = probe_of(target.engine, target.engine_label)
        try:
            question = next(plan)
            while True:
                question = plan.send(await self._fetch(target.address, question))
        except StopIteration as end:
            capacity: Capacity | None = end.value
            if capacity is None:
                return ProbeResult.UNKNOWN, None, "the worker does not tell its capacity"
            return ProbeResult.KNOWN, capacity, None
        except ProbeError as error:
            return error.result, None, str(error)
        except UnreadableError as error:
            return ProbeResult.UNREADABLE, None, str(error)
        except Exception as error:
            # One worker's answer must not end the probes of all others.
            log.exception("capacity probe broke", address=target.address)
            return ProbeResult.ERROR, None, f"{type(error).__name__} in the operator"
        finally:
            plan.close()

    def _learn(
        self, key: ProbeKey, followed: _Followed, result: ProbeResult, capacity: Capacity | None, trouble: str | None
    ) -> None:
        followed.misses = 0 if capacity is not None else followed.misses + 1
        failing = result not in (ProbeResult.KNOWN, ProbeResult.UNKNOWN)
        if failing != followed.failing:
            followed.failing = failing
            self._failing += 1 if failing else -1
            where = {"policy": key.policy, "worker": key.worker.worker, "rank": key.worker.rank}
            if failing:
                log.warning("capacity probe failed", **where, problem=trouble)
            else:
                log.info("capacity probe works again", **where)
        known = Known(followed.known.capacity if capacity is None else capacity, trouble)
        if known != followed.known:
            followed.known = known
            self._changed(key)

    def _pause(self, followed: _Followed) -> float:
        """Seconds until a worker is probed again, by the table above."""
        wanted = max(followed.target.interval_seconds, INTERVAL_SECONDS_MIN)
        interval = max(wanted, len(self._followed) / CONFIRMATIONS_PER_SECOND_MAX)
        if not followed.misses:
            # Stretched by chance, else thousands that were found at once would be asked again at once.
            stretched = self._random.uniform(wanted, 2 * interval - wanted)
            pause = stretched * self._random.uniform(0.9, 1.1)
            if interval == wanted:
                return pause
            now = asyncio.get_running_loop().time()
            return math.ceil((now + pause) / TOGETHER_SECONDS) * TOGETHER_SECONDS - now
        longest = max(interval, RETRY_SECONDS_MAX) if followed.failing else interval
        retry = RETRY_SECONDS * 2.0 ** min(followed.misses - 1, 20)
        return min(longest, retry) * self._random.uniform(0.5, 1.0)

    def _retarget(self, key: ProbeKey, followed: _Followed, target: ProbeTarget) -> None:
        """Take over a target that differs in liveness or interval only."""
        revived = target.live and not followed.target.live
        followed.target = target
        if not target.live:
            self._drop(followed)
            if followed.known.trouble is not None:
                followed.known = Known(followed.known.capacity)
                self._changed(key)
        elif not followed.probing:
            self._schedule(key, followed, 0 if revived else self._pause(followed))

    def _schedule(self, key: ProbeKey, followed: _Followed, seconds: float) -> None:
        followed.due = asyncio.get_running_loop().time() + seconds
        heapq.heappush(self._heap, (followed.due, next(self._turn), key, followed))
        if self._heap[0][3] is followed:
            self._sooner.set()

    def _drop(self, followed: _Followed) -> None:
        """Take it out of the plan and of the count of the failing."""
        followed.due = None
        followed.misses = 0
        if followed.failing:
            followed.failing = False
            self._failing -= 1


def _asked_alike(one: ProbeTarget, other: ProbeTarget) -> bool:
    """Whether two targets are the same cache, asked in the same way."""
    return replace(one, live=other.live, interval_seconds=other.interval_seconds) == other
