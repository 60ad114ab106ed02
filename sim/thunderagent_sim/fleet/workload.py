"""The sessions of a run: drawn to the statistics of a public replay of coding-agent traces (fleet.md, *Workload*).

A workload hands out whole sessions, each a list of planned turns, by a seed alone: every arm meets the same sessions
whatever it does with them. A seat of the closed loop begins somewhere within a session, as a fleet that has been
running does; nobody starts hundreds of agents on an empty fleet at once, and a run that did would take most of its
time to forget it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Protocol

from thunderagent_sim.fleet.quantiles import Quantiles
from thunderagent_sim.fleet.turns import PlannedTurn

Session = Sequence[PlannedTurn]


class Workload(Protocol):
    """Where a run's sessions come from."""

    @property
    def largest_context_tokens(self) -> int:
        """No context of any turn is larger."""

    def session(self, random: Random) -> Session:
        """Draw one session."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Turns of a session from number ``first`` on, to the next stage."""

    first: int
    growth_tokens: float
    """Mean growth of the prompt from one turn to the next, the answer in between included."""
    output_tokens: float
    """Mean size of the answer."""
    end: float
    """Share of sessions that end after a turn."""


STAGES: Final = (
    Stage(0, 14_200, 363, 0.0),
    Stage(1, 27_300, 363, 0.0384),
    Stage(2, 4_350, 684, 0.0384),
    Stage(5, 2_150, 730, 0.0512),
    Stage(10, 1_400, 773, 0.1002),
    Stage(20, 2_300, 819, 0.0715),
    Stage(26, 960, 819, 0.0715),
)
"""The table of fleet.md: the shares that end give its requests per row, growth and output its means."""

OUTPUT: Final = Quantiles(
    (0, 0.02), (0.05, 0.071), (0.1, 0.11), (0.25, 0.225), (0.5, 0.5), (0.75, 1.11), (0.9, 2.2), (0.95, 3.3),
    (0.99, 7.0), (1, 14.0),
)  # fmt: skip
"""Size of an answer over its stage's mean: overall the median is 350 tokens where the mean is 705."""

GAP_SECONDS: Final = Quantiles(
    (0, 0.0), (0.1, 0.01), (0.25, 0.05), (0.5, 0.31), (0.65, 0.9), (0.75, 2.0), (0.8, 3.1), (0.85, 5.2), (0.9, 9.8),
    (0.95, 10.0), (1, 10.0),
)  # fmt: skip
"""From the end of a turn to the next one."""

SCALE: Final = Quantiles(
    (0, 0.45), (0.1, 0.65), (0.25, 0.785), (0.5, 0.955), (0.75, 1.14), (0.9, 1.34), (0.99, 1.85), (1, 2.3)
)  # fmt: skip
"""How much larger than the mean the inputs of one session are."""

INPUT: Final = Quantiles((0, 0.01), (0.25, 0.2), (0.5, 0.55), (0.75, 1.2), (0.9, 2.3), (0.98, 5.0), (1, 9.0))
"""Size of what one turn brings in over the mean of its session and stage."""

CONTEXT_TOKENS_MAX: Final = 200_000
OVERLAP: Final = 0.08
"""Share of turns that overlap the one before."""


class CodingAgents:
    """Sessions like those of the trace. Without ``overlap``, turns of a session follow one another."""

    def __init__(self, overlap: float = OVERLAP) -> None:
        self._overlap = overlap

    @property
    def largest_context_tokens(self) -> int:
        """No context of any turn is larger."""
        return CONTEXT_TOKENS_MAX

    def session(self, random: Random) -> Session:
        """Draw one session."""
        scale = SCALE.draw(random) / SCALE.mean
        turns: list[PlannedTurn] = []
        context = 0
        stage_index = 0
        while True:
            number = len(turns)
            if stage_index + 1 < len(STAGES) and number >= STAGES[stage_index + 1].first:
                stage_index += 1
            stage = STAGES[stage_index]
            before = 0.0 if number == 0 else STAGES[max(0, stage_index - (number == stage.first))].output_tokens
            noise = 1.0 if number < 2 else INPUT.draw(random) / INPUT.mean
            added = max(1, int((stage.growth_tokens - before) * scale * noise))
            output = max(1, int(stage.output_tokens * OUTPUT.draw(random) / OUTPUT.mean))
            gap = 0.0 if number == 0 else GAP_SECONDS.draw(random)
            overlaps = random.random() < self._overlap and number > 0 and not turns[-1].overlaps
            ends = random.random() < stage.end
            if overlaps:
                # It branches off the prompt of the turn before, whose answer is not there yet.
                shared = turns[-1].prompt_tokens
                added = min(added, max(1, turns[-1].output_tokens))
            else:
                shared = context
            prompt = shared + added
            if prompt + output > CONTEXT_TOKENS_MAX:
                break
            turns.append(PlannedTurn(prompt, shared, output, gap, overlaps))
            if not overlaps:
                context = prompt + output
            if ends:
                break
        turns[-1] = replace(turns[-1], last=True)
        return turns


BUILT_IN: Final[dict[str, Workload]] = {
    "coding-agents": CodingAgents(),
    "coding-agents-serial": CodingAgents(overlap=0.0),
}
"""The workloads that need no file, by name."""


def mid_session(workload: Workload, random: Random) -> Session:
    """What is left of the session that a seat is in when the run begins, as if it had been at it for long."""
    ahead = random.randrange(MANY_TURNS)
    while True:
        session = workload.session(random)
        if ahead < len(session):
            rest = list(session[ahead:])
            if rest[0].overlaps:
                rest = rest[1:] or list(session[-2:])
            return rest
        ahead -= len(session)


MANY_TURNS: Final = 400
"""Many times the length of a session: what a seat has gone through before the run."""
