"""Tokens charged per worker rank, kept incrementally.

The classifier tells the ledger of every program that gains or loses a place and of every token its turn grows by;
the ledger alone knows what that charges. It keeps what the periodic decisions ask for — the sum per worker, the
workers above their threshold, acting programs by size, reasoning ones not yet marked — so that nothing is recomputed
and a tick without pressure looks at no program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor

from sortedcontainers import SortedList

from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Program, Status


class Account:
    """What is charged to one worker rank."""

    __slots__ = ("acting", "acting_tokens", "reasoning", "unmarked", "used_tokens")

    def __init__(self) -> None:
        self.used_tokens = 0
        self.acting_tokens = 0
        """What of it is charged for the contexts of acting programs, their buffers not included."""
        self.acting: SortedList[tuple[int, str]] = SortedList()
        """(size, session) of acting programs, smallest first."""
        self.reasoning: dict[str, Program] = {}
        self.unmarked: dict[str, Program] = {}
        """The reasoning programs that are not marked."""

    @property
    def empty(self) -> bool:
        """Whether no program has its place here."""
        return not self.acting and not self.reasoning


class Ledger:
    """Charges active programs to their workers by the rules of scheduling.md, *State*."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._weight = policy.acting_token_weight
        self._buffer = policy.buffer_per_program
        self._limits: Mapping[WorkerRank, int] = {}
        self._accounts: dict[WorkerRank, Account] = {}
        self._over: set[WorkerRank] = set()

    @property
    def workers(self) -> Iterable[WorkerRank]:
        """Every worker on which some program has its place."""
        return self._accounts.keys()

    @property
    def over(self) -> Iterable[WorkerRank]:
        """The workers whose used tokens exceed their limit, in worker order."""
        return sorted(self._over)

    def is_over(self, worker: WorkerRank) -> bool:
        """Whether a worker's used tokens exceed its limit."""
        return worker in self._over

    def idle_tokens(self, worker: WorkerRank) -> int:
        """Tokens charged to one worker for its acting programs, their buffers not included."""
        account = self._accounts.get(worker)
        return 0 if account is None else account.acting_tokens

    def account(self, worker: WorkerRank) -> Account | None:
        """What is charged to one worker; None where no program has its place."""
        return self._accounts.get(worker)

    def used(self, worker: WorkerRank) -> int:
        """Tokens charged to one worker."""
        account = self._accounts.get(worker)
        return 0 if account is None else account.used_tokens

    def limit(self, limits: Mapping[WorkerRank, int]) -> None:
        """Take each worker's limit in tokens; a worker without one is never over."""
        self._limits = limits
        self._over = {
            worker
            for worker, account in self._accounts.items()
            if (limit := limits.get(worker)) is not None and account.used_tokens > limit
        }

    def charge_of(self, program: Program) -> int:
        """Tokens an active program is charged at its present status and size."""
        if program.status is Status.REASONING:
            return program.size + self._buffer
        return floor(program.size * self._weight) + self._buffer

    def used_without_acting_tokens(self, worker: WorkerRank) -> int:
        """Tokens charged to one worker but for the contexts of its acting programs."""
        account = self._accounts[worker]
        return account.used_tokens - account.acting_tokens

    def unmarked(self, worker: WorkerRank) -> list[Program]:
        """The reasoning programs of one worker that are not marked, smallest first."""
        account = self._accounts.get(worker)
        if account is None:
            return []
        return sorted(account.unmarked.values(), key=lambda program: (program.size, program.session))

    def add(self, program: Program) -> None:
        """Charge an active program to its worker."""
        assert program.worker is not None
        account = self._accounts.get(program.worker)
        if account is None:
            account = self._accounts[program.worker] = Account()
        if program.status is Status.ACTING:
            account.acting.add((program.size, program.session))
            account.acting_tokens += self.charge_of(program) - self._buffer
        else:
            account.reasoning[program.session] = program
            if not program.marked:
                account.unmarked[program.session] = program
        self._book(program.worker, account, self.charge_of(program))

    def remove(self, program: Program) -> None:
        """Take back what `add` charged; the program must not have changed in between but through `grow`, `mark`."""
        assert program.worker is not None
        account = self._accounts[program.worker]
        if program.status is Status.ACTING:
            account.acting.remove((program.size, program.session))
            account.acting_tokens -= self.charge_of(program) - self._buffer
        else:
            del account.reasoning[program.session]
            account.unmarked.pop(program.session, None)
        self._book(program.worker, account, -self.charge_of(program))
        if account.empty:
            del self._accounts[program.worker]

    def grow(self, program: Program, tokens: int) -> None:
        """Charge a reasoning program that `add` took for ``tokens`` more."""
        assert program.worker is not None
        self._book(program.worker, self._accounts[program.worker], tokens)

    def mark(self, program: Program) -> None:
        """Mark a reasoning program that `add` took."""
        assert program.worker is not None
        program.marked = True
        self._accounts[program.worker].unmarked.pop(program.session, None)

    def _book(self, worker: WorkerRank, account: Account, tokens: int) -> None:
        account.used_tokens += tokens
        limit = self._limits.get(worker)
        if limit is not None and account.used_tokens > limit:
            self._over.add(worker)
        else:
            self._over.discard(worker)
