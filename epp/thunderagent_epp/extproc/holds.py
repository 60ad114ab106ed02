"""The requests being held: what they weigh, how long they have waited, and how each wait ends.

The director starts a hold when a request may not go yet and ends it with a placement or a refusal; the server awaits
it. One future and, where the policy limits holds, one timer are all that a held request costs beside its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from thunderagent_epp.extproc.errors import Refused
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.telemetry.metrics import HoldClass, Metrics

A = TypeVar("A")


class Hold(Generic[A]):
    """One hold, of ``body_bytes`` (≥ 0), since ``since`` on the clock of `Holds`."""

    __slots__ = ("_outcome", "admission", "body_bytes", "hold_class", "since", "timer")

    def __init__(self, admission: A, body_bytes: int, hold_class: HoldClass, since: float) -> None:
        self.admission = admission
        self.body_bytes = body_bytes
        self.hold_class = hold_class
        self.since = since
        self.timer: asyncio.TimerHandle | None = None
        self._outcome: asyncio.Future[Placement | Refused] = asyncio.get_running_loop().create_future()

    async def ended(self) -> Placement:
        """Wait for the end. Raises Refused if it is not a release."""
        outcome = await self._outcome
        if isinstance(outcome, Refused):
            raise outcome
        return outcome

    def end(self, outcome: Placement | Refused) -> None:
        """Wake who waits, unless its client has left already: it is about to tell so."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)


class Holds(Generic[A]):
    """Every request held now, by its id. ``timed_out`` is called with one that was held for the policy's limit."""

    def __init__(
        self, metrics: Metrics, max_bytes: int, clock: Callable[[], float], timed_out: Callable[[A], None]
    ) -> None:
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._clock = clock
        self._timed_out = timed_out
        self._limit_seconds: float | None = None
        self._held: dict[str, Hold[A]] = {}
        self.bytes = 0
        """Bodies of the held requests together."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, request: str) -> Hold[A] | None:
        """The hold of a request, if it is held."""
        return self._held.get(request)

    def all(self) -> list[A]:
        """Everything held, longest first."""
        return [hold.admission for hold in self._held.values()]

    @property
    def longest_seconds(self) -> float:
        """How long the one held longest has waited; 0 when nothing is held."""
        longest = next(iter(self._held.values()), None)
        return 0.0 if longest is None else self._clock() - longest.since

    def have_room(self, body_bytes: int) -> bool:
        """Whether a body may be held beside those that are."""
        return self.bytes + body_bytes <= self._max_bytes

    def start(self, request: str, admission: A, body_bytes: int, hold_class: HoldClass) -> Hold[A]:
        """Hold a request from now on."""
        hold = self._held[request] = Hold(admission, body_bytes, hold_class, self._clock())
        self.bytes += body_bytes
        self._arm(hold)
        return hold

    def leave(self, request: str) -> Hold[A] | None:
        """Forget a hold, however it ended; None for a request that is not held."""
        hold = self._held.pop(request, None)
        if hold is not None:
            self.bytes -= hold.body_bytes
            if hold.timer is not None:
                hold.timer.cancel()
            self._metrics.hold(self._clock() - hold.since, hold.hold_class)
        return hold

    def limit(self, seconds: float | None) -> None:
        """Hold nothing for longer than ``seconds`` (> 0; None: no limit), what is held already included."""
        if seconds == self._limit_seconds:
            return
        self._limit_seconds = seconds
        for hold in self._held.values():
            if hold.timer is not None:
                hold.timer.cancel()
                hold.timer = None
            self._arm(hold)

    def _arm(self, hold: Hold[A]) -> None:
        if self._limit_seconds is not None:
            left = max(0.0, hold.since + self._limit_seconds - self._clock())
            hold.timer = asyncio.get_running_loop().call_later(left, self._timed_out, hold.admission)
