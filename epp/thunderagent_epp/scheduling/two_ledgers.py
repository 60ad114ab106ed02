"""Admission over two pools of workers at once, as disaggregated serving needs it (kubernetes.md, *retentionPool*).

Theory of operation
-------------------
The rules of admission know one set of workers and stay as they are. `retentionPool` decides which set that is:

    ========  ==================================================================================================
    Decode    one ledger, over the decode pool: the rules by themselves, nothing of this module
    Prefill   programs have their place on prefill workers; a decode worker is charged for the turns that run on it
              and for nothing between them
    Both      programs have a place on a prefill worker and on a decode worker; the tighter of the two holds them
    ========  ==================================================================================================

For the last two, two sets of rules stand one behind the other, the prefill pool's first: a turn arrives at the decode
pool's when the prefill pool's have released it, and goes when both have. Always in this order, so that no two turns
can each have what the other waits for. Each ledger pauses and resumes by its own pool's load; a program that lost its
place in either waits for that one. What does not retain is made of the rules' own rollback: a turn that has run is
aborted there, and the program that it alone had created is gone with its charge.

A turn is charged the same in both ledgers, its answer included: the next prompt begins with that answer, and is
computed where this one was. A ``prefill-decode`` worker is in both pools and its capacity counts in both; it shows
the larger of its two charges. A turn may be held by each ledger for as long as the policy lets it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Mark, ProgramState, Reason, Reject, Release, State
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle, Status
from thunderagent_epp.scheduling.rules import AdmissionRules
from thunderagent_epp.scheduling.topology import decode_pool, prefill_pool


@dataclass(slots=True)
class _Turn:
    session: str
    input_tokens: int
    final: bool
    prefill: WorkerRank | None = None
    going: bool = False


class TwoLedgers:
    """To its host what `AdmissionRules` are: a `Release` names the decode worker, `prefill_target` the other one.

    ``retain_decode`` False: decode workers are charged for running turns only.
    """

    def __init__(self, prefill: AdmissionRules[Any], decode: AdmissionRules[Any], *, retain_decode: bool) -> None:
        self._prefill = prefill
        self._decode = decode
        self._retain_decode = retain_decode
        self._turns: dict[str, _Turn] = {}
        self._going = 0

    @property
    def interval_seconds(self) -> float:
        """Time between two ticks."""
        return self._prefill.interval_seconds

    @property
    def tracked(self) -> int:
        """Requests that have not ended."""
        return len(self._turns)

    @property
    def waiting(self) -> int:
        """Tracked requests that have not been released by both ledgers."""
        return len(self._turns) - self._going

    @property
    def census(self) -> Mapping[tuple[Status, Lifecycle], int]:
        """How many programs there are of each status and lifecycle; paused is what either ledger has paused."""
        if not any(number for (_, lifecycle), number in self._decode.census.items() if lifecycle is Lifecycle.PAUSED):
            return self._prefill.census
        programs = self.dump().programs.values()
        return Counter((Status(program.status), Lifecycle(program.lifecycle)) for program in programs)

    def snapshot(self, capacity: CapacitySnapshot) -> None:
        """Take a newer snapshot of the workers of both pools."""
        self._prefill.snapshot(prefill_pool(capacity))
        self._decode.snapshot(decode_pool(capacity))

    def configure(self, policy: AdmissionPolicy) -> None:
        """Go on under other parameters."""
        self._prefill.configure(policy)
        self._decode.configure(policy)

    def used(self, worker: WorkerRank) -> int:
        """Tokens charged to one worker."""
        return max(self._prefill.used(worker), self._decode.used(worker))

    def lifecycle(self, session: str) -> Lifecycle | None:
        """Whether a session's program is active in both ledgers or paused in either; None where there is no program."""
        either = (self._prefill.lifecycle(session), self._decode.lifecycle(session))
        return Lifecycle.PAUSED if Lifecycle.PAUSED in either else either[0] or either[1]

    def prefill_target(self, request: str) -> WorkerRank | None:
        """The prefill worker on which a released request's program has its place."""
        turn = self._turns.get(request)
        return None if turn is None else turn.prefill

    def arrive(
        self, request: str, session: str, input_tokens: int, now: float, *, final: bool = False
    ) -> tuple[Decision, ...]:
        """Track a request; released at once, rejected, or neither: then it waits."""
        if request in self._turns:
            return (Reject(request, Reason.DUPLICATE_REQUEST),)
        self._turns[request] = _Turn(session, input_tokens, final)
        decisions = self._prefill.arrive(request, session, input_tokens, now, final=final)
        if any(isinstance(decision, Reject) for decision in decisions):
            del self._turns[request]
            return decisions
        return tuple(self._onward(decisions, now))

    def sent(self, request: str, worker: WorkerRank) -> None:
        """The running request really decodes on ``worker``."""
        self._decode.sent(request, worker)

    def prefilled(self, request: str, worker: WorkerRank) -> None:
        """The running request's prefill really went to ``worker``."""
        self._prefill.sent(request, worker)

    def progress(self, request: str, context_tokens: int) -> None:
        """The live context of a tracked request is ``context_tokens`` now."""
        self._prefill.progress(request, context_tokens)
        self._decode.progress(request, context_tokens)

    def completed(self, request: str, context_tokens: int | None, now: float) -> tuple[Decision, ...]:
        """The turn ended well with ``context_tokens`` in its context, None for what progress said last."""
        turn = self._turns.get(request)
        if turn is None or not turn.going:
            return self.aborted(request, now)
        self._forget(request)
        if self._retain_decode:
            freed = self._decode.completed(request, context_tokens, now)
        else:
            freed = self._decode.aborted(request, now)
        return (*self._released(freed), *self._onward(self._prefill.completed(request, context_tokens, now), now))

    def aborted(self, request: str, now: float) -> tuple[Decision, ...]:
        """The request failed or its client left, wherever it was: both programs are as they were before."""
        if request not in self._turns:
            return ()
        self._forget(request)
        freed = self._decode.aborted(request, now)
        return (*self._released(freed), *self._onward(self._prefill.aborted(request, now), now))

    def tick(self, now: float) -> tuple[Decision, ...]:
        """What is due every `interval_seconds`, in the prefill pool and then in the decode pool."""
        return (*self._onward(self._prefill.tick(now), now), *self._released(self._decode.tick(now)))

    def dump(self) -> State:
        """Everything known, at a cost that grows with the number of programs."""
        prefill, decode = self._prefill.dump(), self._decode.dump()
        sessions = sorted({*prefill.programs, *decode.programs})
        workers = sorted({*prefill.used, *decode.used})
        return State(
            programs={
                session: self._merged(prefill.programs.get(session), decode.programs.get(session))
                for session in sessions
            },
            used={worker: max(prefill.used.get(worker, 0), decode.used.get(worker, 0)) for worker in workers},
            waiting=tuple(sorted({*prefill.waiting, *decode.waiting})),
            tracked=self.tracked,
        )

    # -- from one ledger to the next -------------------------------------------------------------------------------

    def _onward(self, decisions: Iterable[Decision], now: float) -> Iterator[Decision]:
        """What the prefill pool's rules decided; what they released arrives at the decode pool's."""
        for decision in decisions:
            if not isinstance(decision, Release):
                yield decision
                continue
            turn = self._turns[decision.request]
            turn.prefill = decision.worker
            yield from self._released(
                self._decode.arrive(decision.request, turn.session, turn.input_tokens, now, final=turn.final)
            )

    def _released(self, decisions: Iterable[Decision]) -> Iterator[Decision]:
        """What the decode pool's rules decided, which is the last word on a request."""
        for decision in decisions:
            if isinstance(decision, Reject):
                # A limit was lowered since it was let in; it goes unaccounted for rather than wait for nothing.
                decision = Release(decision.request, None)
            if isinstance(decision, Release):
                self._turns[decision.request].going = True
                self._going += 1
            # Without retention there is nothing that could be paused when a turn completes.
            if self._retain_decode or not isinstance(decision, Mark):
                yield decision

    def _forget(self, request: str) -> None:
        self._going -= self._turns.pop(request).going

    def _merged(self, prefill: ProgramState | None, decode: ProgramState | None) -> ProgramState:
        """One program as the two ledgers have it; its worker is the decode worker where that retains it."""
        if prefill is None or decode is None:
            only = prefill or decode
            assert only is not None
            return only
        place = decode if self._retain_decode else prefill
        if Lifecycle.PAUSED in (prefill.lifecycle, decode.lifecycle):
            lifecycle, worker, rank = Lifecycle.PAUSED.value, None, None
        else:
            lifecycle, worker, rank = Lifecycle.ACTIVE.value, place.worker, place.rank
        return replace(prefill, lifecycle=lifecycle, worker=worker, rank=rank, marked=prefill.marked or place.marked)
