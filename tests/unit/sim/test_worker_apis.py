"""What clients see: each API's answers, whole and streamed, usage, and prefix reuse from turn to turn."""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web
from virtual_clock import VirtualClock

from thunderagent_sim.engine import Engine, EngineOptions
from thunderagent_sim.worker import SimulatedWorker, WorkerOptions, running_worker

CHAT = {"model": "m", "messages": [{"role": "user", "content": "fix the bug"}], "max_tokens": 5}


async def post(client: aiohttp.ClientSession, path: str, body: object) -> dict:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/json"
        return await response.json()


async def events(client: aiohttp.ClientSession, path: str, body: object) -> list[tuple[str | None, dict | str]]:
    """The (name, data) of each event of a streamed answer."""
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = await response.text()
    result = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        result.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return result


def called(monkeypatch: pytest.MonkeyPatch, engine: Engine, method: str) -> asyncio.Event:
    """Set as soon as the engine's method has been called."""
    event, original = asyncio.Event(), getattr(engine, method)

    def call(*arguments: object, **named: object) -> object:
        result = original(*arguments, **named)
        event.set()
        return result

    monkeypatch.setattr(engine, method, call)
    return event


async def test_a_chat_is_answered_with_as_many_tokens_as_asked_for(client):
    answer = await post(client, "/v1/chat/completions", CHAT)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "m"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5 * 4
    assert choice["finish_reason"] == "length"
    # Start mark, "user", 11 bytes of text and end mark; start mark and "assistant".
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "total_tokens": 15,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_without_a_limit_an_answer_stops_by_itself_after_16_tokens(client):
    body = {"messages": CHAT["messages"]}
    answer = await post(client, "/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 16


async def test_max_completion_tokens_goes_before_max_tokens(client):
    answer = await post(client, "/v1/chat/completions", {**CHAT, "max_completion_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_same_prompt_gets_the_same_answer_streamed_or_not(client):
    whole = await post(client, "/v1/chat/completions", CHAT)
    chunks = [data for _, data in await events(client, "/v1/chat/completions", {**CHAT, "stream": True})]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]


async def test_a_chat_streams_role_then_text_then_reason_then_done(client):
    chunks = [data for _, data in await events(client, "/v1/chat/completions", {**CHAT, "stream": True})]
    first, *pieces, last, done = chunks
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces)
    assert last["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


async def test_usage_is_a_last_chunk_without_choices_where_asked_for(client):
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [data for _, data in await events(client, "/v1/chat/completions", body)]
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["prompt_tokens"] == 10
    assert chunks[-2]["usage"]["completion_tokens"] == 5
    assert all("usage" not in chunk for chunk in chunks[:-2])


async def test_continuous_usage_counts_up_with_every_chunk(client):
    body = {
        **CHAT,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chunks = [data for _, data in await events(client, "/v1/chat/completions", body)]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [0, 1, 2, 3, 4, 5, 5, 5]


async def test_a_completion_is_answered_whole_and_streamed(client):
    body = {"model": "m", "prompt": "once upon", "max_tokens": 4}
    whole = await post(client, "/v1/completions", body)
    assert whole["object"] == "text_completion"
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 4
    chunks = [data for _, data in await events(client, "/v1/completions", {**body, "stream": True})]
    assert chunks[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_completion_takes_token_ids(client):
    answer = await post(client, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == 3


async def test_a_response_is_answered(client):
    body = {"model": "m", "instructions": "be brief", "input": "hi", "max_output_tokens": 4}
    answer = await post(client, "/v1/responses", body)
    assert answer["object"] == "response"
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert len(answer["output"][0]["content"][0]["text"]) == 16
    assert answer["usage"] == {
        "input_tokens": 14,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


async def test_a_response_without_a_limit_is_completed(client):
    answer = await post(client, "/v1/responses", {"input": "hi"})
    assert answer["status"] == "completed"
    assert answer["incomplete_details"] is None


async def test_a_response_streams_its_events_in_order(client):
    received = await events(client, "/v1/responses", {"input": "hi", "max_output_tokens": 2, "stream": True})
    assert [name for name, _ in received] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert all(data["type"] == name for name, data in received)
    assert [data["sequence_number"] for _, data in received] == list(range(10))
    text = "".join(data["delta"] for name, data in received if name == "response.output_text.delta")
    final = received[-1][1]["response"]
    assert final["output"][0]["content"][0]["text"] == text
    assert final["usage"]["output_tokens"] == 2


async def test_a_message_is_answered(client):
    body = {"model": "m", "max_tokens": 4, "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    answer = await post(client, "/v1/messages", body)
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["stop_reason"] == "max_tokens"
    assert len(answer["content"][0]["text"]) == 16
    assert answer["usage"] == {"input_tokens": 14, "output_tokens": 4}
    counted = await post(client, "/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    assert counted == {"input_tokens": 14}


async def test_a_message_streams_its_events_in_order(client):
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    received = await events(client, "/v1/messages", body)
    assert [name for name, _ in received] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert received[0][1]["message"]["usage"] == {"input_tokens": 8, "output_tokens": 0}
    assert received[6][1]["usage"] == {"input_tokens": 8, "output_tokens": 2}
    assert received[6][1]["delta"]["stop_reason"] == "max_tokens"


async def test_a_growing_chat_finds_its_earlier_turns_and_answers_in_the_cache(client):
    messages: list[dict] = [{"role": "system", "content": "you fix bugs"}, {"role": "user", "content": "x" * 101}]
    hits = []
    for number in range(4):
        body = {"messages": messages, "tools": [{"type": "function"}], "max_tokens": 20}
        answer = await post(client, "/v1/chat/completions", body)
        usage = answer["usage"]
        hits.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "tool", "content": f"result {number}"})
    # All full blocks of 4 of the last prompt and its answer but for the answer's last token: 50 + 19, 80 + 19, …
    assert hits == [(50, 0), (80, 68), (110, 96), (140, 128)]


async def test_a_growing_conversation_hits_the_cache_in_the_other_apis_too(client):
    response = await post(client, "/v1/responses", {"input": "x" * 100, "max_output_tokens": 20})
    items = [{"role": "user", "content": "x" * 100}, *response["output"], {"role": "user", "content": "go on"}]
    again = await post(client, "/v1/responses", {"input": items, "max_output_tokens": 20})
    assert response["usage"]["input_tokens"] == 32
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == 48

    messages: list[dict] = [{"role": "user", "content": [{"type": "text", "text": "y" * 100}]}]
    message = await post(client, "/v1/messages", {"model": "m", "max_tokens": 20, "messages": messages})
    messages += [
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]},
    ]
    chat = [{**m, "content": "done" if m is messages[-1] else m["content"]} for m in messages]
    again = await post(client, "/v1/chat/completions", {"messages": chat, "max_tokens": 1})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(stopped_worker: SimulatedWorker, monkeypatch, stream):
    engine = stopped_worker.engine
    submitted, aborted = called(monkeypatch, engine, "submit"), called(monkeypatch, engine, "abort")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 700, "stream": stream}
    async with aiohttp.ClientSession(stopped_worker.url) as client:

        async def ask() -> None:
            async with client.post("/v1/chat/completions", json=body) as response:
                await response.read()

        task = asyncio.create_task(ask())
        await submitted.wait()
        assert engine.running == 1
        task.cancel()
        await asyncio.wait([task])
        await aborted.wait()
    assert engine.idle
    assert engine.cache.used == 0
    assert engine.counters.finished_requests["abort"] == 1


async def test_a_client_that_leaves_in_the_middle_of_an_answer_frees_its_blocks(
    stopped_worker: SimulatedWorker, monkeypatch
):
    engine = stopped_worker.engine
    aborted = called(monkeypatch, engine, "abort")
    async with aiohttp.ClientSession(stopped_worker.url) as client:
        async with client.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            assert engine.cache.used == 3
        await aborted.wait()
    assert engine.cache.used == 0


async def test_a_client_that_leaves_while_a_piece_is_written_is_no_fault_of_the_worker(
    client: aiohttp.ClientSession, worker: SimulatedWorker, monkeypatch, caplog
):
    async def left(*_):
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", left)
    async with client.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        assert await response.read() == b""
    assert worker.engine.cache.used == 0
    assert caplog.records == []


async def test_a_worker_that_stops_ends_the_answers_in_progress(monkeypatch):
    options = WorkerOptions(EngineOptions(blocks=200), port=0)
    async with aiohttp.ClientSession() as client, contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running_worker(options, VirtualClock(sleeps_allowed=0)))
        submitted = called(monkeypatch, worker.engine, "submit")
        body = {"messages": CHAT["messages"]}
        answer = asyncio.create_task(client.post(f"{worker.url}/v1/chat/completions", json=body))
        await submitted.wait()
        await stack.aclose()
        with pytest.raises(aiohttp.ClientError):
            await answer
    assert worker.engine.idle


async def test_many_sessions_at_once_are_all_answered(client, worker: SimulatedWorker):
    async def session(number: int) -> int:
        body = {"messages": [{"role": "user", "content": f"{number:04d} " * 4}], "max_tokens": 8}
        answer = await post(client, "/v1/chat/completions", body)
        return answer["usage"]["completion_tokens"]

    assert await asyncio.gather(*(session(number) for number in range(200))) == [8] * 200
    assert worker.engine.cache.used == 0
