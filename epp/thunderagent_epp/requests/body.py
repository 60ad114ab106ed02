"""The body of an inference request: the few fields asked for, and removal of fields a server would refuse.

Bodies reach megabytes and every one passes through the one process of the EPP, so values are located, never built:
msgspec checks the JSON in one pass and hands back slices of the body. What it does not look into are the bytes of
strings, so that they are UTF-8 is checked here. Bodies that no one asked to change go on byte for byte.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from .invalid import InvalidRequest

_NULL = msgspec.Raw(b"null")
_TRUE = msgspec.Raw(b"true")


class RequestBody(msgspec.Struct, frozen=True, gc=False):
    """The fields of an inference request that the EPP reads, as undecoded JSON; null where absent."""

    model: msgspec.Raw = _NULL
    stream: msgspec.Raw = _NULL
    program_id: msgspec.Raw = _NULL
    extra_body: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    system: msgspec.Raw = _NULL
    instructions: msgspec.Raw = _NULL

    def prompt_bytes(self) -> int:
        """Bytes of the prompt fields as they were sent; 0 without any."""
        return sum(
            memoryview(field).nbytes
            for field in (self.messages, self.prompt, self.input, self.tools, self.system, self.instructions)
            if field != _NULL
        )

    def model_name(self) -> str:
        """Return the model asked for, empty when none is named or the name is no string."""
        return _text(self.model) or ""

    def asks_for_stream(self) -> bool:
        """Tell whether the answer is to be streamed."""
        return self.stream == _TRUE

    def program_ids(self) -> Iterator[tuple[str, str]]:
        """Yield the name and value of each field that may carry the session, first to last.

        Raises InvalidRequest when one is no string.
        """
        if self.program_id != _NULL:
            yield "program_id", _required_text(self.program_id, "program_id")
        if bytes(memoryview(self.extra_body)[:1]) == b"{":
            program_id = _decoded(_EXTRA_BODY, self.extra_body).program_id
            if program_id != _NULL:
                yield "extra_body.program_id", _required_text(program_id, "extra_body.program_id")


class _ExtraBody(msgspec.Struct, frozen=True, gc=False):
    program_id: msgspec.Raw = _NULL


_REQUEST_BODY = msgspec.json.Decoder(RequestBody)
_EXTRA_BODY = msgspec.json.Decoder(_ExtraBody)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)

_CHECKED_AT_ONCE_BYTES = 1 << 20

# An escape for one half of a UTF-16 pair without its other half; JavaScript writes it when it cuts text in a pair.
_HALF_A_PAIR = re.compile(
    rb"(?<!\\)(?:\\\\)*+\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)

_T = TypeVar("_T")


def parse_body(body: bytes) -> RequestBody:
    """Locate the fields of a JSON body. Raises InvalidRequest when it does not parse, is no object or no UTF-8."""
    # Most bodies are ASCII, and that is told ten times faster.
    if not body.isascii():
        _require_utf8(body)
    return _decoded(_REQUEST_BODY, body)


def strip_fields(body: bytes, fields: tuple[str, ...]) -> bytes:
    """Return the body without the named top-level fields, everything else byte for byte and in order.

    A body that is no JSON object, or has none of them, comes back as it is. A field given twice is removed twice.
    """
    try:
        members = _MEMBERS.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return body
    if members.keys().isdisjoint(fields):
        return body
    spans = list(_member_spans(body, members))
    kept = b",".join(body[start:end] for start, end, name in spans if name not in fields)
    return body[: spans[0][0]] + kept + body[spans[-1][1] :]


def _decoded(decoder: msgspec.json.Decoder[_T], body: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("the body is not a JSON object") from None
    except msgspec.DecodeError as error:
        # msgspec calls it truncated, or malformed somewhere behind.
        half = _HALF_A_PAIR.search(body, 0, _CHECKED_AT_ONCE_BYTES)
        reason = "a \\u escape is half of a surrogate pair" if half else str(error)
        raise InvalidRequest(f"the body does not parse: {reason}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _require_utf8(body: bytes) -> None:
    """Decode and drop it piece by piece: decoded whole, a body can take four times its size."""
    view = memoryview(body)
    position = 0
    while position < len(body):
        end = position + _CHECKED_AT_ONCE_BYTES
        try:
            _, length = codecs.utf_8_decode(view[position:end], "strict", end >= len(body))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid UTF-8 (byte {position + error.start})") from None
        position += length


def _text(value: msgspec.Raw) -> str | None:
    try:
        return _TEXT.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _required_text(value: msgspec.Raw, name: str) -> str:
    text = _text(value)
    if text is None:
        raise InvalidRequest(f"body field {name} must be a string")
    return text


_CLOSING_BRACE = ord("}")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_NAME = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_END_OF_MEMBER = re.compile(rb"\s*+[,}]")
_TOKEN = re.compile(_STRING + rb"|[{\[\]},]", re.DOTALL)


def _member_spans(body: bytes, members: Mapping[str, msgspec.Raw]) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and name of each top-level member of a JSON object that has some and has been checked.

    A member is all bytes between the commas and braces around it, white space included.
    """
    end = body.index(b"{")
    while body[end] != _CLOSING_BRACE:
        start = end + 1
        key = _NAME.match(body, start)
        assert key is not None, "a member of a JSON object begins with its name"
        name = _TEXT.decode(key[1])
        end = _end_of_member(body, key.end(), bytes(members[name]))
        yield start, end, name


def _end_of_member(body: bytes, position: int, likely: bytes) -> int:
    """Return where the comma or brace is that ends the value at ``position``."""
    if body.startswith(likely, position):
        found = _END_OF_MEMBER.match(body, position + len(likely))
        if found is not None:
            return found.end() - 1
    # Of a name given twice only the last value is known: look for the end of this one.
    depth = 0
    for token in _TOKEN.finditer(body, position):
        character = token[0][:1]
        if depth == 0 and character in b",}":
            return token.start()
        if character in b"{[":
            depth += 1
        elif character in b"}]":
            depth -= 1
    raise AssertionError("valid JSON closes what it opens")
