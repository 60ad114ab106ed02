"""What an admission policy can decide, as values; the words are those of replay's output (scheduling.md, *Replay*)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from thunderagent_epp.scheduling.capacity import WorkerRank


class Reason(StrEnum):
    """Why a request was rejected before anything changed."""

    DUPLICATE_REQUEST = "duplicate_request"
    REQUEST_LIMIT = "request_limit"
    PROGRAM_LIMIT = "program_limit"


@dataclass(frozen=True, slots=True)
class Release:
    """The request may go now. ``worker`` is a wish the selector may overrule, None leaves the choice to it."""

    request: str
    worker: WorkerRank | None


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is not tracked; nothing was changed for it."""

    request: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Resume:
    """A paused program is charged to ``worker`` again; None when it was forced while no capacity is known."""

    session: str
    worker: WorkerRank | None
    forced: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """An idle program gave up its place on ``worker``."""

    session: str
    worker: WorkerRank


@dataclass(frozen=True, slots=True)
class Mark:
    """A program on ``worker`` will be paused when its running turn completes."""

    session: str
    worker: WorkerRank


Decision = Release | Reject | Resume | Pause | Mark


@dataclass(frozen=True, slots=True)
class ProgramState:
    """One program as `State` shows it; ``tokens`` is its size: the live context of a tracked turn, else the last."""

    status: str
    lifecycle: str
    worker: str | None
    rank: int | None
    tokens: int
    steps: int
    marked: bool


@dataclass(frozen=True, slots=True)
class State:
    """Everything an admission policy knows, for people: ``used`` in tokens by ``worker/rank``, all keys sorted."""

    programs: Mapping[str, ProgramState]
    used: Mapping[str, int]
    waiting: tuple[str, ...]
    tracked: int
