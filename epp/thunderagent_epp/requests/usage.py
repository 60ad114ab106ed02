"""Token counts as inference servers report them, in any of their spellings, merged over the parts of an answer.

An answer's usage may come whole (a JSON answer, the last chunk of a chat stream, ``response.completed``) or in parts
(Anthropic's ``message_start`` and ``message_delta``). Servers are not trusted to send sense: what is no plausible
count is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

_NULL = msgspec.Raw(b"null")

MAX_TOKENS = 1_000_000_000
"""No context is that long; a greater count is a defect of the server and not believed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; None is not known, which is not zero.

    ``prompt_tokens`` counts the whole prompt as it lies in the KV cache, cached tokens included.
    """

    prompt_tokens: int | None
    completion_tokens: int | None


class _Counts(msgspec.Struct, frozen=True, gc=False):
    # Any, so that one count of a wrong type does not take the others with it.
    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None


class _Holder(msgspec.Struct, frozen=True, gc=False):
    usage: msgspec.Raw = _NULL


class _Payload(_Holder, frozen=True, gc=False):
    message: msgspec.Raw = _NULL  # Anthropic's message_start
    response: msgspec.Raw = _NULL  # the events of the responses API


_COUNTS = msgspec.json.Decoder(_Counts)
_HOLDER = msgspec.json.Decoder(_Holder)
_PAYLOAD = msgspec.json.Decoder(_Payload)
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class UsageCounts:
    """Collects the counts of one answer; a later count replaces an earlier one, field by field."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def read(self, payload: bytes | bytearray) -> None:
        """Take the counts out of a JSON answer or of the data of one event; anything else is ignored."""
        if b'"usage"' not in payload:
            return
        try:
            parsed = _PAYLOAD.decode(payload)
        except _UNREADABLE:
            return
        for holder in (parsed.message, parsed.response):
            if holder != _NULL:
                self._read_holder(holder)
        self._merge(parsed.usage)

    def usage(self) -> Usage | None:
        """Return what is known so far, None if nothing is."""
        counts = self._counts
        prompt = counts.get("prompt_tokens")
        if prompt is None and "input_tokens" in counts:
            # Anthropic's input_tokens leave out what was read from or written to the cache; the responses API
            # counts both in and has neither field.
            prompt = (
                counts["input_tokens"]
                + counts.get("cache_read_input_tokens", 0)
                + counts.get("cache_creation_input_tokens", 0)
            )
        completion = counts.get("completion_tokens", counts.get("output_tokens"))
        total = counts.get("total_tokens")
        if completion is None and prompt is not None and total is not None and total >= prompt:
            # Embeddings report no completion, only a total.
            completion = total - prompt
        if prompt is None and completion is None:
            return None
        return Usage(prompt, completion)

    def _read_holder(self, holder: msgspec.Raw) -> None:
        try:
            self._merge(_HOLDER.decode(holder).usage)
        except _UNREADABLE:
            return

    def _merge(self, usage: msgspec.Raw) -> None:
        if usage == _NULL:
            return
        try:
            counts = _COUNTS.decode(usage)
        except _UNREADABLE:
            return
        for name in _Counts.__struct_fields__:
            count = getattr(counts, name)
            # Servers fill in 0 for what they do not know yet (or any more): it never replaces a count.
            if type(count) is int and 0 <= count <= MAX_TOKENS and (count or name not in self._counts):
                self._counts[name] = count
