"""Placement: *where* a released request goes.

A request goes to its target if that is a candidate, else to the cheapest candidate (scheduling.md, *Selection*). What
a worker costs is what it has yet to do: the tokens of its requests in prefill, and the cache blocks its requests in
decode hold. The selector keeps that account itself, of every request it placed, with a session or without.

Pure and single-threaded by contract, like the classifier. A pick among all live workers costs a look at the cheapest
one; only a pick among a subset looks at each of its members.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from sortedcontainers import SortedList

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank


class Target(NamedTuple):
    """The worker a request would like; a ``rank`` of None leaves the rank to the selector."""

    worker: str
    rank: int | None


@dataclass(slots=True)
class _Load:
    """What one request costs its worker; ``cost`` is in tokens."""

    worker: WorkerRank
    context_tokens: int
    block_size: int
    decoding: bool = False

    @property
    def cost(self) -> int:
        if not self.decoding:
            return self.context_tokens
        return -(-self.context_tokens // self.block_size) * self.block_size


class Selector:
    """Picks workers and accounts for the load of what it picked."""

    def __init__(self, snapshot: CapacitySnapshot | None = None) -> None:
        self._loads: dict[str, _Load] = {}
        self._costs: dict[WorkerRank, int] = {}
        """Cost of every worker that has requests, live or not."""
        self._live: frozenset[WorkerRank] = frozenset()
        self._cheapest: SortedList[tuple[int, WorkerRank]] = SortedList()
        self._block_sizes: dict[WorkerRank, int] = {}
        self.snapshot(snapshot or CapacitySnapshot())

    def snapshot(self, snapshot: CapacitySnapshot) -> None:
        """Take a newer snapshot: its live workers are the candidates from now on."""
        self._live = snapshot.live
        self._block_sizes = {worker.id: worker.block_size for worker in snapshot.workers}
        self._cheapest = SortedList((self.cost(worker), worker) for worker in self._live)

    def cost(self, worker: WorkerRank) -> int:
        """Tokens ``worker`` has in prefill plus those its requests in decode hold, in whole blocks."""
        return self._costs.get(worker, 0)

    def pick(
        self, target: Target | WorkerRank | None = None, subset: Collection[WorkerRank] | None = None
    ) -> WorkerRank | None:
        """The worker for a request, out of the live ones in ``subset`` (None: all); None when there is none."""
        if target is not None:
            if target.rank is not None:
                wanted = WorkerRank(target.worker, target.rank)
                if wanted in self._live and (subset is None or wanted in subset):
                    return wanted
            else:
                ranks = [worker for worker in self._candidates(subset) if worker.worker == target.worker]
                if ranks:
                    return min(ranks, key=self._by_cost)
        if subset is None:
            return self._cheapest[0][1] if self._cheapest else None
        return min(self._candidates(subset), key=self._by_cost, default=None)

    def started(self, request: str, worker: WorkerRank, context_tokens: int) -> None:
        """A request went to ``worker`` and is in prefill there; ids are unique among those not ended."""
        assert request not in self._loads
        load = _Load(worker, context_tokens, self._block_sizes.get(worker, 1))
        self._loads[request] = load
        self._book(worker, load.cost)

    def responding(self, request: str, worker: WorkerRank | None = None) -> None:
        """Prefill is over; the request decodes on ``worker`` where that turned out to be another one."""
        load = self._loads.get(request)
        if load is None:
            return
        before = load.cost
        load.decoding = True
        if worker is not None and worker != load.worker:
            self._book(load.worker, -before)
            load.worker = worker
            load.block_size = self._block_sizes.get(worker, 1)
            before = 0
        self._book(load.worker, load.cost - before)

    def progress(self, request: str, context_tokens: int) -> None:
        """The live context of a request has grown to ``context_tokens``."""
        load = self._loads.get(request)
        if load is None or context_tokens <= load.context_tokens:
            return
        before = load.cost
        load.context_tokens = context_tokens
        if load.cost != before:
            self._book(load.worker, load.cost - before)

    def ended(self, request: str) -> None:
        """A request ended, however; what it cost is taken back."""
        load = self._loads.pop(request, None)
        if load is not None:
            self._book(load.worker, -load.cost)

    def _candidates(self, subset: Collection[WorkerRank] | None) -> Collection[WorkerRank]:
        return self._live if subset is None else self._live.intersection(subset)

    def _by_cost(self, worker: WorkerRank) -> tuple[int, WorkerRank]:
        return self.cost(worker), worker

    def _book(self, worker: WorkerRank, tokens: int) -> None:
        before = self._costs.get(worker, 0)
        after = before + tokens
        if after:
            self._costs[worker] = after
        else:
            self._costs.pop(worker, None)
        if worker in self._live:
            self._cheapest.remove((before, worker))
            self._cheapest.add((after, worker))
