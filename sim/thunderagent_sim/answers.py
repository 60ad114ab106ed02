"""What every API of the simulated worker has in common: a call that was read, usage, an answer's shape, errors.

`worker.py` reads a body with one of the API modules into a `Call`, runs it, and has the call's shape turn text and
usage into JSON or server-sent events. The API modules know formats; nothing here or there knows HTTP or the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, TypeVar

import msgspec

from thunderagent_sim import tokens
from thunderagent_sim.engine import FinishReason

DEFAULT_ANSWER_TOKENS = 16
"""Length of an answer for which the request names no limit; the simulated model then stops by itself."""

Json = dict[str, object]
T = TypeVar("T")


class ApiError(Exception):
    """A request that cannot be answered; each API has its own shape for it."""

    def __init__(self, status: HTTPStatus, message: str, type_: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_ or status.phrase
        self.param = param


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; ``cached_tokens`` are those of the prompt that were found in the KV cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class AnswerShape(Protocol):
    """Turns one answer into the wire format of its API. ``text`` is the whole answer except in `piece`."""

    def whole(self, text: str, usage: Usage) -> Json:
        """Return the body of an answer that is not streamed."""

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """Yield the events before the first text; ``usage`` has no completion yet."""

    def piece(self, text: str, usage: Usage) -> bytes:
        """Return the event that carries a new piece of text."""

    def closing(self, text: str, usage: Usage) -> Iterator[bytes]:
        """Yield the events after the last text."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as the engine needs it. ``max_tokens`` None: the request names no limit."""

    model: str | None
    prompt: bytes
    max_tokens: int | None
    stream: bool

    @property
    def finish_reason(self) -> FinishReason:
        """An answer ends at the limit it was given, else by itself."""
        return "stop" if self.max_tokens is None else "length"

    def answer_tokens(self, context_limit_tokens: int) -> int:
        """Return how long the answer will be. Raises ApiError, worded as vLLM does, if it does not fit."""
        prompt_tokens = tokens.count(self.prompt)
        wanted = self.max_tokens or min(DEFAULT_ANSWER_TOKENS, max(context_limit_tokens - prompt_tokens, 1))
        if prompt_tokens + wanted > context_limit_tokens:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"This model's maximum context length is {context_limit_tokens} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains at least {prompt_tokens} input tokens, for a total "
                f"of at least {prompt_tokens + wanted} tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens.",
                "BadRequestError",
                "input_tokens",
            )
        return wanted


def decode(body: bytes, type_: type[T]) -> T:
    """Read a JSON body. Raises ApiError 400 naming what is wrong and where."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"JSON decode error: {error}") from error


def content_tokens(content: object) -> bytes:
    """Tokens of a message's content: text, a list of parts, or nothing.

    Parts with text count as their text, a tool's result as its content, and anything else as its JSON; what only
    steers the client's caching is left out, for clients move it from turn to turn.
    """
    if content is None:
        return b""
    if isinstance(content, str):
        return tokens.pack(content)
    if isinstance(content, list):
        return b"".join(content_tokens(part) for part in content)
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return tokens.pack(content["text"])
        if content.get("type") == "tool_result":
            return content_tokens(content.get("content"))
        return json_tokens({key: value for key, value in content.items() if key != "cache_control"})
    return json_tokens(content)


def json_tokens(value: object) -> bytes:
    """Tokens of a value as JSON, the same for equal values."""
    return tokens.pack(msgspec.json.encode(value, order="deterministic").decode())


def tools_message(tools: list[Json] | None) -> bytes:
    """Tokens of the tools a model is offered; they come first, as in the chat templates of most models."""
    return tokens.message("tools", json_tokens(tools)) if tools else b""


def new_id(prefix: str) -> str:
    """Return an id as vLLM makes them."""
    return f"{prefix}{uuid.uuid4().hex}"


def data_event(payload: Json) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(payload: Json) -> bytes:
    """One server-sent event named as its ``type``."""
    return f"event: {payload['type']}\n".encode() + data_event(payload)
