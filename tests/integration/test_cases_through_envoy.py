"""The case table of extproc.md through a real Envoy, row by row, and what a client may do around it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.fault import v3 as fault
from envoy_data_plane.envoy.type import v3 as envoy_type
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value

from support.envoy_changes import (
    HEADER_MUTATION,
    change_envoys,
    filter_ahead,
    only_with_destination,
    processing_mode,
    subset_from_header,
    without_filter,
)
from support.local_picker import LocalPicker, running_local_picker, snapshot
from support.scripted_worker import (
    JSON,
    SSE,
    ScriptedWorker,
    chat_completion,
    running_scripted_worker,
    streamed,
    when,
    whole,
)
from thunderagent_epp.extproc.tls import server_credentials

if TYPE_CHECKING:
    from conftest import StartEnvoy

CHAT = "/v1/chat/completions"
HELLO = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
USAGE = {"prompt_tokens": 11, "completion_tokens": 4}
DONE = b"data: [DONE]\n\n"


def of_session(session: str, **headers: str) -> dict[str, str]:
    return {**JSON, "x-thunderagent-session-id": session, **headers}


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def body_of(size: int) -> bytes:
    """A chat request of exactly this many bytes."""
    frame = b'{"model":"m","prompt":""}'
    return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]


@asynccontextmanager
async def answered(sent: Awaitable[aiohttp.ClientResponse]) -> AsyncIterator[aiohttp.ClientResponse]:
    """An answer, read to its end when the block is left: one that is dropped unread is a client that leaves."""
    async with await sent as answer:
        yield answer
        await answer.read()


async def stream_of(body: io.BytesIO) -> AsyncIterator[bytes]:
    while chunk := body.read(100_000):
        yield chunk


async def refusal(answer: aiohttp.ClientResponse) -> tuple[int, str | None, str | None]:
    """Status, code in the header and code in the body, which must agree."""
    error = (await answer.json())["error"]
    assert answer.headers.getall("x-thunderagent-refusal") == [error["code"]]
    return answer.status, error["code"], answer.headers.get("retry-after")


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with running_scripted_worker() as running:
        yield running


@pytest.fixture
async def other_worker() -> AsyncIterator[ScriptedWorker]:
    async with running_scripted_worker() as running:
        yield running


@pytest.fixture
async def picker(worker: ScriptedWorker) -> AsyncIterator[LocalPicker]:
    async with running_local_picker(snapshot(worker.endpoint)) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


# Rows 1 to 3: the request


async def test_case_1_a_chat_request_is_routed_by_header_and_metadata_with_its_body_as_it_came(
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_envoys(monkeypatch, only_with_destination)
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        assert answer.status == 200
        assert await answer.read() == chat_completion(7, 3)
        assert answer.headers["x-metadata"] == worker.endpoint
    (received,) = worker.received
    assert received.body == HELLO
    assert received.headers.getall("x-gateway-destination-endpoint") == [worker.endpoint]
    assert "x-thunderagent-session-id" not in received.headers


async def test_case_2_a_body_in_two_pieces_arrives_as_one(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"max_tok'
        # Only once the picker has the request's headers is the first piece sure to be a message of its own.
        await picker.until(lambda each: each.server.open_streams == 1)
        yield b'ens":1}'

    async with answered(client.post(envoy.url + CHAT, data=pieces(), headers=of_session("s1"))) as answer:
        assert answer.status == 200
    assert worker.bodies == [b'{"max_tokens":1}']


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'{"model":"m"', b"\xff\xfe", b"{}{}", b" "])
async def test_case_3_a_chat_body_that_is_no_json_object_is_refused_and_goes_nowhere(
    body: bytes, start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=io.BytesIO(body), headers=of_session("s1"))) as answer:
        assert await refusal(answer) == (400, "invalid_request", None)
        assert answer.content_type == "application/json"
    assert worker.received == []
    assert picker.status.state.programs == {}
    assert picker.requests() == {"refused": 1}


# Rows 4 to 6: where it may go


def hint(value: Any) -> dict[str, str]:
    """A subset hint of any kind, for `subset_from_header`."""
    return {"x-subset": base64.b64encode(ParseDict(value, Value()).SerializeToString()).decode()}


async def test_case_4_a_subset_of_the_most_loaded_worker_is_kept_to(
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    other_worker: ScriptedWorker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_envoys(monkeypatch, subset_from_header("x-subset"))
    opened = asyncio.Event()
    worker.answer = when(opened, whole(chat_completion(7, 3), JSON))
    async with running_local_picker(snapshot(worker.endpoint, other_worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)
        loading = asyncio.ensure_future(client.post(envoy.url + CHAT, data=body_of(100_000), headers=JSON))
        await worker.next_request()

        only_loaded = asyncio.ensure_future(
            client.post(envoy.url + CHAT, data=HELLO, headers={**JSON, **hint([worker.endpoint])})
        )
        assert (await worker.next_request()).body == HELLO
        async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=JSON)) as anywhere:
            assert anywhere.status == 200
        assert other_worker.bodies == [HELLO]
        opened.set()
        for request in (loading, only_loaded):
            async with answered(request) as answer:
                assert answer.status == 200
    assert "x-subset" not in worker.received[1].headers


@pytest.mark.parametrize("form", ["a list", "a string", "a list of a string with commas", "an address alone", "a mix"])
async def test_case_4_a_subset_is_read_in_every_form(
    form: str,
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = {
        "a list": ["10.0.0.1:80", worker.endpoint],
        "a string": f"10.0.0.1:80, {worker.endpoint}",
        "a list of a string with commas": [f"10.0.0.1:80 , {worker.endpoint} "],
        "an address alone": "127.0.0.1",
        "a mix": [3, True, None, f"10.0.0.1:80,{worker.endpoint}", {"a": 1}],
    }[form]
    change_envoys(monkeypatch, subset_from_header("x-subset"))
    envoy = await start_envoy(picker.port)
    async with answered(
        client.post(envoy.url + CHAT, data=HELLO, headers={**of_session("s1"), **hint(value)})
    ) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("value", [["10.9.8.7:80"], [], "", [1, 2], "127.0.0.1:1"])
async def test_case_5_a_subset_without_an_eligible_worker_is_refused(
    value: Any,
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_envoys(monkeypatch, subset_from_header("x-subset"))
    envoy = await start_envoy(picker.port)
    async with answered(
        client.post(envoy.url + CHAT, data=HELLO, headers={**of_session("s1"), **hint(value)})
    ) as answer:
        assert await refusal(answer) == (503, "no_endpoints", "1")
    assert worker.received == []
    assert picker.status.state.programs == {}


async def test_a_program_whose_worker_is_outside_the_subset_is_placed_anew(
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    other_worker: ScriptedWorker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_envoys(monkeypatch, subset_from_header("x-subset"))
    async with running_local_picker(snapshot(worker.endpoint, other_worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)
        for headers in ({}, hint([other_worker.endpoint]), {}):
            async with answered(
                client.post(envoy.url + CHAT, data=HELLO, headers={**of_session("s1"), **headers})
            ) as answer:
                assert answer.status == 200
        await picker.until_idle()
        assert picker.used == {"b/0": 110}
    assert (len(worker.received), len(other_worker.received)) == (1, 2)


async def test_case_6_a_request_without_a_body_is_refused_with_503_while_there_are_no_workers(
    start_envoy: StartEnvoy, client: aiohttp.ClientSession
) -> None:
    async with running_local_picker(snapshot()) as picker:
        envoy = await start_envoy(picker.port)
        async with answered(client.get(f"{envoy.url}/v1/models")) as answer:
            assert await refusal(answer) == (503, "no_endpoints", "1")


async def test_without_a_snapshot_everything_is_refused_with_503(
    start_envoy: StartEnvoy, client: aiohttp.ClientSession
) -> None:
    async with running_local_picker(None) as picker:
        envoy = await start_envoy(picker.port)
        async with answered(client.get(f"{envoy.url}/v1/models")) as answer:
            assert await refusal(answer) == (503, "no_snapshot", "1")
        async with answered(client.post(f"{envoy.url}/v1/messages", data=HELLO, headers=JSON)) as answer:
            assert answer.status == 503
            error = await answer.json()
            assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")


# Rows 7 to 9: the answer


def answers_only(mode: ext_proc.ProcessingMode) -> None:
    mode.request_header_mode = ext_proc.ProcessingModeHeaderSendMode.SKIP
    mode.request_body_mode = ext_proc.ProcessingModeBodySendMode.NONE
    mode.request_trailer_mode = ext_proc.ProcessingModeHeaderSendMode.SKIP


async def test_case_7_an_answer_whose_request_was_not_shown_passes_and_counts_for_nothing(
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_envoys(monkeypatch, processing_mode(answers_only), without_filter(HEADER_MUTATION))
    worker.answer = streamed([b'{"usage":', b'{"prompt_tokens":1}}'], JSON)
    envoy = await start_envoy(picker.port)
    destination = {"x-gateway-destination-endpoint": worker.endpoint}
    async with answered(
        client.post(envoy.url + CHAT, data=HELLO, headers={**of_session("s1"), **destination})
    ) as answer:
        assert answer.status == 200
        assert await answer.read() == b'{"usage":{"prompt_tokens":1}}'
    await picker.until(lambda each: each.server.open_streams == 0)
    assert picker.requests() == {}
    assert picker.status.state.programs == {}


async def test_case_7_what_another_filter_answers_ahead_of_the_picker_passes_and_counts_for_nothing(
    start_envoy: StartEnvoy, picker: LocalPicker, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = envoy_type.FractionalPercent(numerator=100)
    abort = fault.HttpFault(abort=fault.FaultAbort(http_status=401, percentage=always))
    change_envoys(monkeypatch, filter_ahead("envoy.filters.http.fault", abort))
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        assert answer.status == 401
        assert await answer.read() == b"fault filter abort"
    await picker.until(lambda each: each.server.open_streams == 0)
    assert picker.requests() == {}


async def test_case_8_a_streamed_answer_passes_chunk_by_chunk_and_its_usage_counts_once(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    last = asyncio.Event()
    worker.answer = streamed([b"data: {}\n\n"], then=last, rest=[event({"usage": USAGE})])
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        # The first event is here although the worker has not sent the next.
        assert await answer.content.readuntil(b"\n\n") == b"data: {}\n\n"
        last.set()
        assert await answer.read() == event({"usage": USAGE})
    await picker.until_idle()
    assert picker.requests() == {"completed": 1}
    assert picker.program("s1").tokens == 15
    assert picker.used == {"a/0": 115}


async def test_case_9_a_streamed_answer_with_trailers_completes_its_turn_once(
    start_envoy: StartEnvoy,
) -> None:
    async def answer_with_trailers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(HELLO))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"trailer: x-usage\r\n\r\n"
        )
        for chunk in (event({"usage": USAGE}), DONE):
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        writer.write(b"0\r\nx-usage: 15\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_with_trailers, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, running_local_picker(snapshot(f"{host}:{port}")) as picker:
        envoy = await start_envoy(picker.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        head += f"x-thunderagent-session-id: s1\r\ncontent-length: {len(HELLO)}\r\n\r\n"
        writer.write(head.encode() + HELLO)
        answer = await reader.readuntil(b"x-usage: 15\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        await picker.until_idle()
        assert picker.requests() == {"completed": 1}
        assert picker.program("s1").tokens == 15
    assert event({"usage": USAGE}) in answer
    assert DONE in answer


# Rows 10 and 11: what a client sends beside


@pytest.mark.parametrize("ahead", ["stripped", "shown to the picker"])
async def test_case_10_the_clients_own_destination_is_overwritten(
    ahead: str,
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if ahead != "stripped":
        change_envoys(monkeypatch, without_filter(HEADER_MUTATION))
    envoy = await start_envoy(picker.port)
    forged = [
        ("content-type", "application/json"),
        ("x-gateway-destination-endpoint", "1.1.1.1:666"),
        ("X-Gateway-Destination-Endpoint", "127.0.0.1:1"),
        ("x-gateway-destination-endpoint-served", "1.1.1.1:666"),
        ("x-gateway-destination-endpoint-subset", "1.1.1.1:666"),
    ]
    async with answered(client.post(envoy.url + CHAT, data=body_of(99_999), headers=forged)) as answer:
        assert answer.status == 200
    (received,) = worker.received
    assert received.headers.getall("x-gateway-destination-endpoint") == [worker.endpoint]
    assert received.body == body_of(99_999)


@pytest.mark.parametrize("length", [0, 1, 62_000, 62_001, 1_200_000, 5_000_000])
@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_case_11_bodies_of_any_size_arrive_and_return_as_they_were(
    length: int, framing: str, start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    # No two chunks are alike, so that none can be lost, doubled or swapped unseen.
    body = b"".join(index.to_bytes(4, "big") for index in range(length // 4 + 1))[:length]
    worker.answer = whole(body, {"content-type": "application/octet-stream"})
    async with running_local_picker(snapshot(worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)

        whole_body = io.BytesIO(body)
        sent: Any = stream_of(whole_body) if framing == "chunked" else whole_body
        headers = {"content-type": "application/octet-stream"}
        async with answered(client.post(f"{envoy.url}/v1/files", data=sent, headers=headers)) as answer:
            assert answer.status == 200
            assert await answer.read() == body
        await picker.until_idle()
        assert picker.requests() == {"completed": 1}
    assert worker.bodies == [body]


@pytest.mark.parametrize("length", [62_001, 1_200_000, 5_000_000])
async def test_case_11_a_large_prompt_is_read_and_arrives_as_it_was(
    length: int, start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    worker.answer = whole(b"{}", JSON)
    envoy = await start_envoy(picker.port)
    sent = io.BytesIO(body_of(length))
    async with answered(client.post(envoy.url + CHAT, data=sent, headers=of_session("s1"))) as answer:
        assert answer.status == 200
    await picker.until_idle()
    assert worker.bodies == [body_of(length)]
    # Prompt bytes at 4 bytes a token, the quotes among them, and one token for two bytes of answer.
    assert picker.program("s1").tokens == -(-(length - 23) // 4) + 1


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
@pytest.mark.parametrize(("length", "status"), [(100_000, 200), (100_001, 413), (5_000_000, 413)])
async def test_a_body_over_the_limit_is_refused_with_413(
    length: int,
    status: int,
    framing: str,
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    client: aiohttp.ClientSession,
) -> None:
    async with running_local_picker(snapshot(worker.endpoint), max_body_bytes=100_000) as picker:
        envoy = await start_envoy(picker.port)
        body = io.BytesIO(body_of(length))
        sent: Any = stream_of(body) if framing == "chunked" else body
        async with answered(client.post(envoy.url + CHAT, data=sent, headers=of_session("s1"))) as answer:
            assert answer.status == status
            if status == 413:
                assert await refusal(answer) == (413, "body_too_large", None)
        await picker.until_idle()
        await picker.until(lambda each: each.server.open_streams == 0)
        assert picker.requests() == {"refused": 1} if status == 413 else {"completed": 1}
    assert len(worker.received) == (status == 200)


# Rows 12 to 14: sessions


async def test_case_12_the_second_turn_of_a_session_is_held_until_the_first_has_ended(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    opened = asyncio.Event()
    worker.answer = when(opened, whole(chat_completion(7, 3), JSON))
    envoy = await start_envoy(picker.port)
    first = asyncio.ensure_future(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")))
    await worker.next_request()
    second = asyncio.ensure_future(client.post(envoy.url + CHAT, data=body_of(70_000), headers=of_session("s1")))
    await picker.until_held(1)
    assert len(worker.received) == 1
    assert picker.status.held_bytes == 70_000
    opened.set()
    for turn in (first, second):
        async with answered(turn) as answer:
            assert answer.status == 200
            await answer.read()
    await picker.until_idle()
    assert worker.bodies == [HELLO, body_of(70_000)]
    assert (picker.program("s1").steps, picker.program("s1").tokens) == (2, 10)
    assert picker.status.holds == picker.status.held_bytes == 0


async def test_case_13_a_client_that_leaves_while_held_leaves_its_program_as_it_was(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    # Room for the first program alone.
    async with running_local_picker(snapshot(worker.endpoint, capacity_tokens=300)) as picker:
        envoy = await start_envoy(picker.port)
        async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
            await answer.read()
        await picker.until_idle()
        before = picker.status.state
        assert before.used == {"a/0": 110}

        held = asyncio.ensure_future(client.post(envoy.url + CHAT, data=body_of(2_000), headers=of_session("s2")))
        await picker.until_held(1)
        assert picker.program("s2").lifecycle == "paused"
        held.cancel()
        await picker.until_held(0)
        await picker.until_idle()
        assert picker.status.state == before
        assert picker.requests() == {"completed": 1, "aborted": 1}
    assert len(worker.received) == 1


@pytest.mark.parametrize("seen", ["nothing", "headers", "half"])
async def test_case_13_a_client_that_leaves_while_it_is_answered_leaves_its_program_as_it_was(
    seen: str, start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        await answer.read()
    await picker.until_idle()
    before = picker.status.state
    await worker.next_request()

    never = asyncio.Event()
    chunks = {"nothing": [], "headers": [], "half": [event({"n": n}) for n in range(25)]}[seen]
    worker.answer = when(never, whole(b"", JSON)) if seen == "nothing" else streamed(chunks, then=never)
    leaving = asyncio.ensure_future(client.post(envoy.url + CHAT, data=body_of(8_000), headers=of_session("s1")))
    await worker.next_request()
    assert picker.program("s1").status == "reasoning"
    if seen == "nothing":
        leaving.cancel()
    else:
        answer = await leaving
        if seen == "half":
            await answer.content.readuntil(event({"n": 24}))
            # At 4.2 bytes a token, as the first turn taught; told of every 20 events at the latest.
            assert 1_920 <= picker.program("s1").tokens <= 1_925
        answer.close()
    await picker.until_idle()
    assert picker.status.state == before
    assert picker.requests() == {"completed": 1, "aborted": 1}
    await picker.until(lambda _: worker.left == 1)


async def test_case_13_a_turn_behind_a_client_that_leaves_goes_next(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    worker.answer = when(asyncio.Event(), whole(b"", JSON))
    running = asyncio.ensure_future(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")))
    await worker.next_request()
    leaves = asyncio.ensure_future(client.post(envoy.url + CHAT, data=body_of(101), headers=of_session("s1")))
    await picker.until_held(1)
    stays = asyncio.ensure_future(client.post(envoy.url + CHAT, data=body_of(102), headers=of_session("s1")))
    await picker.until_held(2)

    leaves.cancel()
    await picker.until_held(1)
    worker.answer = whole(chat_completion(7, 3), JSON)
    running.cancel()
    async with answered(stays) as answer:
        assert answer.status == 200
    await picker.until_idle()
    assert worker.bodies == [HELLO, body_of(102)]
    assert picker.program("s1").steps == 1


@pytest.mark.parametrize("status", [500, 429, 404, 302])
async def test_case_14_an_answer_that_is_no_success_passes_and_its_turn_is_rolled_back(
    status: int, start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        await answer.read()
    await picker.until_idle()
    before = picker.status.state

    worker.answer = whole(b'{"error":"no","usage":{"prompt_tokens":999}}', {**JSON, "x-worker": "w"}, status)
    sent = client.post(envoy.url + CHAT, data=body_of(8_000), headers=of_session("s1"), allow_redirects=False)
    async with answered(sent) as answer:
        assert answer.status == status
        assert answer.headers["x-worker"] == "w"
        assert await answer.read() == b'{"error":"no","usage":{"prompt_tokens":999}}'
        assert "x-thunderagent-refusal" not in answer.headers
    await picker.until_idle()
    assert picker.status.state == before
    assert picker.requests() == {"completed": 1, "aborted": 1}


# Beside the table


@pytest.mark.parametrize("status", [201, 204])
async def test_every_status_of_200_to_299_is_a_success(
    status: int, start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    worker.answer = whole(b"", JSON, status)
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        assert answer.status == status
    await picker.until_idle()
    assert picker.requests() == {"completed": 1}


async def test_the_final_turn_of_a_session_leaves_nothing_behind(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    for final in ("false", "true"):
        headers = of_session("s1", **{"x-thunderagent-session-final": final})
        async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=headers)) as answer:
            assert answer.status == 200
    await picker.until_idle()
    assert picker.status.state.programs == {}
    assert picker.used == {}
    assert "x-thunderagent-session-final" not in worker.received[1].headers


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_compressed_answer_passes_as_it_is_and_its_size_is_estimated(
    content_type: str,
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
) -> None:
    packed = gzip.compress(event({"usage": USAGE}) * 50, mtime=0)
    worker.answer = whole(packed, {"content-type": content_type, "content-encoding": "gzip"})
    envoy = await start_envoy(picker.port)
    async with answered(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1"))) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        assert await answer.read() == packed
    await picker.until_idle()
    # 35 bytes of messages make 9 tokens; the answer has as many as its bytes divided by 4.
    assert len(packed) == 100
    assert picker.program("s1").tokens == 9 + 25


async def test_a_compressed_request_passes_as_it_is(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    packed = gzip.compress(HELLO, mtime=0)
    envoy = await start_envoy(picker.port)
    headers = of_session("s1", **{"content-encoding": "gzip"})
    async with answered(client.post(envoy.url + CHAT, data=packed, headers=headers)) as answer:
        assert answer.status == 200
    assert worker.bodies == [packed]
    await picker.until_idle()
    assert picker.program("s1").steps == 1


async def test_tls_is_spoken_to_the_picker_without_any_setting(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    async with running_local_picker(snapshot(worker.endpoint), credentials=server_credentials()) as picker:
        envoy = await start_envoy(picker.port, tls=True)
        async with answered(client.post(envoy.url + CHAT, data=body_of(200_000), headers=of_session("s1"))) as answer:
            assert answer.status == 200
    assert worker.bodies == [body_of(200_000)]


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-dynamo-session-id": "d"}, "d"),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, "c/a"),
        ({"thread-id": "t", "x-session-id": "later"}, "t"),
        ({"x-thunderagent-session-id": "  ", "x-session-affinity": " o "}, "o"),
        ({}, "in-the-body"),
    ],
)
async def test_the_session_is_found_where_the_agent_puts_it(
    headers: dict[str, str],
    session: str,
    start_envoy: StartEnvoy,
    picker: LocalPicker,
    client: aiohttp.ClientSession,
) -> None:
    envoy = await start_envoy(picker.port)
    body = b'{"prompt":"p","extra_body":{"program_id":"in-the-body"}}'
    async with answered(
        client.post(f"{envoy.url}/v1/completions?x=1", data=body, headers={**JSON, **headers})
    ) as answer:
        assert answer.status == 200
    await picker.until_idle()
    assert list(picker.status.state.programs) == [session]


@pytest.mark.parametrize("value", ["s" * 257, "caf\u00e9 \u0085"])
async def test_a_session_that_cannot_be_a_name_is_refused_in_the_form_of_the_path(
    value: str, start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    async with answered(client.post(f"{envoy.url}/v1/messages", data=HELLO, headers=of_session(value))) as answer:
        assert answer.status == 400
        error = await answer.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert "x-thunderagent-session-id" in error["error"]["message"]
    assert worker.received == []


async def test_anthropic_usage_is_merged_over_the_events_of_a_stream(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 30, "cache_read_input_tokens": 70}}}
    delta = {"type": "message_delta", "usage": {"output_tokens": 9}}
    text = b": ping\r\n\r\nevent: message_start\r\ndata: " + json.dumps(start).encode() + b"\r\n\r\n" + event(delta)
    # One byte at a time: an event is split anywhere.
    worker.answer = streamed([text[index : index + 1] for index in range(len(text))], SSE)
    envoy = await start_envoy(picker.port)
    async with answered(client.post(f"{envoy.url}/v1/messages", data=HELLO, headers=of_session("s1"))) as answer:
        assert await answer.read() == text
    await picker.until_idle()
    assert picker.program("s1").tokens == 109


async def test_paths_methods_and_types_that_are_no_inference_pass_and_are_not_classified(
    start_envoy: StartEnvoy, worker: ScriptedWorker, picker: LocalPicker, client: aiohttp.ClientSession
) -> None:
    envoy = await start_envoy(picker.port)
    session = {"x-session-id": "s1"}
    async with answered(client.get(f"{envoy.url}/v1/models", headers=session)) as answer:
        assert answer.status == 200
    async with answered(client.post(f"{envoy.url}/v1/audio", data=b"no json", headers={**session, **JSON})) as answer:
        assert answer.status == 200
    async with answered(
        client.post(envoy.url + CHAT, data=b"no json", headers={**session, "content-type": "a/b"})
    ) as answer:
        assert answer.status == 200
    async with answered(client.head(f"{envoy.url}/health", headers=session)) as answer:
        assert answer.status == 200
    async with answered(client.delete(envoy.url + CHAT, headers={**session, **JSON})) as answer:
        assert answer.status == 200
    await picker.until_idle()
    assert picker.status.state.programs == {}
    assert picker.requests() == {"completed": 5}
    assert [each.method for each in worker.received] == ["GET", "POST", "POST", "HEAD", "DELETE"]


async def test_an_early_answer_of_the_worker_passes(start_envoy: StartEnvoy, client: aiohttp.ClientSession) -> None:
    """A worker that refuses by the headers alone, and never reads the body."""

    async def refuse_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(refuse_early, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, running_local_picker(snapshot(f"{host}:{port}")) as picker:
        envoy = await start_envoy(picker.port)
        async with answered(
            client.post(envoy.url + CHAT, data=io.BytesIO(body_of(5_000_000)), headers=of_session("s1"))
        ) as answer:
            assert answer.status == 413
            assert await answer.read() == b"no"
        await picker.until_idle()
        assert picker.status.state.programs == {}
