"""Room that is being handed out: tokens left per worker, and the worker with most of them at any time."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from math import inf

from thunderagent_epp.scheduling.capacity import WorkerRank


class Rooms:
    """Tokens left per worker, and at any time the worker with most of them (ties: the smaller worker)."""

    def __init__(self, room: Mapping[WorkerRank, int]) -> None:
        self._room = dict(room)
        self._heap = [(-left, worker) for worker, left in room.items()]
        heapify(self._heap)

    def of(self, worker: WorkerRank) -> float:
        """Tokens left on one worker, none on one that is not here or dropped out."""
        return self._room.get(worker, -inf)

    def largest(self) -> WorkerRank | None:
        """The worker with most left; None when every one dropped out."""
        while self._heap:
            negative_left, worker = self._heap[0]
            if self._room.get(worker) == -negative_left:
                return worker
            heappop(self._heap)  # an entry from before its worker's last `take`
        return None

    def take(self, worker: WorkerRank, tokens: int, keep_above: float = -inf) -> None:
        """Use up ``tokens`` of a worker's room; left with ``keep_above`` or less, it drops out."""
        left = self._room[worker] - tokens
        if left > keep_above:
            self._room[worker] = left
            heappush(self._heap, (-left, worker))
        else:
            del self._room[worker]
