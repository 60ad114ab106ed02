"""One turn of a session as it passes through the fleet: what it asks for, and when what became of it.

The workload makes its plan, the event loop stamps the times, the engine counts its tokens, the measures read it all
in the end. Times are simulated seconds since the start of the run; sizes are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thunderagent_sim.fleet.cache import Lease


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn before it happens; drawn with its session, so that every arm meets the same sessions.

    ``shared_tokens`` of its prompt are an old prefix: the context of the session's last turn. ``gap_seconds`` lie
    between the end of the last turn and this one. A turn that ``overlaps`` begins with the first token of the one
    before instead, on the same prefix, and what it adds to the context is not seen again.
    """

    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    gap_seconds: float = 0.0
    overlaps: bool = False
    last: bool = False

    @property
    def context_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True, eq=False)
class Turn:
    """One turn as it happens. ``seat`` is the place in the closed loop whose sessions follow one another."""

    id: str
    session: str
    seat: int
    number: int
    plan: PlannedTurn
    arrived: float
    released: float | None = None
    pod: int | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    preemptions: int = 0
    attempts: int = 1
    """How often it was sent: a turn on a worker that is lost is sent again."""

    # What the engine knows of a turn it has.
    generated: int = 0
    lease: Lease | None = field(default=None, repr=False)
    prefill_position: int = 0
    prefill_end: int = 0
    decode_start: int = 0
    """The engine's step in which its prefill ended."""
    decode_tokens: int = 0
    """Context tokens when its decoding began."""
    finish_step: int = -1
