"""What the demo's agents will do, settled before anything runs: the load is the same for every policy.

An agent works through sessions, one after the other; a session is a fixed number of turns, each adding a tool's
output to the context and asking for an answer, with a pause between turns while the tool runs. `agents.py` plays
these scripts. Every session is drawn from a seed of its own, so that a policy under which an agent gets further
changes nothing about the sessions it shares with a slower one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Four characters with the space: one token of the simulated worker each.
_WORDS_TEXT: Final = (
    "def ret for try arg row col key map log err buf ptr fmt src dst tmp env url api sql css git pip npm bin lib doc "
    "out inp get put add pop set run end new old top low max min sum avg std var let use mod pub ref dyn int str"
)
_WORDS: Final = tuple(_WORDS_TEXT.split())


@dataclass(frozen=True, slots=True)
class Between:
    """A range to draw from, both ends included."""

    low: float
    high: float

    def tokens(self, draw: random.Random) -> int:
        """Draw a whole number."""
        return draw.randint(int(self.low), int(self.high))

    def seconds(self, draw: random.Random) -> float:
        """Draw a time; short ones are likelier than long ones, as with tools."""
        return min(self.low + draw.expovariate(4 / (self.high - self.low)), self.high)


@dataclass(frozen=True, slots=True)
class LoadShape:
    """How many agents there are and how they work; sizes are tokens, times are seconds."""

    agents: int = 12
    opening_tokens: Between = Between(1500, 3000)
    tool_output_tokens: Between = Between(200, 800)
    answer_tokens: Between = Between(40, 100)
    turns: Between = Between(8, 14)
    tool_seconds: Between = Between(0.3, 2.0)
    first_turn_within_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One turn: what it adds to the context, how long the answer is, and how long the tool runs afterwards."""

    prompt: str
    prompt_tokens: int
    answer_tokens: int
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class ScriptedSession:
    """One session; its last turn says that it is the last."""

    id: str
    turns: tuple[ScriptedTurn, ...]


def sessions(shape: LoadShape, seed: int, agent: int) -> Iterator[ScriptedSession]:
    """Yield the sessions of one agent without end."""
    number = 0
    while True:
        number += 1
        yield _session(shape, f"agent-{agent:02}.{number}", seed)


def first_turn_after_seconds(shape: LoadShape, seed: int, agent: int) -> float:
    """When an agent begins: not all at once."""
    return random.Random(f"{seed}/agent-{agent:02}").uniform(0, shape.first_turn_within_seconds)


def _session(shape: LoadShape, name: str, seed: int) -> ScriptedSession:
    draw = random.Random(f"{seed}/{name}")
    turns = []
    for number in range(shape.turns.tokens(draw)):
        tokens = (shape.tool_output_tokens if number else shape.opening_tokens).tokens(draw)
        turns.append(
            ScriptedTurn(
                prompt=" ".join(draw.choices(_WORDS, k=tokens)),
                prompt_tokens=tokens,
                answer_tokens=shape.answer_tokens.tokens(draw),
                tool_seconds=shape.tool_seconds.seconds(draw),
            )
        )
    return ScriptedSession(name, tuple(turns))
