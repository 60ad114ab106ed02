"""Snapshots, and what pickers answer them, as messages of the capacity feed, both ways.

Pure: the operator writes what `operator_feed.py` reads. Written is only what the model holds, so a message reads back
as it was. What is read comes from another process, perhaps of another version: what this version does not know is
ignored, what it would have to act upon and cannot makes the whole snapshot refused, with a reason a person can follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple

from pydantic import ValidationError

from thunderagent_epp.feed import capacity_feed_pb2 as pb
from thunderagent_epp.feed.spec import RequestsSpec
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.status import Gauges

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of one message in either direction; a snapshot takes about 100 bytes a worker rank."""

_ROLES: Final = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.BOTH: pb.ROLE_PREFILL_DECODE,
}
_RETENTION_POOLS: Final = {
    RetentionPool.DECODE: pb.Disaggregation.RETENTION_POOL_DECODE,
    RetentionPool.PREFILL: pb.Disaggregation.RETENTION_POOL_PREFILL,
    RetentionPool.BOTH: pb.Disaggregation.RETENTION_POOL_BOTH,
}
_HANDOFFS: Final = {
    Handoff.LLM_D: pb.Disaggregation.HANDOFF_LLM_D,
    Handoff.DYNAMO: pb.Disaggregation.HANDOFF_DYNAMO,
}
# Nothing said is what it was before there was the field; any other number is of a newer version.
_ROLES_READ: Final[Mapping[int, Role]] = {0: Role.BOTH, **{int(n): role for role, n in _ROLES.items()}}
_RETENTION_POOLS_READ: Final[Mapping[int, RetentionPool]] = {
    0: RetentionPool.DECODE,
    **{int(n): pool for pool, n in _RETENTION_POOLS.items()},
}
_HANDOFFS_READ: Final[Mapping[int, Handoff]] = {
    0: Handoff.LLM_D,
    **{int(n): handoff for handoff, n in _HANDOFFS.items()},
}


class SnapshotRefusedError(ValueError):
    """A snapshot that cannot be applied; the text says why and names the field."""


class Applied(NamedTuple):
    """Names the snapshot a picker has in force."""

    id: int
    content_hash: str


@dataclass(frozen=True, slots=True)
class Counters:
    """A picker's numbers of one moment, as its feed reports them.

    ``paused`` counts among ``programs``, ``waiting`` among the ``tracked`` requests. ``used`` is what the ledger
    charges each worker rank in tokens; ranks charged nothing are left out.
    """

    programs: int = 0
    paused: int = 0
    waiting: int = 0
    tracked: int = 0
    used: Mapping[WorkerRank, int] = field(default_factory=dict)

    @classmethod
    def of(cls, gauges: Gauges) -> Counters:
        """What the picker tells of itself, cut down to what the operator is told."""
        return cls(
            programs=sum(gauges.programs.values()),
            paused=sum(n for (_, lifecycle), n in gauges.programs.items() if lifecycle == Lifecycle.PAUSED),
            waiting=gauges.waiting,
            tracked=gauges.tracked,
            used={
                WorkerRank(worker.worker, worker.rank): worker.used_tokens
                for worker in gauges.workers
                if worker.used_tokens
            },
        )


def write_snapshot(snapshot: Snapshot) -> pb.Snapshot:
    """The message of a snapshot, with its content hash. Raises ValueError for a number that takes more than 64 bits."""
    message = pb.Snapshot(
        admission=pb.Admission(**snapshot.admission.model_dump(by_alias=False, exclude_none=True)),
        requests=_write_requests(snapshot.requests),
        workers=[
            pb.Worker(
                name=worker.id.worker,
                rank=worker.id.rank,
                endpoint=worker.endpoint,
                role=_ROLES[worker.role],
                capacity_tokens=worker.capacity_tokens,
                live=worker.live,
                incarnation=worker.incarnation,
                block_size=worker.block_size,
            )
            for worker in snapshot.capacity.workers
        ],
        liveness_unknown=not snapshot.capacity.liveness_known,
    )
    if snapshot.disaggregation is not None:
        message.disaggregation.CopyFrom(
            pb.Disaggregation(
                retention_pool=_RETENTION_POOLS[snapshot.disaggregation.retention_pool],
                handoff=_HANDOFFS[snapshot.disaggregation.handoff],
            )
        )
    message.content_hash = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
    message.id = snapshot.id
    return message


