"""Workers and what they can hold, as one immutable value.

A snapshot is the whole truth about the workers at one moment, never a delta (architecture.md, rule 4).
Feeds make them, the classifier and the selector read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class WorkerRank(NamedTuple):
    """Names one data-parallel rank of one worker; everything is charged and placed per rank.

    Orders by (worker, rank), the tie-break of every decision. Prints as ``worker/rank``.
    """

    worker: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


class Role(StrEnum):
    """What a worker does in disaggregated serving; aggregated workers do both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "prefill-decode"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker rank as a feed reports it.

    ``endpoint`` is ``ip:port`` or ``[v6]:port``. ``capacity_tokens`` is what its KV cache holds, None while
    unknown: unknown is not zero. ``incarnation`` changes when the cache was lost (a restart): the worker of the
    same name is then a new one and the programs on it lose their place. ``block_size`` is in tokens.
    """

    id: WorkerRank
    endpoint: str = ""
    capacity_tokens: int | None = None
    live: bool = True
    role: Role = Role.BOTH
    incarnation: str = ""
    block_size: int = 16


@dataclass(frozen=True)
class CapacitySnapshot:
    """Every worker rank at one moment, ordered by (worker, rank); ids are unique.

    With ``liveness_known`` False no worker's ``live`` is to be believed and all count as live.
    Raises ValueError when two workers share an id.
    """

    workers: tuple[Worker, ...] = ()
    liveness_known: bool = True
    by_id: Mapping[WorkerRank, Worker] = field(init=False, repr=False, compare=False)
    live: frozenset[WorkerRank] = field(init=False, repr=False, compare=False)
    usable: Mapping[WorkerRank, int] = field(init=False, repr=False, compare=False)
    """Capacity in tokens of the workers that are live and whose capacity is known, in worker order."""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.workers, key=lambda worker: worker.id))
        by_id = {worker.id: worker for worker in ordered}
        if len(by_id) != len(ordered):
            raise ValueError("two workers share a name and rank")
        live = frozenset(worker.id for worker in ordered if worker.live or not self.liveness_known)
        usable = {
            worker.id: worker.capacity_tokens
            for worker in ordered
            if worker.id in live and worker.capacity_tokens is not None
        }
        object.__setattr__(self, "workers", ordered)
        object.__setattr__(self, "by_id", MappingProxyType(by_id))
        object.__setattr__(self, "live", live)
        object.__setattr__(self, "usable", MappingProxyType(usable))
