"""The event loop of one run: seats, arm and engines in simulated time.

Three kinds of events: a turn arrives, an engine's step ends, the arm's tick is due. At equal times they happen in
the order in which they were planned. Everything random was drawn by the workload; the loop itself has no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Final

from thunderagent_sim.fleet.arms import Arm, Dispatch, MakeArm
from thunderagent_sim.fleet.engine import Engine
from thunderagent_sim.fleet.service import FITTED, Service
from thunderagent_sim.fleet.turns import PlannedTurn, Turn
from thunderagent_sim.fleet.workload import Workload, mid_session

START_WITHIN_SECONDS: Final = 30.0
"""The first turns of a run come one after another, not all at once."""

SAMPLE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Loss:
    """A pod whose engine dies ``at_seconds`` and is back, empty, ``for_seconds`` later; its turns are sent again."""

    pod: int
    at_seconds: float
    for_seconds: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and how long it is watched. ``warmup_minutes`` of ``minutes`` are not counted."""

    sessions_per_pod: int
    pods: int = 4
    minutes: float = 40.0
    warmup_minutes: float = 10.0
    seed: int = 1
    service: Service = FITTED
    slowness: Mapping[int, float] = field(default_factory=dict)
    """Pods whose steps take longer, and how many times."""
    losses: Sequence[Loss] = ()
    burst_seconds: float | None = None
    """Time between two bursts: a turn that comes in between waits for the next one. None for no bursts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Each pod at one moment: tokens of context that running turns hold, that are cached, that the arm charges."""

    time: float
    held: tuple[int, ...]
    cached: tuple[int, ...]
    charged: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """What happened: every turn, and what the engines counted while it counted."""

    scenario: Scenario
    turns: list[Turn]
    start: float
    """When counting began."""
    end: float
    output_tokens: int
    preemptions: int
    samples: list[Sample]


class _Seat:
    """One place of the closed loop: a session, and when that ends the next one."""

    __slots__ = ("_random", "_sessions", "_turns", "_workload", "context_tokens", "index", "number", "outstanding")

    def __init__(self, index: int, seed: int, workload: Workload) -> None:
        # A text seeds by its SHA-512, the same on every machine.
        self._random = Random(f"{seed}/{index}")
        self._sessions = 0
        self._workload = workload
        self._turns = mid_session(workload, self._random)
        self.context_tokens = self._turns[0].shared_tokens
        """Context after the last turn; the next one's prompt extends it, or part of it."""
        self.index = index
        self.number = 0
        """Turns of the session that have begun."""
        self.outstanding = 0

    @property
    def session(self) -> str:
        """The present session's id."""
        return f"s{self.index:04}-{self._sessions}"

    @property
    def next_plan(self) -> PlannedTurn | None:
        """The session's next turn; None when it is over."""
        return self._turns[self.number] if self.number < len(self._turns) else None

    def next_session(self) -> PlannedTurn:
        """Begin the session that takes this one's place."""
        self._sessions += 1
        self._turns = self._workload.session(self._random)
        self.number = 0
        self.context_tokens = 0
        return self._turns[0]


_ARRIVAL, _STEP, _TICK, _SAMPLE, _WARM, _LOSS, _RETURN, _END = range(8)


