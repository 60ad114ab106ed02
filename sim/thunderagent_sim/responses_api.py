"""OpenAI's responses as vLLM answers them, without stored responses."""

from __future__ import annotations

import time
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
    json_tokens,
    named_event,
    new_id,
    tools_message,
)
from thunderagent_sim.engine import FinishReason


class ResponsesRequest(msgspec.Struct):
    """The fields of a responses request that matter here; others are accepted and have no effect."""

    input: str | list[Json]
    model: str | None = None
    instructions: str | None = None
    tools: list[Json] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None


def read_responses(body: bytes, served_model: str) -> tuple[Call, ResponseShape]:
    """Read a body of ``/v1/responses``. Raises ApiError, also for a previous response: none is kept."""
    request = decode(body, ResponsesRequest)
    if request.previous_response_id is not None:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"Response with id '{request.previous_response_id}' not found.",
            "invalid_request_error",
            "response_id",
        )
    items: list[Json] = (
        [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    )
    messages = [tools_message(request.tools)]
    if request.instructions:
        messages.append(tokens.message("system", tokens.pack(request.instructions)))
    messages += [_item_tokens(item) for item in items]
    call = Call(
        model=request.model,
        prompt=tokens.chat_prompt(messages),
        max_tokens=request.max_output_tokens,
        stream=bool(request.stream),
    )
    return call, ResponseShape(served_model, call.finish_reason, request.max_output_tokens)


def _item_tokens(item: Json) -> bytes:
    match item:
        case {"role": str() as role}:
            return tokens.message(role, content_tokens(item.get("content")))
        case {"type": "function_call_output"}:
            return tokens.message("tool", content_tokens(item.get("output")))
        case {"type": "function_call"}:
            return tokens.message("assistant", json_tokens([item.get("name"), item.get("arguments")]))
        case {"type": "reasoning"}:
            return b""
        case _:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"Unsupported input item type: {item.get('type')}",
                "BadRequestError",
                "input",
            )


@dataclass(slots=True)
class ResponseShape:
    """A ``response`` object, or the events that build it up; events are numbered, so one object serves one answer."""

    model: str
    finish_reason: FinishReason
    max_output_tokens: int | None
    id: str = field(default_factory=lambda: new_id("resp_"))
    item_id: str = field(default_factory=lambda: new_id("msg_"))
    created: int = field(default_factory=lambda: int(time.time()))
    _events: int = 0

    def whole(self, text: str, usage: Usage) -> Json:
        """Return the finished ``response``; one cut off at its limit is incomplete."""
        cut_off = self.finish_reason == "length"
        return {
            **self._response("incomplete" if cut_off else "completed", [self._item("completed", [self._part(text)])]),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """Yield ``response.created`` and what announces the one message and its one part."""
        response = self._response("in_progress", [])
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})
        yield self._event("response.output_item.added", {"output_index": 0, "item": self._item("in_progress", [])})
        yield self._event("response.content_part.added", {**self._place, "part": self._part("")})

    def piece(self, text: str, usage: Usage) -> bytes:
        """Return ``response.output_text.delta``."""
        return self._event("response.output_text.delta", {**self._place, "delta": text, "logprobs": []})

    def closing(self, text: str, usage: Usage) -> Iterator[bytes]:
        """Yield what ends text, part and message, and ``response.completed``, which vLLM sends in every case."""
        part = self._part(text)
        yield self._event("response.output_text.done", {**self._place, "text": text, "logprobs": []})
        yield self._event("response.content_part.done", {**self._place, "part": part})
        yield self._event("response.output_item.done", {"output_index": 0, "item": self._item("completed", [part])})
        yield self._event("response.completed", {"response": self.whole(text, usage)})

    @property
    def _place(self) -> Json:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _event(self, type_: str, fields: Json) -> bytes:
        number, self._events = self._events, self._events + 1
        return named_event({"type": type_, "sequence_number": number, **fields})

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": output,
            "max_output_tokens": self.max_output_tokens,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "usage": None,
        }
