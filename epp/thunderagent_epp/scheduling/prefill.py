"""Where the prefill of a turn runs, when that is not where it decodes.

A turn goes to the prefill worker its program used last, whose cache has the beginning of the prompt, while that one is
live; else to the one with the fewest prompt tokens in prefill. What a prefill worker has to do is over once the answer
begins, so its load is kept apart from the selector's, which goes on to the end of the decode.

Pure and single-threaded by contract, like the selector. The director picks here after the selector has picked the
decode worker, and tells when a prefill has begun and when it is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, WorkerRank
from thunderagent_epp.scheduling.selector import Selector

SESSIONS_MAX: Final = 65536
"""Sessions whose last prefill worker is remembered; beyond, those that were longest without a turn are forgotten."""


class PrefillPool:
    """Picks prefill workers and accounts for the prompts that are in prefill on them."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._pool = CapacitySnapshot()
        self._loads = Selector()
        self._last: OrderedDict[str, tuple[WorkerRank, str]] = OrderedDict()
        """Each session's last prefill worker and its incarnation, longest unused first."""
        self._sessions_max = sessions_max

    def snapshot(self, pool: CapacitySnapshot) -> None:
        """Take a newer snapshot of the prefill workers; an empty one: nothing is picked."""
        self._pool = pool
        self._loads.snapshot(pool)

    def prompt_tokens(self, worker: WorkerRank) -> int:
        """Tokens of the prompts that are in prefill on a worker."""
        return self._loads.cost(worker)

    def pick(
        self,
        session: str | None,
        decode: WorkerRank,
        *,
        target: WorkerRank | None = None,
        subset: Collection[WorkerRank] | None = None,
    ) -> WorkerRank | None:
        """The worker for a prefill, out of the live ones in ``subset`` (None: all); None when there is none.

        ``target`` is the ledger's wish, where prefill workers are what programs are bound to; it comes before the
        worker the session used last. ``decode`` is where the turn goes on: where it may do the prefill as well and
        has no more in prefill than any other, it is picked itself, which saves moving the cache.
        """
        wanted = target or self._last_of(session)
        picked = self._loads.pick(wanted, subset)
        if picked is None or picked == wanted:
            return picked
        itself = self._loads.pick(decode, subset)
        return decode if itself == decode and self.prompt_tokens(decode) <= self.prompt_tokens(picked) else picked

    def started(self, request: str, session: str | None, worker: WorkerRank, prompt_tokens: int) -> None:
        """A request's prefill was given to ``worker``; ids are unique among those not ended."""
        self._loads.started(request, worker, prompt_tokens)
        if session is None:
            return
        self._last[session] = worker, self._pool.by_id[worker].incarnation
        self._last.move_to_end(session)
        if len(self._last) > self._sessions_max:
            self._last.popitem(last=False)

    def over(self, request: str) -> None:
        """A request's prefill is over, or will never be done; said again, it changes nothing."""
        self._loads.ended(request)

    def forget(self, session: str) -> None:
        """A session has had its last turn."""
        self._last.pop(session, None)

    def _last_of(self, session: str | None) -> WorkerRank | None:
        if session is None or session not in self._last:
            return None
        worker, incarnation = self._last[session]
        known = self._pool.by_id.get(worker)
        # After a restart its cache is empty: any other is as good.
        return worker if known is not None and known.incarnation == incarnation else None
