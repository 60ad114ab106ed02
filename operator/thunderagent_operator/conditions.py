"""The conditions of a policy: from what is known of it to four sentences (kubernetes.md, *ThunderAgentPolicy*). Pure.

`kubectl get tap` and `kubectl describe tap` are all that most users see of the operator, so each sentence names what
is wrong and where, and is the same as long as that is the same: a status is patched when it changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

from thunderagent_epp.scheduling.capacity import Role, Worker
from thunderagent_operator.discovery import Overlap
from thunderagent_operator.feed import Picker
from thunderagent_operator.status import (
    Condition,
    ConditionType,
    PickerCounts,
    PolicyStatus,
    PublishedSnapshot,
    WorkerCounts,
)

NAMED_MAX: Final = 3
"""Workers, pickers or policies named in one sentence; of the others there is a number."""

MESSAGE_CHARACTERS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Findings:
    """What is known of one policy. ``problem`` is (reason, message) of a spec that cannot be used.

    ``trouble`` is why a worker's last probe did not tell, by the worker; ``notes`` what its pods' labels and
    annotations have wrong. ``snapshot`` is None until one was published.
    """

    generation: int | None
    problem: tuple[str, str] | None = None
    overlaps: Sequence[Overlap] = ()
    notes: Sequence[str] = ()
    workers: Collection[Worker] = ()
    trouble: Mapping[Worker, str] = field(default_factory=dict)
    snapshot: PublishedSnapshot | None = None
    pickers: Sequence[Picker] = ()


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def policy_status(found: Findings, before: Sequence[Condition], now: float) -> PolicyStatus:
    """The status of a policy; ``before`` are its conditions so far, ``now`` is seconds since the epoch."""
    live = [worker for worker in found.workers if worker.live]
    known = [worker for worker in live if worker.capacity_tokens is not None]
    verdicts = {
        ConditionType.ACCEPTED: _accepted(found),
        ConditionType.WORKERS_READY: _workers_ready(found, live),
        ConditionType.CAPACITY_KNOWN: _capacity_known(found, live, known),
        ConditionType.PROGRAMMED: _programmed(found),
    }
    held = {condition.type: condition for condition in before}
    return PolicyStatus(
        observedGeneration=found.generation,
        conditions=[
            _condition(kind, verdict, held.get(kind), found.generation, now) for kind, verdict in verdicts.items()
        ],
        workers=WorkerCounts.of(total=len(found.workers), live=len(live), capacity_known=len(known)),
        capacityTokens=sum(worker.capacity_tokens or 0 for worker in known),
        snapshot=found.snapshot,
        pickers=PickerCounts(connected=len(found.pickers), current=sum(picker.current for picker in found.pickers)),
    )


def changed(before: Sequence[Condition], after: Sequence[Condition]) -> list[Condition]:
    """The conditions whose status is another one now; each is worth an event on the object."""
    held = {condition.type: condition.status for condition in before}
    return [condition for condition in after if held.get(condition.type) != condition.status]


def is_bad(condition: Condition) -> bool:
    """Whether somebody should look at it."""
    return condition.status == "False"


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as the API writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _condition(
    kind: ConditionType, verdict: _Verdict, before: Condition | None, generation: int | None, now: float
) -> Condition:
    since = before.last_transition_time if before and before.status == verdict.status else timestamp(now)
    return Condition(
        type=kind.value,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message[:MESSAGE_CHARACTERS_MAX],
        lastTransitionTime=since,
        observedGeneration=generation,
    )


def _accepted(found: Findings) -> _Verdict:
    if found.problem is not None:
        reason, message = found.problem
        return _Verdict("False", reason, message)
    notes = "".join(f" {note};" for note in found.notes[:NAMED_MAX]).rstrip(";")
    if found.overlaps:
        others = _named([f"{one.policy} ({one.pods}, such as {one.pod})" for one in found.overlaps])
        return _Verdict("True", "OverlappingWorkers", f"Other policies select some of the same pods: {others}.{notes}")
    return _Verdict("True", "Accepted", f"The policy is in force.{notes}")


def _workers_ready(found: Findings, live: Sequence[Worker]) -> _Verdict:
    total = len(found.workers)
    if live and all(worker.role is Role.PREFILL for worker in live):
        return _Verdict(
            "False",
            "NoDecodeWorkers",
            f"None of {len(live)} live worker ranks decodes; every request is refused with no_endpoints.",
        )
    if live:
        return _Verdict("True", "WorkersLive", f"{len(live)} of {total} worker ranks are live.")
    if total:
        return _Verdict("False", "NoLiveWorkers", f"None of {total} worker ranks is live.")
    if found.problem is not None and found.snapshot is None:
        return _Verdict("Unknown", "NotAccepted", "No spec is in force that could select pods.")
    return _Verdict("False", "NoWorkers", "No running pod is selected.")


def _capacity_known(found: Findings, live: Sequence[Worker], known: Sequence[Worker]) -> _Verdict:
    if not live:
        return _Verdict("Unknown", "NoLiveWorkers", "There is no live worker to know the capacity of.")
    unknown = [worker for worker in live if worker.capacity_tokens is None]
    if unknown:
        named = _named([_with_trouble(worker, found.trouble) for worker in unknown])
        return _Verdict(
            "False",
            "CapacityUnknown",
            f"The capacity of {len(unknown)} of {len(live)} live worker ranks is unknown: {named}.",
        )
    failing = [worker for worker in known if worker in found.trouble]
    if failing:
        named = _named([_with_trouble(worker, found.trouble) for worker in failing])
        return _Verdict("True", "ProbesFailing", f"Probes fail, the capacity last told stays in force: {named}.")
    return _Verdict("True", "CapacityKnown", f"The capacity of all {len(live)} live worker ranks is known.")


def _programmed(found: Findings) -> _Verdict:
    if found.snapshot is None:
        return _Verdict("False", "NoSnapshot", "No snapshot has been published yet.")
    if not found.pickers:
        return _Verdict("Unknown", "NoPickers", "No endpoint picker follows this policy.")
    refusing = [f"{picker.identity}: {picker.refusal}" for picker in found.pickers if picker.refusal]
    if refusing:
        return _Verdict("False", "SnapshotRefused", f"The snapshot is refused by {_named(refusing)}.")
    behind = [picker.identity for picker in found.pickers if not picker.current]
    if behind:
        return _Verdict("False", "PickersBehind", f"The snapshot is not yet applied by {_named(behind)}.")
    return _Verdict("True", "Programmed", f"All {len(found.pickers)} connected pickers have the snapshot in force.")


def _with_trouble(worker: Worker, trouble: Mapping[Worker, str]) -> str:
    why = trouble.get(worker)
    return str(worker.id) if why is None else f"{worker.id} ({why})"


def _named(texts: Sequence[str]) -> str:
    listed = ", ".join(sorted(texts)[:NAMED_MAX])
    more = len(texts) - NAMED_MAX
    return listed if more <= 0 else f"{listed} and {more} more"
