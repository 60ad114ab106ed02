"""Admission by program, the classic rules: *when* a request may go, and where its program has its place.

Theory of operation
-------------------
A session's requests form a FIFO and run one at a time. The request at the front *begins* a turn: its program is
created, or turns from acting to reasoning. From there

    ============  =========================  ====================================================
    the turn is   its program is             and it leaves that state by
    ============  =========================  ====================================================
    waiting       paused and reasoning       resume or force (→ running), abort (→ rolled back)
    running       active and reasoning       completed (→ acting), abort (→ rolled back)
    ============  =========================  ====================================================

so a turn waits exactly while its program is paused: nothing else needs to be asked again later, and a waiting
front is only ever released by the tick. A *final* turn has no program: it removes it as it begins.

Two rules are kept throughout. Every event costs one dictionary look-up when its request is not tracked. And a
program changes only between `Roster.open` and `Roster.close`, so that ledger and orders are right after every event.

Pure and single-threaded by contract: time is an argument (seconds, never decreasing), decisions are return values.
The rules and their wording are those of scheduling.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from math import floor

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.decisions import (
    Decision,
    Mark,
    Pause,
    Reject,
    Release,
    Resume,
)
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle, Program, Status, Turn
from thunderagent_epp.scheduling.rooms import Rooms
from thunderagent_epp.scheduling.roster import CONTINUING, IDLE, NEW
from thunderagent_epp.scheduling.rules import AdmissionRules, lose_place


class Classifier(AdmissionRules[Program]):
    """Decides by the classic rules which tracked requests go, and which programs pause and resume."""

    def __init__(self, policy: AdmissionPolicy, snapshot: CapacitySnapshot | None = None) -> None:
        super().__init__(policy, snapshot)
        self._queues: dict[str, dict[Turn, None]] = {}
        """Each session's turns in order of arrival; the first may be running."""

    def arrive(
        self,
        request: str,
        session: str,
        input_tokens: int,
        now: float,
        *,
        final: bool = False,
        pinned: WorkerRank | None = None,
    ) -> tuple[Decision, ...]:
        """Track a request of ``input_tokens`` >= 0; released at once, rejected, or neither: then it waits."""
        if (reason := self._refuses(request, session, final)) is not None:
            return (Reject(request, reason),)
        self._retire(now)
        self._settle()
        turn = Turn(request, session, input_tokens, input_tokens, final, pinned)
        self._tracked[request] = turn
        self._queues.setdefault(session, {})[turn] = None
        return self._admit_front(session, now)

    def progress(self, request: str, context_tokens: int) -> None:
        """The live context of a tracked request is ``context_tokens`` now; it never shrinks."""
        turn = self._tracked.get(request)
        if turn is None or context_tokens <= turn.context_tokens:
            return
        program = self._program_of(turn)
        if program is None:
            turn.context_tokens = context_tokens
        else:
            self._roster.grow(program, context_tokens)

    def completed(self, request: str, context_tokens: int | None, now: float) -> tuple[Decision, ...]:
        """The turn ended well with ``context_tokens`` in its context, None for what progress said last."""
        turn = self._tracked.get(request)
        if turn is None:
            return ()
        if not turn.running:
            return self.aborted(request, now)
        program = self._program_of(turn)
        if program is not None:
            self._roster.open(program)
            program.tokens = turn.context_tokens if context_tokens is None else context_tokens
            program.turn = None
            program.status = Status.ACTING
            program.acting_since = now
            if program.marked:
                program.marked = False
                lose_place(program)
            self._roster.close(program)
        return self._forget(turn, now)

    def aborted(self, request: str, now: float) -> tuple[Decision, ...]:
        """The request failed or its client left: its program is put back as it was before the turn."""
        turn = self._tracked.get(request)
        if turn is None:
            return ()
        program = self._program_of(turn)
        if program is not None:
            self._roster.drop(program)
            if turn.before is not None:
                self._roster.add(turn.before)
        return self._forget(turn, now)

    def tick(self, now: float) -> tuple[Decision, ...]:
        """What is due every ``scheduler_interval_seconds``: resume, force, pause, in this order."""
        if not len(self._roster):
            return ()
        self._retire(now)
        self._settle()
        decisions: list[Decision] = []
        if self._roster.paused_count:
            decisions += self._resume()
            decisions += self._force(now)
        decisions += self._relieve()
        return tuple(decisions)

    # -- the turn at the front of a session ------------------------------------------------------------------------

    def _admit_front(self, session: str, now: float) -> tuple[Release, ...]:
        """Begin the session's next turn, unless one has begun and not ended yet."""
        turn = next(iter(self._queues[session]))
        if turn.begun:
            return ()
        turn.begun = True
        program = self._roster.get(session)
        if turn.final:
            worker = None if program is None else program.worker
            if program is not None:
                self._roster.drop(program)
            return (self._start(turn, worker),)
        if program is None:
            program = Program(session, tokens=turn.input_tokens, turn=turn)
            self._roster.add(program)
        else:
            turn.before = copy(program)
            self._roster.open(program)
            program.status = Status.REASONING
            program.steps += 1
            program.tokens = turn.input_tokens or program.tokens
            program.acting_since = None
            program.turn = turn
            self._roster.close(program)
        try:
            worker = self._place(program, turn)
        except _DeferError:
            self._roster.open(program)
            lose_place(program)
            if program.deferred_since is None:
                program.deferred_since = now
            self._roster.close(program)
            return ()
        return (self._release(program, turn, worker),)

    def _place(self, program: Program, turn: Turn) -> WorkerRank | None:
        """Where a program that has just begun a turn runs, None to leave it to the selector. Raises _DeferError."""
        if program.paused:
            raise _DeferError
        live, usable = self._snapshot.live, self._snapshot.usable
        if program.worker in live:
            return program.worker
        if not usable:
            return None
        if turn.before is None and self._roster.paused_count:
            raise _DeferError
        ledger = self._roster.ledger
        need = turn.input_tokens + self._policy.buffer_per_program
        candidates = usable if turn.pinned is None else {turn.pinned} & usable.keys()
        fitting = [(ledger.used(w), w) for w in candidates if usable[w] - ledger.used(w) >= need]
        if not fitting:
            raise _DeferError
        return min(fitting)[1]

    def _release(self, program: Program, turn: Turn, worker: WorkerRank | None) -> Release:
        self._charge(program, worker)
        return self._start(turn, worker)

    def _charge(self, program: Program, worker: WorkerRank | None) -> None:
        """Make a program active on ``worker``."""
        self._roster.open(program)
        program.lifecycle = Lifecycle.ACTIVE
        program.deferred_since = None
        program.worker = worker
        self._roster.close(program)

    def _forget(self, turn: Turn, now: float) -> tuple[Release, ...]:
        """A request ended, in whatever way: the session's next one is admitted."""
        del self._tracked[turn.request]
        self._running -= turn.running
        queue = self._queues[turn.session]
        del queue[turn]
        if queue:
            return self._admit_front(turn.session, now)
        del self._queues[turn.session]
        return ()

    def _program_of(self, turn: Turn) -> Program | None:
        """The program whose begun turn this is; None for a final turn and for one still behind another."""
        program = self._roster.get(turn.session)
        return program if program is not None and program.turn is turn else None

    # -- what is due without a request -----------------------------------------------------------------------------

    def _resume(self) -> Iterator[Decision]:
        """Take paused programs while they fit the room of all workers together, then place the largest first."""
        buffer = self._policy.buffer_per_program
        ceiling = self._policy.pause_threshold - self._policy.resume_hysteresis
        ledger = self._roster.ledger
        room = {
            worker: left
            for worker, capacity in self._snapshot.usable.items()
            if (left := floor(capacity * ceiling) - ledger.used(worker)) > buffer
        }
        total = sum(room.values())
        taken: list[tuple[int, str]] = []
        for group in (CONTINUING, NEW, IDLE):
            for size, session in self._roster.paused(group):
                if size + buffer > total:
                    break  # the rest of the group is at least as large
                total -= size + buffer
                taken.append((-size, session))
        rooms = Rooms(room)
        for negative_size, session in sorted(taken):
            program = self._roster.get(session)
            assert program is not None
            worker = rooms.largest() if (pinned := _pin(program)) is None else pinned
            need = buffer - negative_size
            if worker is None or rooms.of(worker) < need:
                continue
            rooms.take(worker, need, keep_above=buffer)
            yield from self._bring_back(program, worker, forced=False)

    def _force(self, now: float) -> Iterator[Decision]:
        """Resume what was held too long, each where most is left if idle programs fade, even over capacity."""
        live, usable = self._snapshot.live, self._snapshot.usable
        due = self._roster.deferred_for(self._policy.resume_timeout_seconds, now)
        if not due or not live:
            return
        decayed = self._roster.decayed_used(now, self._policy.acting_decay_tau_seconds)
        rooms = Rooms({worker: capacity - decayed.get(worker, 0) for worker, capacity in usable.items()})
        for program in due:
            worker = rooms.largest() if (pinned := _pin(program)) is None else pinned
            if pinned is not None and pinned not in live:
                continue
            if worker is not None and worker in usable:
                rooms.take(worker, program.size + self._policy.buffer_per_program)
            yield from self._bring_back(program, worker, forced=True)

    def _bring_back(self, program: Program, worker: WorkerRank | None, *, forced: bool) -> Iterator[Decision]:
        yield Resume(program.session, worker, forced)
        if program.turn is None:
            self._charge(program, worker)
        else:
            yield self._release(program, program.turn, worker)

    def _relieve(self) -> Iterator[Decision]:
        """Pause idle programs of each worker over its threshold, and mark the running ones if that is not enough."""
        ledger = self._roster.ledger
        for worker in ledger.over:
            capacity = self._snapshot.by_id[worker].capacity_tokens
            assert capacity is not None
            target = floor(capacity * self._policy.pause_target)
            for program in self._roster.idle_on(worker):
                if ledger.used(worker) <= target:
                    break
                self._roster.open(program)
                lose_place(program)
                self._roster.close(program)
                yield Pause(program.session, worker)
            if ledger.used(worker) > target:
                for program in ledger.unmarked(worker):
                    ledger.mark(program)
                    yield Mark(program.session, worker)


class _DeferError(Exception):
    """The program cannot go now."""


def _pin(program: Program) -> WorkerRank | None:
    """The only worker a waiting turn may be charged to; None leaves it to the rules."""
    return None if program.turn is None else program.turn.pinned
