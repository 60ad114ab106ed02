"""A pod's prefix cache, by sessions instead of hashes: what vLLM's block pool does, at a cost per turn, not per token.

A session's context only ever grows at its end, so all of it that a pod still has is one *line*: a number of blocks
from the start. Running turns hold *leases*: a pinned part of the line and blocks of their own. What nobody holds
waits in the order in which it was let go and is evicted from there, each line from its end, for a turn that needs
blocks (vLLM frees a request's blocks last block first). Blocks are pinned, cached or empty, and always add up.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


class _Line:
    """Blocks in a row from a context's start; ``top`` of them are pinned, the rest can be evicted, last first."""

    __slots__ = ("blocks", "pins", "session", "top")

    def __init__(self, session: str | None, blocks: int = 0) -> None:
        self.session = session
        """None when nothing will ask for it again: the end of a context that went another way."""
        self.blocks = blocks
        self.pins: list[int] = []
        self.top = 0


@dataclass(slots=True, eq=False)
class Lease:
    """What one running turn holds: the first ``depth`` blocks of its session's line, and blocks of its own."""

    line: _Line
    depth: int


class PrefixCache:
    """``blocks`` blocks of ``block_size`` tokens. Raises ValueError unless both are positive."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks <= 0 or block_size <= 0:
            raise ValueError("a cache needs blocks, and blocks need tokens")
        self.blocks = blocks
        self.block_size = block_size
        self.pinned = 0
        """Blocks that running turns hold."""
        self.cached = 0
        """Blocks that could be hit, or evicted."""
        self._lines: dict[str, _Line] = {}
        self._evictable: OrderedDict[_Line, None] = OrderedDict()

    @property
    def empty(self) -> int:
        """Blocks that hold nothing."""
        return self.blocks - self.pinned - self.cached

    def cached_tokens(self, session: str) -> int:
        """Tokens of a session's context that are here."""
        line = self._lines.get(session)
        return 0 if line is None else line.blocks * self.block_size

    def hit_tokens(self, session: str, shared_tokens: int, tokens: int) -> int:
        """How many of a prompt's ``tokens``, ``shared_tokens`` of them an old prefix, are here; the last never is."""
        line = self._lines.get(session)
        return 0 if line is None else self._depth(line, shared_tokens, tokens) * self.block_size

    def lease(self, session: str, shared_tokens: int, tokens: int) -> Lease | None:
        """Pin what is cached of a prompt and take blocks for the rest of its ``tokens``; None if they do not fit."""
        line = self._lines.get(session)
        if line is None:
            depth = pin = 0
        else:
            depth = self._depth(line, shared_tokens, tokens)
            pin = max(0, depth - line.top)
        own = -(-tokens // self.block_size) - depth
        if self.pinned + pin + own > self.blocks:
            return None
        if line is None:
            line = self._lines[session] = _Line(session)
        line.pins.append(depth)
        if pin:
            line.top = depth
            self.cached -= pin
            if line.top == line.blocks:
                del self._evictable[line]
        self.pinned += pin + own
        self._make_room()
        return Lease(line, depth)

    def extend(self, blocks: int) -> bool:
        """Take ``blocks`` more for running turns together; False if there are not so many."""
        if self.pinned + blocks > self.blocks:
            return False
        self.pinned += blocks
        self._make_room()
        return True

    def publish(self, lease: Lease, tokens: int) -> None:
        """The first ``tokens`` of a turn's context are computed: other turns of its session can hit them now."""
        line, full = lease.line, tokens // self.block_size
        if full <= line.blocks:
            return
        spare = line.blocks - line.top
        line.pins.remove(lease.depth)
        top = max(line.pins, default=0)
        # Blocks that two turns had computed twice are one from now on, those of the line nobody held are its own.
        self.pinned += (full - line.top) - (full - lease.depth)
        if spare:
            self.cached -= spare
            del self._evictable[line]
        line.pins.append(full)
        line.blocks = full
        line.top = max(top, full)
        lease.depth = full

    def release(self, lease: Lease, held_tokens: int, computed_tokens: int, *, seen_again: bool = True) -> None:
        """Let go of a turn's blocks: those of ``held_tokens``, of which ``computed_tokens`` are worth keeping.

        With ``seen_again`` they become the session's line; otherwise no turn will hit them, but they take room until
        they are evicted.
        """
        line = lease.line
        own = -(-held_tokens // self.block_size) - lease.depth
        line.pins.remove(lease.depth)
        top = max(line.pins, default=0)
        before = line.blocks - line.top
        self.pinned -= own + line.top - top
        line.top = top
        if seen_again:
            line.blocks = max(line.blocks, computed_tokens // self.block_size)
        elif own > 0:
            self.cached += own
            self._evictable[_Line(None, own)] = None
        after = line.blocks - top
        self.cached += after - before
        if after:
            self._evictable[line] = None
            self._evictable.move_to_end(line)
        elif not line.pins and not line.blocks:
            del self._lines[line.session or ""]
        self._make_room()

    def cut(self, session: str, tokens: int) -> None:
        """The session's context went another way after ``tokens``: what is cached beyond cannot be hit any more."""
        line = self._lines.get(session)
        if line is None:
            return
        keep = max(tokens // self.block_size, line.top)
        gone = line.blocks - keep
        if gone > 0:
            line.blocks = keep
            rest = _Line(None, gone)
            self._evictable[rest] = None
            if line.blocks == line.top:
                del self._evictable[line]
                if not line.blocks and not line.pins:
                    del self._lines[session]

    def clear(self) -> None:
        """Lose everything, leases too."""
        self.pinned = self.cached = 0
        self._lines.clear()
        self._evictable.clear()

    def _depth(self, line: _Line, shared_tokens: int, tokens: int) -> int:
        return min(line.blocks, min(shared_tokens, tokens - 1) // self.block_size)

    def _make_room(self) -> None:
        over = self.pinned + self.cached - self.blocks
        while over > 0:
            line = next(iter(self._evictable))
            gone = min(over, line.blocks - line.top)
            line.blocks -= gone
            self.cached -= gone
            over -= gone
            if line.blocks == line.top:
                del self._evictable[line]
                if line.session is not None and not line.blocks and not line.pins:
                    del self._lines[line.session]
