"""Request and answer headers as the rest of the EPP sees them: lower-case names, repeated headers kept apart.

The exchange makes one from each headers message of the proxy; session identity, paths and content types are read
from it. Pseudo-headers (``:path``, ``:method``, ``:status``) are headers like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Headers:
    """An immutable multimap from header names to values, in the order in which they came."""

    __slots__ = ("_first", "_pairs")

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = tuple([(name.lower(), value) for name, value in pairs])
        # Reversed, so that of a repeated header the first value stays.
        self._first = dict(reversed(self._pairs))

    def get(self, name: str) -> str | None:
        """Return the first value of a header, None without one; ``name`` is lower-case."""
        return self._first.get(name)

    def all(self, name: str) -> tuple[str, ...]:
        """Return every value of a header in order; ``name`` is lower-case."""
        if name not in self._first:
            return ()
        return tuple(value for key, value in self._pairs if key == name)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        # Values may be credentials.
        return f"Headers({', '.join(name for name, _ in self._pairs)})"
