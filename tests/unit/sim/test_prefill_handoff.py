"""Simulated prefill and decode workers: who computes a prompt, and what is told from one to the other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from virtual_clock import VirtualClock

from thunderagent_sim.engine import Engine, EngineOptions, SequenceState
from thunderagent_sim.prefill_handoff import is_for_another, prefill_request
from thunderagent_sim.worker import SimulatedWorker, WorkerOptions, running_worker
from thunderagent_sim.worker_role import WorkerRole

CHAT = "/v1/chat/completions"
ENGINE = EngineOptions(blocks=200, block_size=4, prefill_tokens_per_second=100.0)
WORDS = " ".join(["word"] * 40)
BODY = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 5}


@contextlib.asynccontextmanager
async def worker(role: WorkerRole | None) -> AsyncIterator[SimulatedWorker]:
    options = WorkerOptions(ENGINE, port=0, model="m", role=role)
    async with running_worker(options, VirtualClock()) as running:
        yield running


def host_port(of: SimulatedWorker) -> str:
    return of.url.removeprefix("http://")


async def post(to: SimulatedWorker, body: dict[str, Any], prefiller: str | None = None) -> dict[str, Any]:
    headers = {} if prefiller is None else {"x-prefiller-host-port": prefiller}
    async with (
        aiohttp.ClientSession(to.url) as client,
        client.post(CHAT, json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def test_a_decode_worker_has_the_prompt_computed_by_the_prefill_worker_it_is_told_of() -> None:
    async with worker(WorkerRole.PREFILL) as prefill, worker(WorkerRole.DECODE) as decode:
        answer = await post(decode, BODY, host_port(prefill))
    prompt = answer["usage"]["prompt_tokens"]
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
    assert "kv_transfer_params" not in answer
    assert (prefill.engine.counters.prompt, prefill.engine.counters.generation) == (prompt, 1)
    assert (decode.engine.counters.external_queries, decode.engine.counters.external_hits) == (prompt, prompt - 1)


async def test_what_the_decode_worker_has_anyway_is_not_counted_as_loaded() -> None:
    async with worker(WorkerRole.PREFILL) as prefill, worker(WorkerRole.DECODE) as decode:
        await post(decode, BODY, host_port(prefill))
        loaded = decode.engine.counters.external_hits
        await post(decode, BODY, host_port(prefill))
        assert prefill.engine.counters.prefix_hits > 0
        assert decode.engine.counters.external_hits - loaded < 4
        assert decode.engine.counters.prefix_hits > 0


async def test_without_the_header_a_decode_worker_does_both() -> None:
    async with worker(WorkerRole.DECODE) as decode:
        answer = await post(decode, BODY)
        assert answer["usage"]["completion_tokens"] == 5
        assert decode.engine.counters.external_queries == 0


async def test_where_the_prefill_worker_is_gone_the_decode_worker_does_both() -> None:
    async with worker(WorkerRole.PREFILL) as gone:
        nobody = host_port(gone)
    async with worker(WorkerRole.DECODE) as decode:
        answer = await post(decode, BODY, nobody)
        assert answer["usage"]["completion_tokens"] == 5
        counters = decode.engine.counters
        assert (counters.external_queries, counters.external_hits) == (answer["usage"]["prompt_tokens"], 0)


@pytest.mark.parametrize("named", ["not an address", "127.0.0.1:1/else?", ""])
async def test_a_prefill_worker_that_cannot_be_asked_is_done_without(named: str) -> None:
    async with worker(WorkerRole.DECODE) as decode:
        assert (await post(decode, BODY, named))["usage"]["completion_tokens"] == 5


async def test_a_prefill_worker_that_keeps_no_cache_is_done_without() -> None:
    async with worker(None) as aggregated, worker(WorkerRole.DECODE) as decode:
        await post(decode, BODY, host_port(aggregated))
        assert decode.engine.counters.external_hits == 0


async def test_only_a_decode_worker_heeds_the_header() -> None:
    async with worker(WorkerRole.PREFILL) as prefill, worker(None) as aggregated:
        await post(aggregated, BODY, host_port(prefill))
        assert prefill.engine.counters.generation == 0


async def test_a_streamed_answer_is_streamed_by_the_decode_worker() -> None:
    async with worker(WorkerRole.PREFILL) as prefill, worker(WorkerRole.DECODE) as decode:
        headers = {"x-prefiller-host-port": host_port(prefill)}
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        async with aiohttp.ClientSession(decode.url) as client, client.post(CHAT, json=body, headers=headers) as answer:
            assert answer.content_type == "text/event-stream"
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert prefill.engine.counters.generation == 1


async def test_a_prefill_alone_says_where_its_cache_is_kept() -> None:
    async with worker(WorkerRole.PREFILL) as prefill:
        answer = await post(prefill, json.loads(prefill_request(CHAT, json.dumps(BODY).encode())))
        kept = answer["kv_transfer_params"]
        assert (kept["do_remote_prefill"], kept["do_remote_decode"]) == (True, False)
        assert len(kept["remote_block_ids"][0]) == -(-answer["usage"]["prompt_tokens"] // 4)
        assert "kv_transfer_params" not in await post(prefill, BODY)


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1}),
        ("/v1/messages", {"max_tokens": 1}),
    ],
)
def test_a_prefill_request_is_the_same_prompt_for_one_token_unstreamed(path: str, limits: dict[str, int]) -> None:
    body = b'{"model":"m","messages":[],"stream":true,"stream_options":{},"temperature":0.5,"max_tokens":900}'
    request = json.loads(prefill_request(path, body))
    assert request.items() >= {"model": "m", "messages": [], "temperature": 0.5, "stream": False}.items()
    assert request.items() >= limits.items()
    assert "stream_options" not in request
    assert is_for_another(prefill_request(path, body))
    assert not is_for_another(body)
    assert not is_for_another(b"no json")


def test_a_loaded_cache_costs_one_token_of_prefill_and_is_lost_in_a_preemption() -> None:
    engine = Engine(ENGINE)
    prompt = bytes(2 * 40)
    loaded = engine.submit(prompt, 2, "length", 0.0, transferred=True)
    engine.advance(0.01)
    assert loaded.state is SequenceState.DECODE
    assert loaded.first_token_at == pytest.approx(0.01)
    engine._preempt(loaded, 0.02)
    engine.advance(0.02)
    assert loaded.state is not SequenceState.DECODE