def read_snapshot(message: pb.Snapshot) -> Snapshot:
    """The snapshot of a message. Raises SnapshotRefusedError."""
    if message.id <= 0:
        raise SnapshotRefusedError(f"id: must be positive, not {message.id}")
    try:
        capacity = CapacitySnapshot(
            tuple(_read_worker(worker) for worker in message.workers), liveness_known=not message.liveness_unknown
        )
    except SnapshotRefusedError:
        raise
    except ValueError as error:
        raise SnapshotRefusedError(f"workers: {error}") from None
    return Snapshot(
        id=message.id,
        capacity=capacity,
        admission=_read_admission(message.admission),
        requests=_read_requests(message.requests),
        disaggregation=_read_disaggregation(message),
    )


def write_applied(applied: Applied | None) -> pb.Applied | None:
    """The message of what is in force; None, which leaves the field out, for nothing."""
    return None if applied is None else pb.Applied(id=applied.id, content_hash=applied.content_hash)


def read_applied(message: pb.Open | pb.Acknowledgement) -> Applied | None:
    """What the sender has in force."""
    return Applied(message.applied.id, message.applied.content_hash) if message.HasField("applied") else None


def write_counters(counters: Counters) -> pb.Counters:
    """The message of a picker's counters."""
    return pb.Counters(
        programs=counters.programs,
        paused=counters.paused,
        waiting=counters.waiting,
        tracked=counters.tracked,
        used=[
            pb.Charge(worker=worker.worker, rank=worker.rank, tokens=tokens) for worker, tokens in counters.used.items()
        ],
    )


def read_counters(message: pb.Counters) -> Counters:
    """A picker's counters."""
    return Counters(
        programs=message.programs,
        paused=message.paused,
        waiting=message.waiting,
        tracked=message.tracked,
        used={WorkerRank(charge.worker, charge.rank): charge.tokens for charge in message.used},
    )


def _write_requests(requests: RequestPolicy) -> pb.Requests:
    headers = requests.session_headers
    return pb.Requests(
        session_headers=None if headers is None else pb.SessionHeaders(names=headers),
        strip_body_fields=requests.strip_body_fields,
    )


def _read_admission(message: pb.Admission) -> AdmissionPolicy:
    given = {name: getattr(message, name) for name in AdmissionPolicy.model_fields if message.HasField(name)}
    try:
        return AdmissionPolicy.from_parameters(given)
    except ValidationError as error:
        raise SnapshotRefusedError(_reasons("admission", error)) from None


def _read_requests(message: pb.Requests) -> RequestPolicy:
    headers = list(message.session_headers.names) if message.HasField("session_headers") else None
    given = {"sessionHeaders": headers, "stripBodyFields": list(message.strip_body_fields)}
    try:
        return RequestsSpec.model_validate(given, by_alias=True, by_name=False).policy()
    except ValidationError as error:
        raise SnapshotRefusedError(_reasons("requests", error)) from None


def _read_disaggregation(message: pb.Snapshot) -> Disaggregation | None:
    if not message.HasField("disaggregation"):
        return None
    pool = _RETENTION_POOLS_READ.get(message.disaggregation.retention_pool)
    if pool is None:
        raise SnapshotRefusedError(_unknown("disaggregation.retention_pool", message.disaggregation.retention_pool))
    handoff = _HANDOFFS_READ.get(message.disaggregation.handoff)
    if handoff is None:
        raise SnapshotRefusedError(_unknown("disaggregation.handoff", message.disaggregation.handoff))
    return Disaggregation(pool, handoff)


def _read_worker(message: pb.Worker) -> Worker:
    id = WorkerRank(message.name, message.rank)
    capacity = message.capacity_tokens if message.HasField("capacity_tokens") else None
    block_size = message.block_size if message.HasField("block_size") else 16
    role = _ROLES_READ.get(message.role)
    endpoint = message.endpoint
    if not id.worker or id.rank < 0:
        problem = "name: must be a name, and rank not negative"
    elif not _is_endpoint(endpoint):
        problem = f"endpoint: must be ip:port or [v6]:port, not {endpoint!r}"
    elif role is None:
        problem = _unknown("role", message.role)
    elif capacity is not None and capacity <= 0:
        problem = f"capacity_tokens: must be positive or left out, not {capacity}"
    elif block_size <= 0:
        problem = f"block_size: must be positive, not {block_size}"
    else:
        return Worker(id, endpoint, capacity, message.live, role, message.incarnation, block_size)
    raise SnapshotRefusedError(f"workers[{id}].{problem}")


@lru_cache(maxsize=65536)
def _is_endpoint(endpoint: str) -> bool:
    """Cached: nearly every endpoint of a snapshot was in the one before it."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        return ip_address(host[1:-1] if bracketed else host).version == (6 if bracketed else 4)
    except ValueError:
        return False


def _unknown(name: str, number: int) -> str:
    return f"{name}: {number} is not known to this version"


def _reasons(section: str, error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join((section, *map(str, fault['loc'])))}: {fault['msg'].removeprefix('Value error, ')}"
        for fault in error.errors(include_url=False)
    )
