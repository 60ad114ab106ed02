"""The answer of a worker as it passes by: how far it is, and what it says it used.

The exchange feeds every response-body chunk on its way to the client and asks for progress while the answer streams
and for the context size when it has ended. Nothing here can fail or hold an answer up, and memory is bounded
whatever a worker sends (extproc.md, "What a request says").
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from .event_stream import EventStream
from .inference import is_encoded, is_json
from .usage import Usage, UsageCounts

__all__ = ["MAX_KEPT_BYTES", "AnswerReader", "Usage", "context_tokens", "progress_tokens"]

MAX_KEPT_BYTES = 8 * 1024 * 1024
"""A JSON answer, or one event of a stream, of more bytes is counted but not read."""

# Of Anthropic messages and of OpenAI responses; chat and completions end in [DONE].
_CONCLUDING_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete"})
_MAY_CONCLUDE = re.compile(rb'"(?:message_stop|response\.(?:completed|incomplete))"')


class _Typed(msgspec.Struct, frozen=True, gc=False):
    type: Any = None


_TYPED = msgspec.json.Decoder(_Typed)


class AnswerReader:
    """Reads one answer in the form in which it streams by; never raises, whatever the bytes.

    An answer that is compressed, or neither JSON nor server-sent events, is only counted.
    """

    __slots__ = ("_body", "_counts", "_events", "_max_kept_bytes", "body_bytes", "concluded", "events")

    def __init__(
        self, content_type: str | None, content_encoding: str | None = None, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        readable = not is_encoded(content_encoding)
        media_type = (content_type or "").partition(";")[0].strip().lower()
        self._max_kept_bytes = max_kept_bytes
        self._events = EventStream(max_kept_bytes) if readable and media_type == "text/event-stream" else None
        self._body = bytearray() if readable and is_json(content_type) else None
        self._counts = UsageCounts()
        self.concluded = False
        """Whether the stream has said itself that it is complete, by the closing event of its API."""
        self.events = 0
        """Data events so far, the closing ``[DONE]`` not among them."""
        self.body_bytes = 0
        """Bytes of the body so far."""

    @property
    def streamed(self) -> bool:
        """Whether the answer is a readable stream of events, so that ``events`` says how far it is."""
        return self._events is not None

    @property
    def usage(self) -> Usage | None:
        """What the answer has said so far, merged; of a JSON answer nothing before ``finish``."""
        return self._counts.usage()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body, split anywhere."""
        self.body_bytes += len(chunk)
        if self._events is not None:
            self._read_events(self._events.feed(chunk))
        elif self._body is not None:
            if self.body_bytes > self._max_kept_bytes:
                self._body = None
            else:
                self._body += chunk

    def finish(self) -> None:
        """Take note that the body has ended; a second call changes nothing."""
        if self._events is not None:
            self._read_events(self._events.finish())
        elif self._body is not None:
            self._counts.read(self._body)
            self._body = None

    def _read_events(self, events: list[bytes]) -> None:
        for data in events:
            if len(data) <= 16 and data.strip() == b"[DONE]":
                self.concluded = True
                continue
            self.events += 1
            self._counts.read(data)
            if _MAY_CONCLUDE.search(data) is not None and _concludes(data):
                self.concluded = True


def _concludes(data: bytes) -> bool:
    try:
        kind = _TYPED.decode(data).type
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return isinstance(kind, str) and kind in _CONCLUDING_TYPES


def context_tokens(reader: AnswerReader, input_tokens: int, bytes_per_token: float) -> int:
    """Size of the context when the answer has ended: prompt and completion together.

    Each is what the usage says, else an estimate: ``input_tokens``, and one token for each data event of a stream or
    the body's bytes divided by ``bytes_per_token`` (above 0), rounded up.
    """
    usage = reader.usage or Usage(None, None)
    completion = usage.completion_tokens
    if completion is None:
        completion = reader.events if reader.streamed else math.ceil(reader.body_bytes / bytes_per_token)
    return (input_tokens if usage.prompt_tokens is None else usage.prompt_tokens) + completion


def progress_tokens(reader: AnswerReader, input_tokens: int) -> int:
    """Size of the context while the answer still streams.

    Counts that come early are too small (Anthropic's ``message_start`` says one token of output), so the completion
    is never taken to be less than one token an event.
    """
    usage = reader.usage or Usage(None, None)
    prompt = input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    return prompt + max(usage.completion_tokens or 0, reader.events)
