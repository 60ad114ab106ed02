"""What a run is judged by, from the records of its turns. Only what happened after the warm-up counts.

A turn still waiting at the end is counted at its age, both for its hold and for its first token: leaving it out
would flatter the arm that starves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from thunderagent_sim.fleet.run import Run
from thunderagent_sim.fleet.turns import Turn


@dataclass(frozen=True, slots=True)
class Hold:
    """A turn that was not sent as it arrived: its context in tokens, and for how long it was held."""

    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measures:
    """One run in numbers. Times to the first token run from a turn's arrival, whatever it then waited for.

    Percentiles are of the nearest rank, 0 where there is nothing to rank; ``hit_rate`` is the share of the prompt
    tokens of the turns scheduled that were found in the cache; ``fairness`` is Jain's index over what each seat of
    the closed loop was answered, 1 when all got the same.
    """

    output_tokens_per_second: float
    hit_rate: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    turns: int
    """Turns that ended."""
    holds: int
    hold_p99: float
    longest_hold: float
    fairness: float
    preemptions: int
    inter_token_seconds: float
    """Mean time between two tokens of an answer."""


def measure(run: Run) -> Measures:
    """Judge a run."""
    seconds = run.end - run.start
    first_tokens = sorted(times_to_first_token(run))
    held = sorted(hold.seconds for hold in holds(run))
    ended = [turn for turn in run.turns if turn.finished is not None and run.start <= turn.finished <= run.end]
    # What was scheduled while it counted: the cache had its say about these.
    asked = [turn for turn in run.turns if turn.first_token is not None and turn.first_token >= run.start]
    prompt = sum(turn.plan.prompt_tokens for turn in asked)
    cached = sum(turn.cached_tokens or 0 for turn in asked)
    decoding = sum(turn.finished - turn.first_token for turn in ended if turn.finished and turn.first_token)
    tokens = sum(turn.plan.output_tokens - 1 for turn in ended)
    return Measures(
        output_tokens_per_second=run.output_tokens / seconds,
        hit_rate=cached / prompt if prompt else 0.0,
        ttft_p50=percentile(first_tokens, 50),
        ttft_p90=percentile(first_tokens, 90),
        ttft_p99=percentile(first_tokens, 99),
        turns=len(ended),
        holds=len(held),
        hold_p99=percentile(held, 99),
        longest_hold=held[-1] if held else 0.0,
        fairness=jain(_answered(run)),
        preemptions=run.preemptions,
        inter_token_seconds=decoding / tokens if tokens else 0.0,
    )


def times_to_first_token(run: Run) -> Iterable[float]:
    """Of every turn whose wait for its first token ended while it counted, or had not at the end."""
    for turn in run.turns:
        if turn.first_token is None:
            yield run.end - turn.arrived
        elif turn.first_token >= run.start:
            yield turn.first_token - turn.arrived


def holds(run: Run) -> Iterable[Hold]:
    """Every hold that ended while it counted, or had not at the end."""
    for turn in run.turns:
        released = run.end if turn.released is None else turn.released
        if released >= run.start and released > turn.arrived:
            yield Hold(turn.plan.prompt_tokens, released - turn.arrived)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of values in order; 0 of none."""
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, from 1/n to 1; 1 of none or of nothing."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _answered(run: Run) -> list[float]:
    """Tokens answered to each seat while it counted; an answer that reaches over an end counts in proportion."""
    answered = [0.0] * (run.scenario.pods * run.scenario.sessions_per_pod)
    for turn in run.turns:
        answered[turn.seat] += _tokens_counted(turn, run)
    return answered


def _tokens_counted(turn: Turn, run: Run) -> float:
    if turn.first_token is None:
        return 0.0
    end = run.end if turn.finished is None else turn.finished
    tokens = turn.generated
    if turn.first_token >= run.start:
        return tokens
    if end <= run.start:
        return 0.0
    return tokens * (end - run.start) / (end - turn.first_token)
