"""How long a waiting program waits before others make room for it, as it changes with the queue.

`Rotation` says at every event what the hold time of its theory is for the programs that wait at that moment. Taken as
it is, holds would spread as far as the queue fluctuates, and the tail is made of the longest.
"""

from __future__ import annotations

from math import exp

BUDGET_SECONDS = 60.0
"""Over this time the hold budget is meant: the time constant with which H follows a growing queue."""


class HoldTime:
    """H over time: at once where the queue shrinks, slowly where it grows, so that holds are even."""

    __slots__ = ("_mean", "_present", "_since")

    def __init__(self) -> None:
        self._mean = 0.0
        self._present = 0.0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """How long a program waits now before others have to make room for it."""
        return min(self._mean, self._present)

    def observe(self, present: float, now: float) -> None:
        """H for the programs that wait now is ``present``; until now it was what was said last."""
        self._mean += (self._present - self._mean) * (1.0 - exp((self._since - now) / BUDGET_SECONDS))
        self._present, self._since = present, now
