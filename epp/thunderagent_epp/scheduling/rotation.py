"""Admission by program, the rotating rules: whoever does not fit gets its turn within a bounded time.

Theory of operation
-------------------
Programs that do not fit wait, and those that have their place go on, for a while. How long is the whole question. To
swap one program for another costs the prefill of what comes back; to swap too often is what an engine without
admission does, and to swap too seldom starves who waits. So the policy has one number, the *hold budget*: the share
of all prefill that rotating programs may cost. If every waiting program is brought in once in ``H`` seconds, that
costs ``waiting tokens ÷ H`` of a prefill rate of ``workers × tokens per second``. A hold costs those who wait, a swap
those who run; so the more of the load waits, the more prefill may go into letting it: ``1 + w`` times the budget, ``w``
being the share of all tokens that waits. Hence

    H = waiting tokens ÷ (workers × prefill tokens per second × hold budget × (1 + w)).

H grows with the load, and so does what holding saves; at the load of the moment it bounds every hold, whatever the
size of its program. What is let vary is the rate at which programs are swapped: the budget is one of a minute, so H
follows a growing queue slowly, which evens out the holds, and a shrinking one at once.

Attention makes one large context dearer to compute again than two of half its size. So what rotates is the smaller
half, and the larger contexts keep their place while anything else can be had.

    A program is    and it leaves that state by
    --------------  ------------------------------------------------------------------------------------------
    running         its last turn ending (→ idle)
    idle            its next turn (→ running), making room (→ paused), retention (→ gone)
    paused          its next turn (→ waiting), retention (→ gone)
    waiting         a worker with room for it (→ running), the last of its clients leaving (→ as it was)

* *Order.* Who waits longest comes first, new programs and continuing ones alike; a later one goes before it only
  where that takes nothing from it.
* *Reservation.* One that fits nowhere reserves a worker, at most one each: its room is kept from all others.
* *Making room.* On a reserved worker, programs idle for so long that they will hardly come back are paused at once.
  When the waiter has waited H, so are idle programs of the smaller half of those there, smallest first, and each such
  that ends its turn meanwhile, until the waiter fits; when it has waited half as long again, every idle one. Nothing
  is cut in the middle of a turn and nobody is marked ahead.
* *Headroom.* Where others wait, programs are let in up to a little below the threshold, as those that are there grow;
  who waits alone may have all of it. A worker over its threshold pauses idle programs at once, those that will hardly
  come back first, then the smallest.
* *Overlap.* Turns of one session run at the same time, each charged for what it adds to the session's shared context;
  the last to end makes the program idle. Idle programs are charged in full.

Every event that frees room or makes a program idle is acted on, and a sweep once a second looks at what only time
has changed. Pure, single-threaded and deterministic like `classifier.py`, whose interface it shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import floor

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Pause, Reject, Release, Resume
from thunderagent_epp.scheduling.hold_time import HoldTime
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle, Status, Turn
from thunderagent_epp.scheduling.rotating_program import RotatingProgram
from thunderagent_epp.scheduling.rules import AdmissionRules, lose_place

SWEEP_SECONDS = 1.0

GONE_SECONDS = 15.0
"""A program idle for longer will hardly come back: most tools take less, and harnesses do not say goodbye."""

LET_IN_SHARE = 0.93
"""Share of the pause threshold up to which programs are let in where others wait; the rest is for those to grow into.

