"""Runs a recorded trace of events through the admission policy and prints what it decides (scheduling.md, *Replay*).

The command line calls `replay` with the lines of a file. A trace is a user's input: whatever is wrong with it ends
the run as a `TraceError` that names the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, State
from thunderagent_epp.scheduling.policies import admission_rules
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rules import AdmissionRules

Count = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True)]
Moment = Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True, allow_inf_nan=False)]


class TraceError(ValueError):
    """A line of the trace that is no event; the text names the line and the field."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Place(_Record):
    worker: Name
    rank: Count = 0

    @property
    def id(self) -> WorkerRank:
        return WorkerRank(self.worker, self.rank)


class _WorkerRecord(_Place):
    capacity_tokens: Count | None = None
    live: Flag = True


class _Event(_Record):
    t: Moment | None = None


class _Policy(_Event):
    policy: str | None = None
    parameters: dict[str, Any] | None = None


class _Snapshot(_Event):
    workers: list[_WorkerRecord]


class _Arrive(_Event):
    request: Name
    session: Name
    input_tokens: Count
    final: Flag = False
    pinned: _Place | None = None


class _Sent(_Place, _Event):
    request: Name


class _Progress(_Event):
    request: Name
    context_tokens: Count


class _Completed(_Event):
    request: Name
    context_tokens: Count | None = None


class _Aborted(_Event):
    request: Name


class _Tick(_Event):
    pass


class _Dump(_Event):
    pass


_EVENTS: dict[str, type[_Event]] = {
    "policy": _Policy,
    "snapshot": _Snapshot,
    "arrive": _Arrive,
    "sent": _Sent,
    "progress": _Progress,
    "completed": _Completed,
    "aborted": _Aborted,
    "tick": _Tick,
    "dump": _Dump,
}


def replay(lines: Iterable[str | bytes]) -> Iterator[str]:
    """Yield the decisions on a trace, one JSON object a line, keys sorted.

    Decisions come as their event is read, so a long trace can be followed. Raises `TraceError` at the first bad line;
    what came before it has been decided.
    """
    rules = _rules(AdmissionPolicy())
    now: int | float = 0
    first = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = _read(line)
            now = now if event.t is None else event.t
            if isinstance(event, _Policy):
                if not first:
                    raise TraceError("event: a policy must come before all other events")
                rules = _rules(_policy(event))
            first = False
            decisions = _apply(rules, event, now)
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from None
        for decision in decisions:
            yield json.dumps(_record(decision) | {"t": now}, sort_keys=True, ensure_ascii=False)


def _read(line: str | bytes) -> _Event:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise TraceError("not a JSON object")
    kind = record.pop("event", None)
    model = _EVENTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise TraceError(f"event: must be one of {', '.join(_EVENTS)}, not {json.dumps(kind)}")
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise TraceError(_first_problem(error)) from None


def _policy(event: _Policy) -> AdmissionPolicy:
    if event.policy is None and event.parameters is None:
        raise TraceError("parameters: Field required")
    given = (event.parameters or {}) | ({} if event.policy is None else {"policy": event.policy})
    try:
        return AdmissionPolicy.from_parameters(given)
    except ValidationError as error:
        problem = _first_problem(error)
        raise TraceError(problem if problem.startswith("policy:") else f"parameters.{problem}") from None


def _rules(policy: AdmissionPolicy) -> AdmissionRules[Any]:
    rules = admission_rules(policy)
    if rules is None:
        raise TraceError("policy: Disabled decides nothing that could be replayed")
    return rules


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in problem["loc"] if part not in ("int", "float"))
    text = "unknown field" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
    return f"{field}: {text}"


def _apply(rules: AdmissionRules[Any], event: _Event, now: float) -> Iterable[Decision | State]:
    match event:
        case _Snapshot():
            rules.snapshot(_snapshot(event))
        case _Arrive():
            pinned = None if event.pinned is None else event.pinned.id
            return rules.arrive(event.request, event.session, event.input_tokens, now, final=event.final, pinned=pinned)
        case _Sent():
            rules.sent(event.request, event.id)
        case _Progress():
            rules.progress(event.request, event.context_tokens)
        case _Completed():
            return rules.completed(event.request, event.context_tokens, now)
        case _Aborted():
            return rules.aborted(event.request, now)
        case _Tick():
            return rules.tick(now)
        case _Dump():
            return (rules.dump(),)
    return ()


def _snapshot(event: _Snapshot) -> CapacitySnapshot:
    try:
        return CapacitySnapshot(
            tuple(
                Worker(worker.id, capacity_tokens=worker.capacity_tokens, live=worker.live) for worker in event.workers
            )
        )
    except ValueError as error:
        raise TraceError(f"workers: {error}") from None


def _record(decision: Decision | State) -> dict[str, Any]:
    """A decision in the words of scheduling.md: its kind, its fields, a worker as name and rank."""
    record = asdict(decision)
    if isinstance(decision, State):
        return record | {"decision": "state"}
    if "worker" in record:
        record["worker"], record["rank"] = record["worker"] or (None, None)
    return record | {"decision": type(decision).__name__.lower()}
