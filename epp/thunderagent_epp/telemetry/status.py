"""What the picker says about itself when asked: the values behind `/state`, `/readyz` and the gauges of `/metrics`.

The host of the classifier fills these in when somebody looks, so the path of a request never keeps them up to
date; `http.py` and `metrics.py` only print them. Unknown is None here, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, WorkerRank
from thunderagent_epp.scheduling.decisions import State
from thunderagent_epp.snapshot import Snapshot


class Readiness(StrEnum):
    """Whether requests are taken, and if not why; the text is what `/readyz` answers."""

    OK = "ok"
    NO_SNAPSHOT = "no_snapshot"
    DRAINING = "draining"
    POLICY_NOT_FOUND = "policy_not_found"
    """The operator knows no policy of this name."""
    POLICY_DELETED = "policy_deleted"
    """The policy is gone; requests are still placed by its last snapshot."""


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """The snapshot in force and the seconds since it was applied."""

    id: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker rank: ``capacity_tokens`` is None while unknown, ``used_tokens`` is what the ledger charges."""

    worker: str
    rank: int
    endpoint: str
    role: Role
    live: bool
    capacity_tokens: int | None
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """The numbers of one moment; cheap to make, no session is looked at.

    ``programs`` counts by (status, lifecycle), for instance ``("acting", "paused")``; a pair left out is 0.
    ``holds`` are requests waiting for their release and ``held_bytes`` their bodies. ``bytes_per_token`` is by
    model, as learned; the exporter caps the number of models.
    """

    readiness: Readiness = Readiness.NO_SNAPSHOT
    snapshot: SnapshotStatus | None = None
    workers: Sequence[WorkerStatus] = ()
    programs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    waiting: int = 0
    tracked: int = 0
    holds: int = 0
    held_bytes: int = 0
    open_streams: int = 0
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of `/state` (extproc.md, *Process*).

    ``policy`` holds the parameters by their scheduling.md names, None before the first snapshot; ``state`` is what
    the admission policy knows, printed key by key as replay's ``dump`` prints it.
    """

    readiness: Readiness = Readiness.NO_SNAPSHOT
    policy: Mapping[str, Any] | None = None
    snapshot: SnapshotStatus | None = None
    holds: int = 0
    held_bytes: int = 0
    workers: Sequence[WorkerStatus] = ()
    state: State = field(default_factory=lambda: State(programs={}, used={}, waiting=(), tracked=0))


def policy_parameters(snapshot: Snapshot) -> dict[str, Any]:
    """Everything a snapshot's policy sets, in one flat mapping of snake_case names, durations in seconds."""
    terms = snapshot.disaggregation
    return {
        **snapshot.admission.model_dump(by_alias=False),
        **(
            {}
            if terms is None
            else {"topology": "Disaggregated", "retention_pool": terms.retention_pool, "handoff": terms.handoff}
        ),
        "session_headers": snapshot.requests.session_headers,
        "strip_body_fields": snapshot.requests.strip_body_fields,
    }


def worker_statuses(capacity: CapacitySnapshot, used: Callable[[WorkerRank], int]) -> tuple[WorkerStatus, ...]:
    """Every worker rank of a snapshot, in worker order, with the tokens charged to it."""
    return tuple(
        WorkerStatus(
            worker=worker.id.worker,
            rank=worker.id.rank,
            endpoint=worker.endpoint,
            role=worker.role,
            live=worker.id in capacity.live,
            capacity_tokens=worker.capacity_tokens,
            used_tokens=used(worker.id),
        )
        for worker in capacity.workers
    )
