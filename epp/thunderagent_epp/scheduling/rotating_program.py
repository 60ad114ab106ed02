"""A program as `Rotation` keeps it: one whose turns may run at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field

from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.scheduling.program import Program, Turn


@dataclass(slots=True, eq=False)
class RotatingProgram(Program):
    """A program whose turns may overlap. ``tokens`` is the context its turns share: that of the last to end."""

    turns: dict[str, Turn] = field(default_factory=dict)
    """Turns by request, waiting or running; none while acting."""
    idle_before: float | None = None
    """When it was acting before its present turns began, for a rollback; None when they created it."""
    paused_before: bool = False
    came_from: WorkerRank | None = None
    """The worker it had last: part of its cache may still be there."""
    ends: bool = False
    """A final turn has come: it is forgotten when its turns have ended."""

    @property
    def size(self) -> int:
        """Context tokens: the shared ones, and what each of its turns adds to them."""
        return self.tokens + sum(
            turn.context_tokens - self.tokens for turn in self.turns.values() if turn.context_tokens > self.tokens
        )
