"""Anthropic's messages as vLLM answers them: ``input_tokens`` is the whole prompt, cached or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated

import msgspec

from thunderagent_sim import tokens
from thunderagent_sim.answers import (
    ApiError,
    Call,
    Json,
    Usage,
    content_tokens,
    decode,
    named_event,
    new_id,
    tools_message,
)
from thunderagent_sim.engine import FinishReason


class AnthropicMessage(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Json]


class CountTokensRequest(msgspec.Struct):
    """The fields that make the prompt; others are accepted and have no effect."""

    messages: Annotated[list[AnthropicMessage], msgspec.Meta(min_length=1)]
    model: str
    system: str | list[Json] | None = None
    tools: list[Json] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A request for an answer, which must name its limit."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = None


def read_messages(body: bytes, served_model: str) -> tuple[Call, MessageShape]:
    """Read a body of ``/v1/messages``. Raises ApiError."""
    request = decode(body, MessagesRequest)
    call = Call(
        model=request.model, prompt=_prompt(request), max_tokens=request.max_tokens, stream=bool(request.stream)
    )
    return call, MessageShape(served_model, call.finish_reason)


def count_input_tokens(body: bytes) -> Json:
    """Answer a body of ``/v1/messages/count_tokens``. Raises ApiError."""
    return {"input_tokens": tokens.count(_prompt(decode(body, CountTokensRequest)))}


def error_body(error: ApiError) -> Json:
    """Return Anthropic's error object."""
    type_ = {
        HTTPStatus.NOT_FOUND: "not_found_error",
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
        HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    }.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": type_, "message": error.message}}


def _prompt(request: CountTokensRequest) -> bytes:
    messages = [tools_message(request.tools)]
    if request.system:
        messages.append(tokens.message("system", content_tokens(request.system)))
    messages += [tokens.message(message.role, content_tokens(message.content)) for message in request.messages]
    return tokens.chat_prompt(messages)


@dataclass(frozen=True, slots=True)
class MessageShape:
    """A ``message``, or the events that build it up from one text block."""

    model: str
    finish_reason: FinishReason
    id: str = field(default_factory=lambda: new_id("msg_"))

    def whole(self, text: str, usage: Usage) -> Json:
        """Return the finished ``message``."""
        return self._message([{"type": "text", "text": text}], self._stop_reason, usage)

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """Yield ``message_start``, the start of the text block, and a ping as Anthropic's server sends one."""
        yield named_event({"type": "message_start", "message": self._message([], None, usage)})
        yield named_event(
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        )
        yield named_event({"type": "ping"})

    def piece(self, text: str, usage: Usage) -> bytes:
        """Return ``content_block_delta``."""
        return named_event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})

    def closing(self, text: str, usage: Usage) -> Iterator[bytes]:
        """Yield the end of the text block, ``message_delta`` with usage, and ``message_stop``."""
        yield named_event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        yield named_event({"type": "message_delta", "delta": delta, "usage": self._usage(usage)})
        yield named_event({"type": "message_stop"})

    @property
    def _stop_reason(self) -> str:
        return "max_tokens" if self.finish_reason == "length" else "end_turn"

    def _message(self, content: list[Json], stop_reason: str | None, usage: Usage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
