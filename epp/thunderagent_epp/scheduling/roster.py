"""Every program by its session, with the orders in which decisions ask for them.

A program is changed only between `open` and `close`, which take it out of every order and of the ledger and put it
back as what it has become. That keeps the orders right by construction; the one exception is growth, which happens
with every few tokens of every answer and has its own short way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from math import floor
from typing import Generic, TypeVar

from sortedcontainers import SortedList

from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.scheduling.ledger import Ledger
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle, Program, Status

P = TypeVar("P", bound=Program)

CONTINUING, NEW, IDLE = range(3)
"""The order in which paused programs are resumed: waiting continuations, those of one turn, other idle ones."""


class Roster(Generic[P]):
    """All programs, charged in `ledger` while they are active and have a worker."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.ledger = Ledger(policy)
        self._programs: dict[str, P] = {}
        self._paused: tuple[SortedList[tuple[int, str]], ...] = (SortedList(), SortedList(), SortedList())
        self._deferred: SortedList[tuple[float, str]] = SortedList()
        self.deferred_tokens = 0
        """Sizes of the deferred programs together."""
        self._idle: SortedList[tuple[float, str]] = SortedList()
        self.census: Counter[tuple[Status, Lifecycle]] = Counter()
        """How many programs there are of each status and lifecycle."""

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[P]:
        """All programs by session; only for showing and for rebuilding."""
        return (self._programs[session] for session in sorted(self._programs))

    def get(self, session: str) -> P | None:
        """The program of a session, if it has one."""
        return self._programs.get(session)

    def add(self, program: P) -> None:
        """Take in a new program, complete as it is."""
        self._programs[program.session] = program
        self.close(program)

    def drop(self, program: P) -> None:
        """Forget a program and what it is charged."""
        self.open(program)
        del self._programs[program.session]

    def open(self, program: P) -> None:
        """Take a program out of every order and of the ledger, to change it."""
        self.census[program.status, program.lifecycle] -= 1
        if program.paused:
            self._paused[_group(program)].remove((program.size, program.session))
            if program.deferred_since is not None:
                self._deferred.remove((program.deferred_since, program.session))
                self.deferred_tokens -= program.size
        elif program.worker is not None:
            self.ledger.remove(program)
        if program.acting_since is not None:
            self._idle.remove((program.acting_since, program.session))

    def close(self, program: P) -> None:
        """Put a changed program back where it now belongs."""
        self.census[program.status, program.lifecycle] += 1
        if program.paused:
            self._paused[_group(program)].add((program.size, program.session))
            if program.deferred_since is not None:
                self._deferred.add((program.deferred_since, program.session))
                self.deferred_tokens += program.size
        elif program.worker is not None:
            self.ledger.add(program)
        if program.acting_since is not None:
            self._idle.add((program.acting_since, program.session))

    def grow(self, program: P, context_tokens: int) -> None:
        """Let the live context of a program's begun turn grow to ``context_tokens``."""
        turn = program.turn
        assert turn is not None
        if program.paused:
            self.open(program)
            turn.context_tokens = context_tokens
            self.close(program)
            return
        growth = context_tokens - turn.context_tokens
        turn.context_tokens = context_tokens
        if program.worker is not None:
            self.ledger.grow(program, growth)

    @property
    def paused_count(self) -> int:
        """How many programs are paused."""
        return sum(map(len, self._paused))

    def paused(self, group: int) -> SortedList[tuple[int, str]]:
        """(size, session) of the paused programs of one group, smallest first."""
        return self._paused[group]

    def longest_idle(self) -> tuple[float, P] | None:
        """The acting program that has been idle longest, with the time since when."""
        if not self._idle:
            return None
        since, session = self._idle[0]
        return since, self._programs[session]

    def on(self, worker: WorkerRank) -> list[P]:
        """Every program that has its place on one worker."""
        account = self.ledger.account(worker)
        if account is None:
            return []
        return [*self.idle_on(worker), *(self._programs[session] for session in account.reasoning)]

    def idle_on(self, worker: WorkerRank) -> Iterator[P]:
        """The acting programs of one worker, smallest first; each may be changed when it is reached."""
        account = self.ledger.account(worker)
        return iter(()) if account is None else (self._programs[session] for _, session in list(account.acting))

    @property
    def deferred_count(self) -> int:
        """How many paused programs have turns that wait."""
        return len(self._deferred)

    def least_deferred_tokens(self) -> int:
        """A size that no deferred program is smaller than."""
        return min((group[0][0] for group in (self._paused[CONTINUING], self._paused[NEW]) if group), default=0)

    def deferred(self) -> list[P]:
        """Paused programs whose turns wait, longest first."""
        return [self._programs[session] for _, session in self._deferred]

    def deferred_for(self, seconds: float, now: float) -> list[P]:
        """Paused programs deferred for ``seconds`` or longer, longest first."""
        due = takewhile(lambda entry: now - entry[0] >= seconds, self._deferred)
        return [self._programs[session] for _, session in due]

    def decayed_used(self, now: float, tau_seconds: float) -> dict[WorkerRank, int]:
        """Tokens charged per worker if the weight of each acting program halved every ``tau_seconds`` of idling.

        Only the programs that have not faded to nothing are looked at: after 63 half-lives no size is left.
        """
        used = {worker: self.ledger.used_without_acting_tokens(worker) for worker in self.ledger.workers}
        for since, session in self._idle.irange(minimum=(now - 63 * tau_seconds,)):
            program = self._programs[session]
            if program.worker is not None:
                used[program.worker] += floor(program.size * 2 ** -((now - since) / tau_seconds))
        return used


def _group(program: Program) -> int:
    if program.steps <= 1:
        return NEW
    return IDLE if program.status is Status.ACTING else CONTINUING
