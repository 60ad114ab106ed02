"""What an admission policy is to its host, and what every one of them keeps.

The director, the simulator and replay drive `AdmissionRules` with the events of requests and carry out what it decides;
they know no rules. `Classifier` and `Rotation` are the rules. Here is what does not differ between them: which
programs there are and what they are charged, which requests are tracked, and what a snapshot or time alone takes away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import floor
from typing import Generic, TypeVar

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, ProgramState, Reason, Release, State
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle, Program, Status, Turn
from thunderagent_epp.scheduling.roster import Roster

P = TypeVar("P", bound=Program)


class AdmissionRules(ABC, Generic[P]):
    """Decides when tracked requests go, and which programs pause and resume.

    Pure and single-threaded: ``now`` is seconds on the caller's clock and never decreases, decisions are return values.
    An event of a request that is not tracked changes nothing and costs one look-up.
    """

    def __init__(self, policy: AdmissionPolicy, snapshot: CapacitySnapshot | None = None) -> None:
        self._policy = policy
        self._roster: Roster[P] = Roster(policy)
        self._tracked: dict[str, Turn] = {}
        self._running = 0
        self._snapshot = CapacitySnapshot()
        self._placed_by = self._snapshot
        """The snapshot by which the programs have their places; an older one until the next arrival or tick."""
        self.snapshot(snapshot or CapacitySnapshot())

    @abstractmethod
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

    def sent(self, request: str, worker: WorkerRank) -> None:
        """The running request really went to ``worker``; its program's place is there now."""
        turn = self._tracked.get(request)
        if turn is None or not turn.running:
            return
        program = self._program_of(turn)
        if program is not None and program.worker != worker:
            self._roster.open(program)
            program.worker = worker
            self._roster.close(program)

    @abstractmethod
    def progress(self, request: str, context_tokens: int) -> None:
        """The live context of a tracked request is ``context_tokens`` now; it never shrinks."""

    @abstractmethod
    def completed(self, request: str, context_tokens: int | None, now: float) -> tuple[Decision, ...]:
        """The turn ended well with ``context_tokens`` in its context, None for what progress said last."""

    @abstractmethod
    def aborted(self, request: str, now: float) -> tuple[Decision, ...]:
        """The request failed or its client left: its program is put back as it was before the turn."""

    @abstractmethod
    def tick(self, now: float) -> tuple[Decision, ...]:
        """What is due every `interval_seconds`."""

    @property
    def interval_seconds(self) -> float:
        """Time between two ticks."""
        return self._policy.scheduler_interval_seconds

    def snapshot(self, snapshot: CapacitySnapshot) -> None:
        """Take a newer snapshot. Programs on workers that are gone lose their place at the next arrival or tick."""
        self._snapshot = snapshot
        threshold = self._policy.pause_threshold
        self._roster.ledger.limit(
            {
                worker.id: floor(worker.capacity_tokens * threshold)
                for worker in snapshot.workers
                if worker.capacity_tokens is not None
            }
        )

    def configure(self, policy: AdmissionPolicy) -> None:
        """Go on under other parameters; every charge is made anew, at the cost of a look at every program."""
        programs = list(self._roster)
        self._policy = policy
        self._roster = Roster(policy)
        for program in programs:
            self._roster.add(program)
        self.snapshot(self._snapshot)

    @property
    def tracked(self) -> int:
        """Requests that have not ended."""
        return len(self._tracked)

    @property
    def waiting(self) -> int:
        """Tracked requests that have not been released."""
        return len(self._tracked) - self._running

    @property
    def census(self) -> Mapping[tuple[Status, Lifecycle], int]:
        """How many programs there are of each status and lifecycle."""
        return self._roster.census

    def used(self, worker: WorkerRank) -> int:
        """Tokens charged to one worker."""
        return self._roster.ledger.used(worker)

    def lifecycle(self, session: str) -> Lifecycle | None:
        """Whether a session's program is active or paused; None where there is no program."""
        program = self._roster.get(session)
        return None if program is None else program.lifecycle

    def dump(self) -> State:
        """Everything known, at a cost that grows with the number of programs."""
        ledger = self._roster.ledger
        return State(
            programs={
                program.session: ProgramState(
                    status=program.status.value,
                    lifecycle=program.lifecycle.value,
                    worker=None if program.worker is None else program.worker.worker,
                    rank=None if program.worker is None else program.worker.rank,
                    tokens=program.size,
                    steps=program.steps,
                    marked=program.marked,
                )
                for program in self._roster
            },
            used={str(worker): used for worker in sorted(ledger.workers) if (used := ledger.used(worker))},
            waiting=tuple(sorted(turn.request for turn in self._tracked.values() if not turn.running)),
            tracked=len(self._tracked),
        )

    @abstractmethod
    def _program_of(self, turn: Turn) -> P | None:
        """The program that a tracked turn is one of; None where it has none to change."""

    def _start(self, turn: Turn, worker: WorkerRank | None) -> Release:
        """Let a turn run."""
        turn.running = True
        self._running += 1
        return Release(turn.request, worker)

    def _refuses(self, request: str, session: str, final: bool) -> Reason | None:
        """Why a request is rejected, with nothing changed; an idle program makes room for a new one."""
        if request in self._tracked:
            return Reason.DUPLICATE_REQUEST
        limit = self._policy.max_tracked_requests
        if len(self._tracked) >= limit:
            return Reason.REQUEST_LIMIT
        if not final and len(self._roster) >= limit and self._roster.get(session) is None:
            idle = self._roster.longest_idle()
            if idle is None:
                return Reason.PROGRAM_LIMIT
            self._roster.drop(idle[1])
        return None

    def _retire(self, now: float) -> None:
        """Forget the programs idle for longer than they are retained."""
        retention = self._policy.session_retention_seconds
        while (idle := self._roster.longest_idle()) is not None and now - idle[0] >= retention:
            self._roster.drop(idle[1])

    def _settle(self) -> None:
        """Take the places on workers that the newest snapshot no longer has, or has in a new incarnation."""
        before, after = self._placed_by, self._snapshot
        if before is after:
            return
        self._placed_by = after
        gone = [
            worker
            for worker in self._roster.ledger.workers
            if worker not in after.live
            or (worker in before.by_id and before.by_id[worker].incarnation != after.by_id[worker].incarnation)
        ]
        for worker in gone:
            for program in self._roster.on(worker):
                self._roster.open(program)
                program.worker = None
                self._roster.close(program)


def lose_place(program: Program) -> None:
    """Pause an opened program."""
    program.lifecycle = Lifecycle.PAUSED
    program.worker = None
