"""``thunderagent demo``: the same load twice, program-aware and by load alone, each through a gateway of its own.

`run_demo` stands a gateway up, lets the agents work for as long as the time allows, takes the numbers and ends it, for
each phase in turn; a `View` is told what there is to see. Both phases get the same sessions, the same time and empty
caches. Turns still running when time is up are counted with the time they have taken by then, so that a policy cannot
look better by leaving long ones unfinished.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp

from thunderagent_sim.agent_script import LoadShape
from thunderagent_sim.agents import Agent, Agents
from thunderagent_sim.gateway import MODEL, Gateway, running_gateway
from thunderagent_sim.observation import Observation, observe
from thunderagent_sim.processes import first_of

DEFAULT_SECONDS: Final = 55.0
LEAST_SECONDS: Final = 10.0
"""Two gateways have to come up within it, and agents to work."""

_LOOK_INTERVAL_SECONDS: Final = 0.25
# What is not start-up and not load: this program's own start, and the end of the processes.
_SPARE_SECONDS: Final = 2.0
# The second gateway may take half as long again to start as the first.
_SLOWER_START: Final = 1.25
_LEAST_LOAD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """One of the policies compared: its key in the JSON, its name for people, its admission parameters."""

    key: str
    title: str
    admission: Mapping[str, Any]


# Half a second in place of five: everything in the demo is ten times smaller than on a real fleet.
PROGRAM_AWARE: Final = Phase("policy", "program-aware", {"policy": "Classic", "schedulerInterval": "500ms"})
BASELINE: Final = Phase("baseline", "baseline", {"policy": "Disabled"})
PHASES: Final = (PROGRAM_AWARE, BASELINE)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What came of one phase.

    ``turns`` are those answered to their end. The percentiles are over these and the ``unfinished`` ones, which were
    ended when time was up and count with the time they had taken; None where there was no turn at all. ``hit_rate``
    is the share of prompt tokens found in the caches of what computes prompts, None where none was looked up.
    """

    turns: int
    failed: int
    holds: int
    pauses: int
    resumes: int
    hit_rate: float | None
    turn_seconds_p50: float | None
    turn_seconds_p99: float | None
    unfinished: int
    held_at_end: int
    load_seconds: float
    first_failure: str | None = None

    def as_json(self) -> dict[str, float | None]:
        """The numbers ``--json`` prints."""
        names = ("turns", "failed", "holds", "pauses", "resumes", "hit_rate", "turn_seconds_p50", "turn_seconds_p99")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Moment:
    """What a view draws: one phase as it is now. ``earlier`` holds the phases that are over."""

    phase: Phase
    seconds_left: float
    agents: Sequence[Agent]
    turns: int
    failed: int
    now: float
    observation: Observation
    hit_rate: float | None
    earlier: Mapping[Phase, PhaseResult] = field(default_factory=dict)


class View(Protocol):
    """Shows a demo while it runs."""

    def starting(self, phase: Phase) -> None:
        """A gateway is being started."""

    def ready(self, phase: Phase, start_seconds: float, load_seconds: float) -> None:
        """It answered a first request after ``start_seconds``; the agents now work for ``load_seconds``."""

    def show(self, moment: Moment) -> None:
        """A few times a second."""

    def finished(self, phase: Phase, result: PhaseResult) -> None:
        """A phase is over."""


