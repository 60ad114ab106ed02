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
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from thunderagent_epp.feed.problems import problems, shown
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, State
from thunderagent_epp.scheduling.policies import admission_rules
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rules import AdmissionRules

Count = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, strict=True)]


def _moment(given: object) -> int | float:
    # Not a union of int and float: its faults are told in terms of one of the two.
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError(f"must be a number of seconds, not {shown(given)}")
    return given


Moment = Annotated[int | float, PlainValidator(_moment, json_schema_input_type=float)]


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
        if not isinstance(record, dict):
            raise TraceError("not a JSON object")
        # msgspec says in better words what is no JSON, and keeps the last of two members with one name.
        json.loads(line, object_pairs_hook=_refuse_twice)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a JSON object: {error}") from None
    except RecursionError:
        raise TraceError("nested too deeply") from None
    if "event" not in record:
        raise TraceError(f"event: is required: one of {', '.join(_EVENTS)}")
    kind = record.pop("event")
    model = _EVENTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise TraceError(f"event: must be one of {', '.join(_EVENTS)}, not {shown(kind)}")
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise TraceError(str(problems(error, model, record)[0])) from None


def _refuse_twice(members: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise TraceError(f"{twice}: is there twice")


def _policy(event: _Policy) -> AdmissionPolicy:
    if event.policy is None and event.parameters is None:
        raise TraceError("parameters: is required")
    given = (event.parameters or {}) | ({} if event.policy is None else {"policy": event.policy})
    try:
        return AdmissionPolicy.from_parameters(given)
    except ValidationError as error:
        problem = problems(error, AdmissionPolicy, given, by_alias=False)[0]
        at = "" if event.policy is not None and problem.path == ("policy",) else "parameters."
        raise TraceError(f"{at}{problem}") from None


def _rules(policy: AdmissionPolicy) -> AdmissionRules[Any]:
    rules = admission_rules(policy)
    if rules is None:
        raise TraceError("policy: Disabled decides nothing that could be replayed")
    return rules


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
