"""A program — one agent session, the loop of model turn, tool call, next turn — and the turns it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from thunderagent_epp.scheduling.capacity import WorkerRank


class Status(StrEnum):
    """What a program is doing."""

    REASONING = "reasoning"
    """A turn is running or waiting."""
    ACTING = "acting"
    """Between turns: a tool runs."""


class Lifecycle(StrEnum):
    """Whether a program holds a place."""

    ACTIVE = "active"
    """Charged to its worker, if it has one."""
    PAUSED = "paused"
    """Charged nowhere, has no worker."""


@dataclass(slots=True, eq=False)
class Turn:
    """One registration of a request. A request id may be reused, a registration never is."""

    request: str
    session: str
    context_tokens: int
    """Starts at the input size, grows as the answer streams, never shrinks."""
    input_tokens: int
    final: bool = False
    pinned: WorkerRank | None = None
    running: bool = False
    begun: bool = False
    before: Program | None = None
    """The program as it was before this turn began, for rollback; None when the turn created it."""


@dataclass(slots=True, eq=False)
class Program:
    """The state of one program (scheduling.md, *State*); times are seconds on the caller's clock."""

    session: str
    status: Status = Status.REASONING
    lifecycle: Lifecycle = Lifecycle.ACTIVE
    worker: WorkerRank | None = None
    tokens: int = 0
    steps: int = 1
    marked: bool = False
    acting_since: float | None = None
    deferred_since: float | None = None
    turn: Turn | None = field(default=None, repr=False)
    """The begun turn, waiting or running; None exactly while acting."""

    @property
    def size(self) -> int:
        """Context tokens: the live ones of the tracked turn, else those of the last."""
        return self.tokens if self.turn is None else self.turn.context_tokens

    @property
    def paused(self) -> bool:
        """Whether it is charged nowhere."""
        return self.lifecycle is Lifecycle.PAUSED