class Fleet:
    """One run of one arm. ``on_time`` is told of the simulated time every few seconds of it."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        make_arm: MakeArm,
        on_time: Callable[[float], None] | None = None,
    ) -> None:
        self._scenario = scenario
        self._engines = [Engine(scenario.service, scenario.slowness.get(pod, 1.0)) for pod in range(scenario.pods)]
        self._arm: Arm = make_arm(self._engines)
        self._on_time = on_time
        seats = scenario.pods * scenario.sessions_per_pod
        self._seats = [_Seat(index, scenario.seed, workload) for index in range(seats)]
        self._events: list[tuple[float, int, int, int]] = []
        self._planned = 0
        self._steps_planned = [-1.0 for _ in self._engines]
        self._touched: list[int] = []
        self._turns: list[Turn] = []
        self._samples: list[Sample] = []

    def run(self) -> Run:
        """Run to the end of the scenario."""
        scenario = self._scenario
        end, start = scenario.minutes * 60.0, scenario.warmup_minutes * 60.0
        for seat in self._seats:
            self._plan(START_WITHIN_SECONDS * seat.index / len(self._seats), _ARRIVAL, seat.index)
        self._plan(0.0, _SAMPLE)
        self._plan(start, _WARM)
        self._plan(end, _END)
        if self._arm.tick_seconds is not None:
            self._plan(self._arm.tick_seconds, _TICK)
        for index, loss in enumerate(scenario.losses):
            self._plan(loss.at_seconds, _LOSS, index)
        before_start = preemptions = 0
        events = self._events
        while True:
            now, _, kind, index = heappop(events)
            if kind == _STEP:
                if self._engines[index].next_event != now:
                    continue  # the stretch was cut, or the pod is gone
                self._finish_step(index, now)
            elif kind == _ARRIVAL:
                self._begin_turn(self._seats[index], now)
            elif kind == _TICK:
                self._send(self._arm.tick(now), now)
                assert self._arm.tick_seconds is not None
                self._plan(now + self._arm.tick_seconds, _TICK)
            elif kind == _SAMPLE:
                self._sample(now)
            elif kind == _WARM:
                before_start = self._generated(now)
                preemptions = sum(engine.preemptions for engine in self._engines)
            elif kind == _LOSS:
                self._lose(scenario.losses[index], now)
            elif kind == _RETURN:
                self._arm.returned(index)
            else:
                break
            self._settle(now)
        for engine in self._engines:
            for turn in engine.turns():
                turn.generated = engine.generated_of(turn, end)
        return Run(
            scenario=scenario,
            turns=self._turns,
            start=start,
            end=end,
            output_tokens=self._generated(end) - before_start,
            preemptions=sum(engine.preemptions for engine in self._engines) - preemptions,
            samples=self._samples,
        )

    def _plan(self, time: float, kind: int, index: int = 0) -> None:
        self._planned += 1
        heappush(self._events, (time, self._planned, kind, index))

    def _generated(self, now: float) -> int:
        return sum(engine.generated(now) for engine in self._engines)

    def _begin_turn(self, seat: _Seat, now: float) -> None:
        plan = seat.next_plan or seat.next_session()
        seat.number += 1
        seat.outstanding += 1
        if not plan.overlaps:
            if plan.shared_tokens < seat.context_tokens:
                for engine in self._engines:
                    engine.cache.cut(seat.session, plan.shared_tokens)
            seat.context_tokens = plan.context_tokens
        turn = Turn(f"{seat.session}-{seat.number}", seat.session, seat.index, seat.number, plan, arrived=now)
        self._turns.append(turn)
        self._send(self._arm.arrive(turn, now), now)

    def _send(self, dispatches: Iterable[Dispatch], now: float) -> None:
        for turn, pod in dispatches:
            turn.released = now
            turn.pod = pod
            self._engines[pod].submit(turn)
            self._touched.append(pod)

    def _finish_step(self, pod: int, now: float) -> None:
        first, ended = self._engines[pod].finish()
        self._touched.append(pod)
        for turn in first:
            self._arm.responding(turn)
            seat = self._seats[turn.seat]
            following = seat.next_plan
            if following is not None and following.overlaps and seat.number == turn.number:
                self._begin_turn(seat, now)
        for turn in ended:
            turn.finished = now
            self._send(self._arm.ended(turn, now), now)
            seat = self._seats[turn.seat]
            seat.outstanding -= 1
            if not seat.outstanding:
                self._plan_next(seat, now)

    def _plan_next(self, seat: _Seat, now: float) -> None:
        """All turns of a session are done: its next one comes after a gap, another session at once."""
        plan = seat.next_plan
        at = now if plan is None else now + plan.gap_seconds
        burst = self._scenario.burst_seconds
        if burst is not None:
            at = burst * (int(at / burst) + 1)
        self._plan(at, _ARRIVAL, seat.index)

    def _settle(self, now: float) -> None:
        for pod in self._touched:
            engine = self._engines[pod]
            engine.settle(now)
            if engine.next_event != self._steps_planned[pod]:
                self._steps_planned[pod] = engine.next_event
                self._plan(engine.next_event, _STEP, pod)
        self._touched.clear()

    def _lose(self, loss: Loss, now: float) -> None:
        turns = self._engines[loss.pod].fail()
        self._send(self._arm.lost(turns, loss.pod, now), now)
        self._plan(now + loss.for_seconds, _RETURN, loss.pod)
        for turn in turns:
            turn.attempts += 1
            turn.id = f"{turn.session}-{turn.number}-{turn.attempts}"
            turn.released = turn.pod = turn.first_token = None
            self._send(self._arm.arrive(turn, now), now)

    def _sample(self, now: float) -> None:
        size = self._scenario.service.block_size
        caches = [engine.cache for engine in self._engines]
        self._samples.append(
            Sample(
                now,
                held=tuple(cache.pinned * size for cache in caches),
                cached=tuple(cache.cached * size for cache in caches),
                charged=tuple(self._arm.charged_tokens(pod) for pod in range(len(self._engines))),
            )
        )
        if self._on_time is not None:
            self._on_time(now)
        self._plan(now + SAMPLE_SECONDS, _SAMPLE)
