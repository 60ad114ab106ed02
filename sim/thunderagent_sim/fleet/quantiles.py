"""Random quantities by their quantiles, with nothing but the four operations.

The mathematics library's logarithm differs in its last digit between machines, and a closed loop makes of one digit
another run; a line between two quantiles does not.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from random import Random


class Quantiles:
    """A distribution given by points (share, value), shares from 0 to 1; in between it is linear.

    Raises ValueError unless both rise from point to point and the shares go from 0 to 1.
    """

    def __init__(self, *points: tuple[float, float]) -> None:
        if len(points) < 2 or (points[0][0], points[-1][0]) != (0, 1):
            raise ValueError("quantiles go from 0 to 1")
        if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(points)):
            raise ValueError("quantiles rise")
        self._shares = [share for share, _ in points]
        self._values = [value for _, value in points]

    @property
    def mean(self) -> float:
        """The mean of the distribution."""
        points = zip(self._shares, self._values, strict=True)
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))

    def of(self, share: float) -> float:
        """The value that a ``share`` of all values lies below."""
        at = min(bisect_right(self._shares, share), len(self._shares) - 1)
        low, high = self._shares[at - 1], self._shares[at]
        start, end = self._values[at - 1], self._values[at]
        return start + (end - start) * ((share - low) / (high - low))

    def draw(self, random: Random) -> float:
        """One value."""
        return self.of(random.random())
