"""What probes and operators see: health, version, models, metrics, and errors in vLLM's words."""

import asyncio
import contextlib

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from virtual_clock import VirtualClock

from thunderagent_sim.engine import EngineOptions
from thunderagent_sim.worker import WorkerOptions, running_worker

CHAT = {"messages": [{"role": "user", "content": "fix the bug"}], "max_tokens": 5}


async def samples(client: aiohttp.ClientSession) -> dict[str, float]:
    """All samples of one engine by name, without those that have labels of their own."""
    async with client.get("/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        text = await response.text()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == {"model_name": "m", "engine": "0"}
    }


async def test_health_version_and_models(client):
    async with client.get("/health") as response:
        assert (response.status, await response.text()) == (200, "")
    async with client.get("/version") as response:
        assert await response.json() == {"version": "0.26.0"}
    async with client.get("/v1/models") as response:
        models = await response.json()
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("m", 800)]


async def test_the_cache_configuration_is_printed_as_vllm_prints_it(client):
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    at = lines.index("# TYPE vllm:cache_config_info gauge")
    assert lines[at - 1] == "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig"
    assert lines[at + 1] == (
        'vllm:cache_config_info{block_size="4",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
        'gpu_memory_utilization="0.92",kv_cache_size_tokens="800",num_cpu_blocks="None",num_gpu_blocks="200",'
        'num_gpu_blocks_override="None"} 1.0'
    )
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0' in lines


async def test_metrics_count_what_was_done(client):
    for _ in range(2):
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
    values = await samples(client)
    assert values["vllm:prompt_tokens_total"] == 20
    assert values["vllm:generation_tokens_total"] == 10
    assert values["vllm:prefix_cache_queries_total"] == 20
    assert values["vllm:prefix_cache_hits_total"] == 8
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:num_requests_waiting"] == 0
    assert values["vllm:num_preemptions_total"] == 0
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:e2e_request_latency_seconds_count"] == 2


async def test_metrics_show_what_is_going_on(client, worker):
    worker.engine.submit(b"abcd" * 100, 10, "length", 0.0)
    worker.engine.submit(b"efgh" * 750, 10, "length", 0.0)
    values = await samples(client)
    assert values["vllm:num_requests_running"] == 1
    assert values["vllm:num_requests_waiting"] == 1
    assert values["vllm:kv_cache_usage_perc"] == 0.125


@pytest.mark.parametrize(
    ("path", "body", "status", "message", "type_", "param"),
    [
        ("/v1/chat/completions", "no json", 400, "JSON decode error: JSON is malformed", "Bad Request", None),
        ("/v1/chat/completions", "{}", 400, "Object missing required field `messages`", "Bad Request", None),
        ("/v1/chat/completions", '{"messages":[]}', 400, "Expected `array` of length >= 1", "Bad Request", None),
        ("/v1/chat/completions", "[]", 400, "Expected `object`, got `array`", "Bad Request", None),
        (
            "/v1/chat/completions",
            '{"messages":[{"role":"user","content":"x"}],"max_tokens":0}',
            400,
            "Expected `int` >= 1 - at `$.max_tokens`",
            "Bad Request",
            None,
        ),
        (
            "/v1/chat/completions",
            '{"messages":[{"role":"user","content":"x"}],"n":2}',
            400,
            "n must be 1: the simulated worker gives one choice, not 2.",
            "Bad Request",
            "n",
        ),
        (
            "/v1/completions",
            '{"model":"other","prompt":"x"}',
            404,
            "The model `other` does not exist.",
            "NotFoundError",
            "model",
        ),
        (
            "/v1/completions",
            '{"prompt":["a","b"]}',
            400,
            "The simulated worker answers one prompt per request.",
            "Bad Request",
            "prompt",
        ),
        ("/v1/completions", '{"prompt":""}', 400, "The decoder prompt cannot be empty", "BadRequestError", "prompt"),
        ("/v1/completions", '{"prompt":[-1]}', 400, "Token id is out of vocabulary", "Bad Request", "prompt"),
        (
            "/v1/completions",
            '{"prompt":"abcd","max_tokens":800}',
            400,
            "This model's maximum context length is 800 tokens. However, you requested 800 output tokens and your "
            "prompt contains at least 1 input tokens, for a total of at least 801 tokens.",
            "BadRequestError",
            "input_tokens",
        ),
        (
            "/v1/responses",
            '{"input":"x","previous_response_id":"resp_1"}',
            404,
            "Response with id 'resp_1' not found.",
            "invalid_request_error",
            "response_id",
        ),
        (
            "/v1/responses",
            '{"input":[{"type":"item_reference"}]}',
            400,
            "Unsupported input item type: item_reference",
            "BadRequestError",
            "input",
        ),
        ("/v1/unknown", "{}", 404, "Not Found", "Not Found", None),
        ("/health", "{}", 405, "Method Not Allowed", "Method Not Allowed", None),
    ],
)
async def test_what_cannot_be_answered_is_refused_as_vllm_does(client, path, body, status, message, type_, param):
    async with client.post(path, data=body) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert error["message"].startswith(message)
    assert (error["type"], error["param"], error["code"]) == (type_, param, status)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("depth", [400, 100_000])
async def test_what_is_nested_deeply_is_no_fault_of_the_worker(client, caplog, path, depth):
    field = "messages" if path.endswith(("/messages", "/chat/completions")) else "input"
    nested = "[" * depth + "]" * depth
    content = f'[{{"role":"user","content":{nested}}}]' if field == "messages" else nested
    async with client.post(path, data=f'{{"{field}":{content},"prompt":"x","max_tokens":1}}') as response:
        assert response.status in (200, 400)
    assert caplog.records == []


async def test_a_prompt_as_long_as_the_context_leaves_no_room_for_an_answer(client):
    async with client.post("/v1/completions", json={"prompt": "x" * 3200}) as response:
        assert response.status == 400
        assert "your prompt contains at least 800 input tokens" in (await response.json())["error"]["message"]
    async with client.post("/v1/completions", json={"prompt": "x" * 3196}) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 1


async def test_messages_are_refused_in_anthropics_words(client):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with client.post("/v1/messages", json=body) as response:
        assert response.status == 400
        assert await response.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "Object missing required field `max_tokens`"},
        }
    async with client.post("/v1/messages", json={**body, "max_tokens": 1, "model": "other"}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 60_000 + b"\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x01\r\n\r\n", 400),
        (b"no HTTP\r\n\r\n", 400),
    ],
)
async def test_headers_may_be_long_and_what_is_no_http_is_refused_without_a_traceback(
    worker, caplog, request_bytes, status
):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(worker.url.rpartition(":")[2]))
    writer.write(request_bytes)
    assert int((await reader.readline()).split()[1]) == status
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert caplog.records == []


async def test_a_starting_worker_listens_but_knows_no_capacity_and_answers_nothing():
    options = WorkerOptions(EngineOptions(blocks=200), port=0, startup_delay_seconds=5.0)
    async with running_worker(options, VirtualClock()) as worker, aiohttp.ClientSession(worker.url) as client:
        async with client.get("/health") as response:
            assert response.status == 503
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'kv_cache_size_tokens="None"' in text
        assert 'num_gpu_blocks="None"' in text
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 503
