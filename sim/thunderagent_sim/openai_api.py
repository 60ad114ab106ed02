"""OpenAI's chat completions and completions as vLLM answers them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec

from thunderagent_sim import tokens
from thunderagent_sim.answers import (
    ApiError,
    Call,
    Json,
    Usage,
    content_tokens,
    data_event,
    decode,
    json_tokens,
    new_id,
    tools_message,
)
from thunderagent_sim.engine import FinishReason

Limit = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    """Whether usage is sent: at the end of a stream, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[Json] | None = None
    tool_calls: list[Json] | None = None


class ChatRequest(msgspec.Struct):
    """The fields of a chat request that matter here; others are accepted and have no effect."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    model: str | None = None
    tools: list[Json] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None


class CompletionRequest(msgspec.Struct):
    """The fields of a completion request that matter here; others are accepted and have no effect."""

    prompt: str | list[str | int]
    model: str | None = None
    max_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None


def read_chat(body: bytes, served_model: str) -> tuple[Call, ChoicesShape]:
    """Read a body of ``/v1/chat/completions``. Raises ApiError."""
    request = decode(body, ChatRequest)
    _one_choice(request.n)
    messages = [
        tokens.message(
            message.role,
            content_tokens(message.content) + (json_tokens(message.tool_calls) if message.tool_calls else b""),
        )
        for message in request.messages
    ]
    call = Call(
        model=request.model,
        prompt=tokens.chat_prompt([tools_message(request.tools), *messages]),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stream=bool(request.stream),
    )
    options = request.stream_options or StreamOptions()
    return call, ChoicesShape("chat", served_model, call.finish_reason, options, new_id("chatcmpl-"), int(time.time()))


def read_completion(body: bytes, served_model: str) -> tuple[Call, ChoicesShape]:
    """Read a body of ``/v1/completions``; the prompt is one text or one list of token ids. Raises ApiError."""
    request = decode(body, CompletionRequest)
    _one_choice(request.n)
    call = Call(
        model=request.model,
        prompt=_prompt_tokens(request.prompt),
        max_tokens=request.max_tokens,
        stream=bool(request.stream),
    )
    options = request.stream_options or StreamOptions()
    return call, ChoicesShape("text", served_model, call.finish_reason, options, new_id("cmpl-"), int(time.time()))


def error_body(error: ApiError) -> Json:
    """Return vLLM's error object."""
    return {
        "error": {"message": error.message, "type": error.type, "param": error.param, "code": int(error.status)},
    }


def _one_choice(n: int | None) -> None:
    if n is not None and n != 1:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, f"n must be 1: the simulated worker gives one choice, not {n}.", param="n"
        )


def _prompt_tokens(prompt: str | list[str | int]) -> bytes:
    if isinstance(prompt, str):
        prompt = [prompt]
    packed = b""
    match prompt:
        case [str() as text]:
            packed = tokens.pack(text)
        case [*ids] if all(isinstance(token, int) for token in ids):
            try:
                packed = b"".join(int(token).to_bytes(tokens.TOKEN_BYTES, "big") for token in ids)
            except OverflowError as error:
                raise ApiError(HTTPStatus.BAD_REQUEST, "Token id is out of vocabulary", param="prompt") from error
        case _:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "The simulated worker answers one prompt per request.", param="prompt"
            )
    if not packed:
        raise ApiError(HTTPStatus.BAD_REQUEST, "The decoder prompt cannot be empty", "BadRequestError", "prompt")
    return packed


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class ChoicesShape:
    """Answers with ``choices``: chat ("chat", messages and deltas) and completions ("text")."""

    kind: Literal["chat", "text"]
    model: str
    finish_reason: FinishReason
    stream_options: StreamOptions
    id: str
    created: int

    def whole(self, text: str, usage: Usage) -> Json:
        """Return a ``chat.completion`` or ``text_completion``."""
        content: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": [], "reasoning": None}}
            if self.kind == "chat"
            else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self.finish_reason, "stop_reason": None}
        object_ = "chat.completion" if self.kind == "chat" else "text_completion"
        return {**self._head(object_), "choices": [choice], "usage": _usage(usage)}

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """Yield a chat's first chunk, which has the role and no text; completions have none."""
        if self.kind == "chat":
            yield self._chunk({"delta": {"role": "assistant", "content": ""}}, None, usage)

    def piece(self, text: str, usage: Usage) -> bytes:
        """Return one chunk with new text."""
        return self._chunk(self._content(text), None, usage)

    def closing(self, text: str, usage: Usage) -> Iterator[bytes]:
        """Yield the chunk with the reason, usage in a chunk without choices where asked for, and ``[DONE]``."""
        yield self._chunk(self._content(""), self.finish_reason, usage)
        if self.stream_options.include_usage:
            yield data_event({**self._head(self._chunk_object), "choices": [], "usage": _usage(usage)})
        yield b"data: [DONE]\n\n"

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _content(self, text: str) -> Json:
        if self.kind == "text":
            return {"text": text}
        return {"delta": {"content": text}}

    def _head(self, object_: str) -> Json:
        return {"id": self.id, "object": object_, "created": self.created, "model": self.model}

    def _chunk(self, content: Json, finish_reason: FinishReason | None, usage: Usage) -> bytes:
        choice: Json = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = None
        chunk: Json = {**self._head(self._chunk_object), "choices": [choice]}
        if self.stream_options.include_usage and self.stream_options.continuous_usage_stats:
            chunk["usage"] = _usage(usage)
        return data_event(chunk)
