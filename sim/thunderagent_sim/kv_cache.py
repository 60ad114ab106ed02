"""The KV cache of one simulated engine: a set number of blocks, shared by content.

The engine asks it for blocks when a sequence is admitted and as it grows, and tells it which blocks are full, under
which key. A key names a block's content *with everything before it* (see `tokens.chain_keys`), so two sequences
share exactly their common prefix. Blocks that nobody holds keep their content until their room is needed, least
recently used first; a sequence gives its blocks back last block first, so that what is reused most, the start of a
context, is lost last. These are vLLM's rules (``v1/core/block_pool.py``).

Pure: no clock, no I/O. Blocks are counted, not numbered, because nothing here depends on which memory a block is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, eq=False)
class BlockTable(Generic[K]):
    """The blocks one sequence holds, in order: a key where the block is shared by content, else None.

    ``reused`` counts the leading blocks that were found in the cache, ``committed`` those known to be full.
    """

    blocks: list[K | None] = field(default_factory=list)
    reused: int = 0
    committed: int = 0


class KVCache(Generic[K]):
    """``total`` blocks; each is empty, private to one table, held by tables under its key, or idle under its key."""

    def __init__(self, total: int) -> None:
        if total <= 0:
            raise ValueError(f"a KV cache needs at least one block, not {total}")
        self.total = total
        self._empty = total
        self._held: dict[K, int] = {}
        self._idle: OrderedDict[K, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be taken now: empty ones, and idle ones that would lose their content."""
        return self._empty + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that some table holds."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Blocks whose content could be reused, held or not."""
        return len(self._held) + len(self._idle)

    def cached_prefix(self, keys: Sequence[K]) -> int:
        """Count the leading ``keys`` whose blocks are in the cache."""
        for length, key in enumerate(keys):
            if key not in self._held and key not in self._idle:
                return length
        return len(keys)

    def allocate(self, keys: Sequence[K], blocks: int) -> BlockTable[K] | None:
        """Hold the cached prefix of ``keys`` and take fresh blocks up to ``blocks`` in all; None if they do not fit.

        ``blocks`` must be at least ``len(keys)``. When None is returned nothing has changed.
        """
        reused = self.cached_prefix(keys)
        taken_from_idle = sum(1 for key in keys[:reused] if key in self._idle)
        if blocks - reused > self.free - taken_from_idle:
            return None
        table: BlockTable[K] = BlockTable(reused=reused, committed=reused)
        for key in keys[:reused]:
            self._hold(key)
            table.blocks.append(key)
        self._take(table, blocks - reused)
        return table

    def grow(self, table: BlockTable[K], blocks: int) -> bool:
        """Give the table fresh blocks up to ``blocks`` in all; False, and nothing changed, if they do not fit."""
        missing = blocks - len(table.blocks)
        if missing > self.free:
            return False
        self._take(table, max(missing, 0))
        return True

    def commit(self, table: BlockTable[K], keys: Sequence[K], full: int) -> None:
        """Make the table's first ``full`` blocks reusable under the first ``full`` keys.

        Those committed before are skipped. A block whose content is in the cache already stays private, as vLLM
        keeps such duplicates.
        """
        for index in range(table.committed, full):
            key = keys[index]
            if key not in self._held and key not in self._idle:
                table.blocks[index] = key
                self._held[key] = 1
        table.committed = max(table.committed, full)

    def release(self, table: BlockTable[K]) -> None:
        """Give all the table's blocks back, last first; the content of committed ones stays until it is evicted."""
        for key in reversed(table.blocks):
            if key is None:
                self._empty += 1
            elif self._held[key] > 1:
                self._held[key] -= 1
            else:
                del self._held[key]
                self._idle[key] = None
        table.blocks.clear()
        table.reused = table.committed = 0

    def _hold(self, key: K) -> None:
        if key in self._idle:
            del self._idle[key]
        self._held[key] = self._held.get(key, 0) + 1

    def _take(self, table: BlockTable[K], blocks: int) -> None:
        from_empty = min(blocks, self._empty)
        self._empty -= from_empty
        for _ in range(blocks - from_empty):
            self._idle.popitem(last=False)
        table.blocks.extend([None] * blocks)
