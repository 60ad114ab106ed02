"""A workload from recorded sessions: a JSON-lines file, one turn a line, replayed in a closed loop.

``{"session": "a", "turn": 0, "prompt": 21000, "output": 350, "gap": 0}``: ``turn`` counts from 0 within a session;
``prompt`` and ``output`` are tokens; ``gap`` is seconds from the end of the last turn (left out: 0), below 0 for a
turn that began before the last one ended. ``session`` may be left out where each turn 0 begins another session. What
a prompt shares with the context before it is not recorded: as much as lengths allow is taken to be shared, and a
prompt shorter than the context before it to be cut short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from thunderagent_epp.feed.problems import problems
from thunderagent_sim.fleet.turns import PlannedTurn
from thunderagent_sim.fleet.workload import Session


class WorkloadError(ValueError):
    """A workload file that cannot be used; its text is one line with file, line and field."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    session: Annotated[str, Field(strict=True)] | None = None
    turn: Annotated[int, Field(ge=0, strict=True)]
    prompt: Annotated[int, Field(gt=0, strict=True)]
    output: Annotated[int, Field(gt=0, strict=True)]
    gap: Annotated[float, Field(allow_inf_nan=False, strict=True)] = 0.0


class Recorded:
    """Sessions drawn from a recording, each as often as any other."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions

    @property
    def largest_context_tokens(self) -> int:
        """The largest context of any turn."""
        return max(turn.context_tokens for session in self._sessions for turn in session)

    def session(self, random: Random) -> Session:
        """Draw one session."""
        return self._sessions[random.randrange(len(self._sessions))]


def load_workload(path: Path) -> Recorded:
    """Read a file of recorded sessions. Raises WorkloadError."""
    try:
        with path.open("rb") as lines:
            return read_workload(lines, str(path))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_workload(lines: Iterable[bytes], name: str) -> Recorded:
    """Read recorded sessions; ``name`` stands at the front of a WorkloadError."""
    sessions: dict[str, list[PlannedTurn]] = {}
    unnamed = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _read(line, f"{name}:{number}")
        if record.session is None:
            unnamed += record.turn == 0
        session = sessions.setdefault(f"#{unnamed}" if record.session is None else f"={record.session}", [])
        if record.turn != len(session):
            raise WorkloadError(f"{name}:{number}: turn: must be {len(session)}, the session's next, not {record.turn}")
        session.append(_planned(record, session))
    if not sessions:
        raise WorkloadError(f"{name}:1: is empty: give at least one turn")
    return Recorded([[*session[:-1], replace(session[-1], last=True)] for session in sessions.values()])


def _read(line: bytes, place: str) -> _Record:
    try:
        given = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{place}: not a JSON object: {error}") from None
    except RecursionError:
        raise WorkloadError(f"{place}: nested too deeply") from None
    if not isinstance(given, dict):
        raise WorkloadError(f"{place}: not a JSON object")
    try:
        return _Record.model_validate(given)
    except ValidationError as error:
        raise WorkloadError(f"{place}: {problems(error, _Record, given)[0]}") from None


def _planned(record: _Record, before: Sequence[PlannedTurn]) -> PlannedTurn:
    overlaps = record.gap < 0 and bool(before)
    if overlaps:
        old = before[-1].prompt_tokens
    else:
        old = next((turn.context_tokens for turn in reversed(before) if not turn.overlaps), 0)
    return PlannedTurn(record.prompt, min(old, record.prompt), record.output, max(0.0, record.gap), overlaps)