More keeps more programs in their place, less forgives a ledger that counts short: with 0.93 one that is a tenth short
costs little (docs/study.md).
"""

PATIENCE = 1.5
"""After so many times H, a waiter is made room for at the cost of any idle program, not only of small ones."""


class Rotation(AdmissionRules[RotatingProgram]):
    """Decides by the rotating rules which tracked requests go, and which programs pause and resume."""

    def __init__(self, policy: AdmissionPolicy, snapshot: CapacitySnapshot | None = None) -> None:
        self._reserved: dict[WorkerRank, str] = {}
        """Session of the waiting program that keeps a worker's room from all others."""
        self._hold = HoldTime()
        super().__init__(_charged_in_full(policy), snapshot)

    def configure(self, policy: AdmissionPolicy) -> None:
        """Go on under other parameters; every charge is made anew, at the cost of a look at every program."""
        super().configure(_charged_in_full(policy))

    @property
    def interval_seconds(self) -> float:
        """Time between two sweeps."""
        return min(SWEEP_SECONDS, self._policy.scheduler_interval_seconds)

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
        """Track a request of ``input_tokens`` >= 0; its release, if it may go at once, is among the decisions."""
        if (reason := self._refuses(request, session, final)) is not None:
            return (Reject(request, reason),)
        self._retire(now)
        self._settle()
        turn = Turn(request, session, input_tokens, input_tokens, final, pinned, begun=True)
        self._tracked[request] = turn
        program = self._roster.get(session)
        if final and (program is None or not program.turns):
            worker = None if program is None else program.worker
            if program is not None:
                self._roster.drop(program)
            return (self._start(turn, worker), *self._admit(now))
        if program is None:
            program = RotatingProgram(session, tokens=0, turns={request: turn}, turn=turn)
            self._roster.add(program)
        else:
            self._roster.open(program)
            if not program.turns:
                program.idle_before, program.paused_before = program.acting_since, program.paused
                program.steps += 1
            program.turns[request] = turn
            program.turn = turn
            program.status = Status.REASONING
            program.acting_since = None
            program.ends = program.ends or final
            self._roster.close(program)
            if not program.paused and program.worker in self._snapshot.live:
                return (self._start(turn, program.worker),)
        if not program.paused:
            self._pause(program)
        if program.deferred_since is None:
            self._roster.open(program)
            program.deferred_since = now
            self._roster.close(program)
        return tuple(self._admit(now))

    def progress(self, request: str, context_tokens: int) -> None:
        """The live context of a tracked request is ``context_tokens`` now; it never shrinks."""
        turn = self._tracked.get(request)
        if turn is None or context_tokens <= turn.context_tokens:
            return
        program = self._program_of(turn)
        if program is None or program.paused:
            self._change_context(program, turn, context_tokens)
            return
        before = program.size
        turn.context_tokens = context_tokens
        if program.worker is not None:
            self._roster.ledger.grow(program, program.size - before)

    def completed(self, request: str, context_tokens: int | None, now: float) -> tuple[Decision, ...]:
        """The turn ended well with ``context_tokens`` in its context, None for what progress said last."""
        turn = self._tracked.get(request)
        if turn is None:
            return ()
        if not turn.running:
            return self.aborted(request, now)
        self._forget(turn)
        program = self._program_of(turn)
        if program is None:
            return tuple(self._admit(now))
        context = turn.context_tokens if context_tokens is None else context_tokens
        self._roster.open(program)
        del program.turns[request]
        if program.turns:
            # What the others share is not less than it was; and should they fail, it has been idle since now.
            program.tokens = max(program.tokens, context)
            program.steps += 1
            program.idle_before, program.paused_before = now, False
        else:
            program.tokens = context
        self._end_turn(program, now)
        return tuple(self._admit(now))

    def aborted(self, request: str, now: float) -> tuple[Decision, ...]:
        """The request failed or its client left: its program is put back as it was before the turn."""
        turn = self._tracked.get(request)
        if turn is None:
            return ()
        self._forget(turn)
        program = self._program_of(turn)
        if program is None:
            return tuple(self._admit(now))
        self._roster.open(program)
        del program.turns[request]
        if program.turns:
            self._end_turn(program, now)
        elif program.idle_before is None:
            # Nothing was ever completed: the turns created it.
            self._roster.close(program)
            self._drop(program)
        else:
            program.steps -= 1
            if program.paused_before and not program.paused:
                lose_place(program)
            self._end_turn(program, program.idle_before)
        return tuple(self._admit(now))

    def tick(self, now: float) -> tuple[Decision, ...]:
        """The sweep: what only time has changed, and workers that grew over their threshold."""
        if not len(self._roster):
            return ()
        self._retire(now)
        self._settle()
        return (*self._relieve(now), *self._admit(now), *self._force(now))

    # -- turns and programs ----------------------------------------------------------------------------------------

    def _program_of(self, turn: Turn) -> RotatingProgram | None:
        """The program a turn is one of; None for a final turn that had no other beside it."""
        program = self._roster.get(turn.session)
        return program if program is not None and program.turns.get(turn.request) is turn else None

    def _forget(self, turn: Turn) -> None:
        del self._tracked[turn.request]
        self._running -= turn.running

    def _end_turn(self, program: RotatingProgram, acting_since: float) -> None:
        """Put an opened program back after one of its turns has ended."""
        program.turn = next(iter(program.turns.values()), None)
        if program.turn is None:
            program.status = Status.ACTING
            program.acting_since = acting_since
            program.deferred_since = None
            program.idle_before = None
        self._roster.close(program)
        if program.turn is None and program.ends:
            self._drop(program)
        elif program.turn is None:
            self._unreserve(program.session)

    def _drop(self, program: RotatingProgram) -> None:
        self._roster.drop(program)
        self._unreserve(program.session)

    def _pause(self, program: RotatingProgram) -> None:
        self._roster.open(program)
        lose_place(program)
        self._roster.close(program)

    def _change_context(self, program: RotatingProgram | None, turn: Turn, context_tokens: int) -> None:
        if program is None:
            turn.context_tokens = context_tokens
            return
        self._roster.open(program)
        turn.context_tokens = context_tokens
        self._roster.close(program)

    def _bring_in(
        self, program: RotatingProgram, worker: WorkerRank | None, now: float, *, forced: bool
    ) -> Iterator[Decision]:
        """Give a waiting program its place, and release all its turns to it."""
        was_new = program.idle_before is None
        self._unreserve(program.session)
        self._roster.open(program)
        program.lifecycle = Lifecycle.ACTIVE
        program.deferred_since = None
        program.worker = worker
        self._roster.close(program)
        if not was_new or forced:
            yield Resume(program.session, worker, forced)
        for turn in program.turns.values():
            if not turn.running:
                yield self._start(turn, worker)

    # -- who waits, and where there is room ------------------------------------------------------------------------

    def _admit(self, now: float) -> Iterator[Decision]:
        """Let in who fits, longest waiter first, and make room for those whose time has come."""
        self._hold.observe(self._present_hold_seconds(), now)
        if self._roster.deferred_count:
            yield from self._admit_waiting(now)
            self._hold.observe(self._present_hold_seconds(), now)

    def _admit_waiting(self, now: float) -> Iterator[Decision]:
        usable = self._snapshot.usable
        for gone in self._reserved.keys() - usable.keys():
            del self._reserved[gone]
        if not usable:
            if self._snapshot.live:
                for program in self._roster.deferred():
                    yield from self._bring_in(program, None, now, forced=False)
            return
        while self._roster.deferred_count:
            went = list(self._admit_once(now))
            yield from went
            # One that goes leaves its reservation to others, which may then find room.
            if not any(isinstance(decision, Release) for decision in went):
                return

    def _admit_once(self, now: float) -> Iterator[Decision]:
        free = {worker: self._free(worker) for worker in self._snapshot.usable}
        for program in self._who_may_go(free):
            worker = self._fitting(program, free)
            if worker is None:
                worker = self._reserve(program)
                if worker is None:
                    continue
                yield from self._make_room(worker, program, now)
                free[worker] = self._free(worker)
                if not self._fits(program, worker):
                    continue
            yield from self._bring_in(program, worker, now, forced=False)
            free[worker] = self._free(worker)

    def _who_may_go(self, free: Mapping[WorkerRank, int]) -> list[RotatingProgram]:
        """The waiting programs worth a look, longest waiter first.

        With every worker reserved and less room than the smallest of them takes, only those with a reservation can
        go; that is the usual case under load, and then the length of the queue costs nothing.
        """
        least = self._roster.least_deferred_tokens() + self._policy.buffer_per_program
        if len(self._reserved) < len(free) or max(free.values()) >= least:
            return self._roster.deferred()
        holders = (self._roster.get(session) for session in self._reserved.values())
        return sorted((holder for holder in holders if holder is not None), key=_longest_deferred)

    def _present_hold_seconds(self) -> float:
        """H of the theory for the programs that wait now."""
        waiting = self._roster.deferred_tokens
        usable = self._snapshot.usable
        if not waiting or not usable:
            return 0.0
        placed = sum(self._roster.ledger.used(worker) for worker in usable)
        budget = self._policy.hold_budget * (1.0 + waiting / (waiting + placed))
        return waiting / (len(usable) * self._policy.prefill_tokens_per_second * budget)

    def _room(self, worker: WorkerRank) -> int:
        """Tokens that may still be charged to a worker; below 0 where it holds more than programs are let in for."""
        return self._ceiling(worker) - self._roster.ledger.used(worker)

    def _need(self, program: RotatingProgram) -> int:
        return program.size + self._policy.buffer_per_program

    def _fits(self, program: RotatingProgram, worker: WorkerRank) -> bool:
        """Whether a worker has room for a program; one that no worker could ever hold gets the largest to itself."""
        if self._room(worker) >= self._need(program):
            return True
        return not self._roster.ledger.used(worker) and self._need(program) > self._ceiling(worker)

    def _could_hold(self, program: RotatingProgram, worker: WorkerRank) -> bool:
        """Whether a program can wait for a worker: it fits there once others have gone."""
        ceiling = self._ceiling(worker)
        return self._need(program) <= ceiling or ceiling == max(map(self._ceiling, self._snapshot.usable))

    def _ceiling(self, worker: WorkerRank) -> int:
        """Tokens up to which programs are let in on a worker."""
        share = LET_IN_SHARE if self._roster.deferred_count > 1 else 1.0
        return floor(self._snapshot.usable[worker] * self._policy.pause_threshold * share)

    def _free(self, worker: WorkerRank) -> int:
        """Room of a worker that nobody has reserved."""
        holder = self._roster.get(self._reserved.get(worker, ""))
        return self._room(worker) - (0 if holder is None else self._need(holder))

    def _fitting(self, program: RotatingProgram, free: Mapping[WorkerRank, int]) -> WorkerRank | None:
        """A worker that takes the program as it is: its reserved one, the one it came from, or the least busy."""
        reserved = self._reservation(program)
        if reserved is not None and self._fits(program, reserved):
            return reserved
        need = self._need(program)
        pinned = _pin(program)
        if pinned is not None:
            return pinned if free.get(pinned, -1) >= need else None
        if program.came_from is not None and free.get(program.came_from, -1) >= need:
            return program.came_from
        # By what runs there: programs that are gone are charged too, and most where few new ones come.
        open_to_it = (one for one in free if free[one] >= need)
        return min(open_to_it, key=lambda one: (self._running_on(one), -free[one], one), default=None)

    def _running_on(self, worker: WorkerRank) -> int:
        """How many running programs have their place on a worker."""
        account = self._roster.ledger.account(worker)
        return 0 if account is None else len(account.reasoning)

    def _reservation(self, program: RotatingProgram) -> WorkerRank | None:
        return next((worker for worker, session in self._reserved.items() if session == program.session), None)

    def _reserve(self, program: RotatingProgram) -> WorkerRank | None:
        """Keep the worker that can give most for a program; None where all are kept for others."""
        reserved = self._reservation(program)
        if reserved is not None:
            return reserved
        pinned = _pin(program)
        open_to_all = [
            worker
            for worker in self._snapshot.usable
            if worker not in self._reserved and (pinned or worker) == worker and self._could_hold(program, worker)
        ]
        if not open_to_all:
            return None
        worker = min(open_to_all, key=lambda one: (-self._room(one) - self._roster.ledger.idle_tokens(one), one))
        self._reserved[worker] = program.session
        return worker

    def _unreserve(self, session: str) -> None:
        for worker, holder in self._reserved.items():
            if holder == session:
                del self._reserved[worker]
                return

    def _make_room(self, worker: WorkerRank, program: RotatingProgram, now: float) -> Iterator[Decision]:
        """Pause idle programs of a worker until a program fits there, or as far as they may be paused now."""
        assert program.deferred_since is not None
        waited = now - program.deferred_since
        largest = self._largest_to_yield(worker, waited)
        for victim in self._idle_on(worker, now):
            if self._fits(program, worker):
                return
            if victim.size <= largest or _is_gone(victim, now):
                yield self._give_up_place(victim, worker)

    def _largest_to_yield(self, worker: WorkerRank, waited: float) -> float:
        """The size up to which a worker's idle programs make room for one that has waited for so many seconds."""
        if waited < self._hold.seconds:
            return -1
        if waited >= self._hold.seconds * PATIENCE:
            return float("inf")
        sizes = sorted(program.size for program in self._roster.on(worker))
        return sizes[(len(sizes) - 1) // 2] if sizes else -1

    def _idle_on(self, worker: WorkerRank, now: float) -> list[RotatingProgram]:
        """The idle programs of a worker in the order in which they lose their place: who is gone, then by size."""
        return sorted(self._roster.idle_on(worker), key=lambda program: not _is_gone(program, now))

    def _relieve(self, now: float) -> Iterator[Decision]:
        """Pause idle programs of each worker over its threshold."""
        ledger = self._roster.ledger
        for worker in ledger.over:
            for victim in self._idle_on(worker, now):
                if not ledger.is_over(worker):
                    break
                yield self._give_up_place(victim, worker)

    def _give_up_place(self, victim: RotatingProgram, worker: WorkerRank) -> Pause:
        victim.came_from = worker
        self._pause(victim)
        return Pause(victim.session, worker)

    def _force(self, now: float) -> Iterator[Decision]:
        """The last resort against a defect: resume what waited for the resume timeout, where most is left."""
        usable = self._snapshot.usable
        for program in self._roster.deferred_for(self._policy.resume_timeout_seconds, now):
            pinned = _pin(program)
            if pinned is not None and pinned not in usable:
                continue
            worker = pinned or min(usable, key=lambda one: (-self._room(one), one), default=None)
            if worker is not None:
                yield from self._bring_in(program, worker, now, forced=True)


def _charged_in_full(policy: AdmissionPolicy) -> AdmissionPolicy:
    return policy.model_copy(update={"acting_token_weight": 1.0})


def _pin(program: RotatingProgram) -> WorkerRank | None:
    """The only worker a waiting program may be charged to; None leaves it to the rules."""
    return next((turn.pinned for turn in program.turns.values() if turn.pinned is not None), None)


def _is_gone(program: RotatingProgram, now: float) -> bool:
    """Whether an idle program has been so for so long that it will hardly come back."""
    assert program.acting_since is not None
    return now - program.acting_since >= GONE_SECONDS


def _longest_deferred(program: RotatingProgram) -> tuple[float, str]:
    assert program.deferred_since is not None
    return program.deferred_since, program.session