async def run_demo(
    seconds: float,
    seed: int,
    view: View,
    clock: Callable[[], float],
    shape: LoadShape | None = None,
    *,
    disaggregated: bool = False,
    so_far: dict[Phase, PhaseResult] | None = None,
) -> dict[Phase, PhaseResult]:
    """Run all phases within ``seconds`` (>= `LEAST_SECONDS`), over prefill and decode workers if ``disaggregated``.

    ``so_far`` is filled meanwhile, for who interrupts it: with the result of each phase as if it were over now.
    Raises PartError when a part is missing or breaks.
    """
    results = {} if so_far is None else so_far
    load: float | None = None
    end = clock() + seconds - _SPARE_SECONDS
    for phase in PHASES:
        view.starting(phase)
        began = clock()
        async with running_gateway(phase.admission, disaggregated=disaggregated) as gateway:
            start_seconds = clock() - began
            # Settled once, for the phases to be comparable, unless the second start takes too long for that.
            load = load_seconds(seconds, start_seconds) if load is None else time_left(load, end - clock())
            view.ready(phase, start_seconds, load)
            agents = Agents(gateway.url, MODEL, shape or LoadShape(), seed, clock)
            results[phase] = await run_phase(phase, gateway, agents, load, view, results)
        view.finished(phase, results[phase])
    return results


def load_seconds(total_seconds: float, start_seconds: float) -> float:
    """How long the agents may work in each phase, if the first gateway took ``start_seconds`` to come up."""
    return max((total_seconds - _SPARE_SECONDS) / len(PHASES) - _SLOWER_START * start_seconds, _LEAST_LOAD_SECONDS)


def time_left(load_seconds: float, left_seconds: float) -> float:
    """How long the agents may work in the last phase, ``left_seconds`` before the end."""
    return max(min(load_seconds, left_seconds), _LEAST_LOAD_SECONDS)


async def run_phase(
    phase: Phase,
    gateway: Gateway,
    agents: Agents,
    seconds: float,
    view: View,
    results: dict[Phase, PhaseResult],
) -> PhaseResult:
    """Let the agents work for ``seconds`` and say what came of it; ``results`` has it meanwhile, and earlier phases.

    Raises PartError when a part breaks meanwhile.
    """
    clock = agents.clock
    earlier = dict(results)

    async def look_on() -> PhaseResult:
        async with aiohttp.ClientSession() as client:
            before = await observe(gateway, client)
            began = clock()
            end = began + seconds
            while (left := end - clock()) > 0:
                observation = await observe(gateway, client)
                view.show(
                    Moment(
                        phase=phase,
                        seconds_left=left,
                        agents=agents.agents,
                        turns=len(agents.turn_seconds),
                        failed=len(agents.failures),
                        now=clock(),
                        observation=observation,
                        hit_rate=_hit_rate(before, observation),
                        earlier=earlier,
                    )
                )
                results[phase] = summarize(agents, before, observation, clock() - began)
                await asyncio.sleep(min(_LOOK_INTERVAL_SECONDS, max(end - clock(), 0)))
            return summarize(agents, before, await observe(gateway, client), seconds)

    async def work() -> PhaseResult:
        await agents.run()
        raise AssertionError("agents work until they are stopped")

    async def watch() -> PhaseResult:
        await gateway.watch()

    return await first_of(look_on(), work(), watch())


def summarize(agents: Agents, before: Observation, after: Observation, seconds: float) -> PhaseResult:
    """Take the numbers of a phase while its last turns are still running."""
    unfinished = agents.unfinished_seconds
    turn_seconds = sorted([*agents.turn_seconds, *unfinished])
    return PhaseResult(
        turns=len(agents.turn_seconds),
        failed=len(agents.failures),
        holds=after.holds - before.holds,
        pauses=after.pauses - before.pauses,
        resumes=after.resumes - before.resumes,
        hit_rate=_rounded(_hit_rate(before, after), 4),
        turn_seconds_p50=_rounded(percentile(turn_seconds, 50), 3),
        turn_seconds_p99=_rounded(percentile(turn_seconds, 99), 3),
        unfinished=len(unfinished),
        held_at_end=after.held,
        load_seconds=seconds,
        first_failure=agents.failures[0] if agents.failures else None,
    )


def percentile(ascending: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile of sorted values, 0 < ``percent`` <= 100; None of no values."""
    if not ascending:
        return None
    return ascending[math.ceil(len(ascending) * percent / 100) - 1]


def _hit_rate(before: Observation, after: Observation) -> float | None:
    hits, queries = after.hits_since(before)
    return hits / queries if queries else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
