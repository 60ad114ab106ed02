"""What the probes read: a metrics page or a JSON document as bytes in, numbers out, without I/O.

A worker may answer anything: another program's page, HTML, a page cut off in its middle, numbers that no machine
holds. Whatever is not plainly a capacity is unknown (None) or unreadable (`UnreadableError`), never a guess and never
another exception. Only the lines asked for are parsed: an engine's page has thousands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from thunderagent_epp.feed.spec import CAPACITY_TOKENS_MAX

_WHOLE_NUMBER: Final = re.compile(r"([0-9]{1,18})(?:\.0+)?")

Document = TypeVar("Document")


class UnreadableError(Exception):
    """An answer that is not what was asked for; the text says in which way."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one worker rank holds: tokens of KV cache, and tokens of one of its blocks where the engine says so."""

    tokens: int
    block_size: int | None = None


class MetricsPage:
    """A worker's metrics in Prometheus' text format. Raises UnreadableError when it stops in the middle of a line."""

    def __init__(self, page: bytes) -> None:
        # A number cut short is another number. The format ends every line, the last one too; OpenMetrics need not.
        if page and not page.endswith((b"\n", b"\n# EOF")):
            raise UnreadableError("the metrics end in the middle of a line")
        self._page = b"\n" + page

    def shows(self, prefix: str) -> bool:
        """Whether any metric's name begins so."""
        return b"\n" + prefix.encode() in self._page

    def series(self, name: str) -> list[Sample]:
        """Every series of a metric, in order. Raises UnreadableError when one of its lines is not well formed."""
        wanted = b"\n" + name.encode()
        lines = []
        start = self._page.find(wanted)
        while start >= 0:
            after = start + len(wanted)
            end = self._page.find(b"\n", after)
            if self._page[after : after + 1] in (b"{", b" ", b"\t"):
                lines.append(self._page[start + 1 : end])
            start = self._page.find(wanted, end)
        try:
            text = b"\n".join(lines).decode()
            return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except (ValueError, IndexError) as error:
            raise UnreadableError(f"{name} is not well formed: {str(error)[:120]}") from None


def json_document(body: bytes, model: type[Document]) -> Document:
    """The fields of ``model`` from a JSON document; others are skipped. Raises UnreadableError."""
    try:
        return msgspec.json.decode(body, type=model)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UnreadableError(f"the answer is not the JSON expected: {str(error)[:120]}") from None


def whole_number(text: str | None) -> int | None:
    """A label's value as a number above zero; None for the text ``None``, for 0 and for everything else."""
    found = _WHOLE_NUMBER.fullmatch(text) if text else None
    return (int(found[1]) or None) if found else None


def tokens(value: float | None) -> int | None:
    """A number as so many tokens: whole, above zero and such as a machine may hold; else None."""
    if value is None or not 1 <= value <= CAPACITY_TOKENS_MAX or value != int(value):
        return None
    return int(value)


def product(count: float | None, size: int | None) -> Capacity | None:
    """So many blocks of so many tokens."""
    held = None if count is None or size is None else tokens(count * size)
    return None if held is None else Capacity(held, size)


def largest(replicas: Iterable[Capacity | None]) -> Capacity | None:
    """The capacity of ranks that hold the same; the most that one of them says, None when none says anything."""
    return max((one for one in replicas if one is not None), key=lambda one: one.tokens, default=None)


def total(parts: Iterable[Capacity | None]) -> Capacity | None:
    """The sum of engines behind one port. None without any, and while one of them is unknown: unknown is not zero."""
    known = []
    for part in parts:
        if part is None:
            return None
        known.append(part)
    held = tokens(sum(part.tokens for part in known))
    block_sizes = {part.block_size for part in known}
    return None if held is None else Capacity(held, block_sizes.pop() if len(block_sizes) == 1 else None)
