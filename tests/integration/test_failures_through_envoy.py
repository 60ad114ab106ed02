"""What ends a request other than its answer: timeouts, limits, workers that fail; each rolls its program back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from support.envoy_changes import (
    Change,
    change_envoys,
    request_timeout,
    route_timeout,
    stream_duration,
    stream_idle_timeout,
)
from support.local_picker import running_local_picker, snapshot
from support.scripted_worker import (
    JSON,
    ScriptedWorker,
    chat_completion,
    running_scripted_worker,
    streamed,
    when,
    whole,
)

if TYPE_CHECKING:
    from conftest import StartEnvoy

CHAT = "/v1/chat/completions"
HELLO = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


def of_session(session: str) -> dict[str, str]:
    return {**JSON, "x-thunderagent-session-id": session}


def big(tokens: int) -> bytes:
    """A request of this many input tokens, at the 4 bytes a token that every model starts with."""
    return b'{"prompt":"' + b"x" * (4 * tokens - 2) + b'"}'


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with running_scripted_worker() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def finish_a_turn(client: aiohttp.ClientSession, url: str, session: str) -> None:
    async with client.post(url + CHAT, data=HELLO, headers=of_session(session)) as answer:
        assert answer.status == 200
        await answer.read()


# The proxy gives up


@pytest.mark.parametrize("limit", [stream_duration, stream_idle_timeout])
async def test_an_answer_of_the_proxys_own_while_held_ends_the_hold_and_rolls_back(
    limit: Callable[[float], Change],
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_envoys(monkeypatch, limit(0.3))
    async with running_local_picker(snapshot(worker.endpoint, capacity_tokens=500)) as picker:
        envoy = await start_envoy(picker.port)
        await finish_a_turn(client, envoy.url, "s1")
        await picker.until_idle()
        before = picker.status.state
        async with client.post(envoy.url + CHAT, data=big(400), headers=of_session("s2")) as answer:
            assert answer.status == 504
            assert "x-thunderagent-refusal" not in answer.headers
        await picker.until_held(0)
        await picker.until_idle()
        assert picker.status.state == before
        assert picker.requests() == {"completed": 1, "aborted": 1}
        await picker.until(lambda each: each.server.open_streams == 0)
    assert len(worker.received) == 1


async def test_a_request_that_never_comes_in_whole_is_ended_and_a_hold_and_a_stream_are_not(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_envoys(monkeypatch, request_timeout(0.3))
    finish = asyncio.Event()
    worker.answer = when(finish, whole(chat_completion(1, 1), JSON))
    async with running_local_picker(snapshot(worker.endpoint, capacity_tokens=500)) as picker:
        envoy = await start_envoy(picker.port)
        answered = asyncio.ensure_future(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")))
        await picker.until(lambda each: each.server.running_turns == 1)
        held = asyncio.ensure_future(client.post(envoy.url + CHAT, data=big(450), headers=of_session("s2")))
        await picker.until_held(1)
        # Sent last, so that the time of the others is over when its own is.
        reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: 99\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
        assert picker.status.holds == 1
        finish.set()
        async with await answered as answer:
            assert answer.status == 200
        picker.director.apply(snapshot(worker.endpoint, capacity_tokens=5000, id=2))
        async with await held as answer:
            assert answer.status == 200


async def test_the_routes_timeout_does_not_run_while_a_request_is_held(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_envoys(monkeypatch, route_timeout(0.1))
    of = snapshot(worker.endpoint, capacity_tokens=100, admission={"max_hold_seconds": 0.5})
    async with running_local_picker(of) as picker:
        envoy = await start_envoy(picker.port)
        async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")) as answer:
            assert answer.headers["x-thunderagent-refusal"] == "hold_timeout"


async def test_a_route_timeout_while_the_worker_computes_rolls_back(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_envoys(monkeypatch, route_timeout(0.3))
    worker.answer = when(asyncio.Event(), whole(b"", JSON))
    async with running_local_picker(snapshot(worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)
        async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")) as answer:
            assert answer.status == 504
        await picker.until_idle()
        assert picker.status.state.programs == {}
        assert picker.requests() == {"aborted": 1}


# The policy's limits


async def test_a_turn_held_longer_than_max_hold_is_refused_and_rolled_back(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    policy = {"max_hold_seconds": 0.1, "scheduler_interval_seconds": 2.5}
    async with running_local_picker(snapshot(worker.endpoint, capacity_tokens=500, admission=policy)) as picker:
        envoy = await start_envoy(picker.port)
        await finish_a_turn(client, envoy.url, "s1")
        await picker.until_idle()
        before = picker.status.state
        async with client.post(envoy.url + CHAT, data=big(400), headers=of_session("s2")) as answer:
            assert answer.status == 429
            assert answer.headers["x-thunderagent-refusal"] == "hold_timeout"
            assert answer.headers["retry-after"] == "3"
        assert picker.status.state == before
        assert picker.status.holds == picker.status.held_bytes == 0
        assert picker.requests() == {"completed": 1, "refused": 1}
    assert len(worker.received) == 1


async def test_a_second_turn_held_behind_the_first_longer_than_max_hold_is_refused_alone(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    opened = asyncio.Event()
    worker.answer = when(opened, whole(chat_completion(7, 3), JSON))
    async with running_local_picker(snapshot(worker.endpoint, admission={"max_hold_seconds": 0.1})) as picker:
        envoy = await start_envoy(picker.port)
        first = asyncio.ensure_future(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")))
        await worker.next_request()
        async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")) as answer:
            assert answer.status == 429
        opened.set()
        async with await first as answer:
            assert answer.status == 200
            await answer.read()
        await picker.until_idle()
        assert picker.program("s1").steps == 1


async def test_bodies_over_the_limit_of_held_bytes_are_refused_and_others_stay_held(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    of = snapshot(worker.endpoint, capacity_tokens=500)
    async with running_local_picker(of, max_held_bytes=len(big(450)) + 1) as picker:
        envoy = await start_envoy(picker.port)
        held = asyncio.ensure_future(client.post(envoy.url + CHAT, data=big(450), headers=of_session("s1")))
        await picker.until_held(1)
        async with client.post(envoy.url + CHAT, data=big(450), headers=of_session("s2")) as answer:
            assert answer.status == 429
            assert answer.headers["x-thunderagent-refusal"] == "hold_limit"
            assert answer.headers["retry-after"] == "1"
        assert list(picker.status.state.programs) == ["s1"]
        held.cancel()
        await picker.until_held(0)


async def test_requests_beyond_the_tracked_ones_are_refused(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    opened = asyncio.Event()
    worker.answer = when(opened, whole(chat_completion(7, 3), JSON))
    of = snapshot(worker.endpoint, admission={"max_tracked_requests": 2})
    async with running_local_picker(of) as picker:
        envoy = await start_envoy(picker.port)
        running = []
        for session in ("s1", "s2"):
            sent = client.post(envoy.url + CHAT, data=HELLO, headers=of_session(session))
            running.append(asyncio.ensure_future(sent))
            await worker.next_request()
        async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s3")) as answer:
            assert answer.status == 429
            assert answer.headers["x-thunderagent-refusal"] == "request_limit"
            assert answer.headers["retry-after"] == "1"
        opened.set()
        for each in running:
            async with await each as answer:
                await answer.read()
        await picker.until_idle()
        # There is room for two programs, and both are idle now: the one idle longest goes.
        await finish_a_turn(client, envoy.url, "s3")
        assert len(picker.status.state.programs) == 2
        assert picker.program("s3").steps == 1


# The worker fails


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A loopback port that refuses connections: bound, so that nobody else gets it, but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def test_a_worker_that_refuses_the_connection_rolls_its_turn_back(
    start_envoy: StartEnvoy, client: aiohttp.ClientSession
) -> None:
    with closed_port() as nobody:
        async with running_local_picker(snapshot(f"127.0.0.1:{nobody}")) as picker:
            envoy = await start_envoy(picker.port)
            async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")) as answer:
                assert answer.status == 503
                assert "x-thunderagent-refusal" not in answer.headers
            await picker.until_idle()
            assert picker.status.state.programs == {}
            assert picker.used == {}
            assert picker.requests() == {"aborted": 1}


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)

DEATHS = {
    "before any answer": b"",
    "after its headers": HEAD,
    "after an event": HEAD + CHUNK,
    "inside a chunk": HEAD + CHUNK[:-8],
    "with nonsense": b"\x00\x01nonsense\r\n\r\n",
    "with nonsense for a chunk": HEAD + CHUNK + b"zz\r\n",
}


@pytest.mark.parametrize("how", ["closes", "resets"])
@pytest.mark.parametrize("when_it_dies", DEATHS)
async def test_a_worker_that_dies_rolls_its_turn_back(
    when_it_dies: str, how: str, start_envoy: StartEnvoy, client: aiohttp.ClientSession
) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(HELLO))
        writer.write(DEATHS[when_it_dies])
        await writer.drain()
        if how == "resets":
            end_with_a_reset(writer)
        writer.close()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, running_local_picker(snapshot(f"{host}:{port}")) as picker:
        envoy = await start_envoy(picker.port)
        try:
            async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")) as answer:
                status = answer.status
                await answer.read()
        except aiohttp.ClientPayloadError:
            assert status == 200  # cut off in its body, as it must be
        else:
            assert status in (502, 503)
        await picker.until_idle()
        assert picker.status.state.programs == {}
        assert picker.used == {}
        assert picker.requests() == {"aborted": 1}
        await picker.until(lambda each: each.server.open_streams == 0)


def end_with_a_reset(writer: asyncio.StreamWriter) -> None:
    raw: Any = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def test_an_answer_without_length_that_ends_with_its_connection_is_complete(
    start_envoy: StartEnvoy, client: aiohttp.ClientSession
) -> None:
    body = chat_completion(7, 3)

    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_and_close, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, running_local_picker(snapshot(f"{host}:{port}")) as picker:
        envoy = await start_envoy(picker.port)
        async with client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")) as answer:
            assert await answer.read() == body
        await picker.until_idle()
        assert picker.program("s1").tokens == 10


async def test_a_turn_behind_one_that_failed_is_released(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    opened = asyncio.Event()
    worker.answer = when(opened, whole(b"{}", JSON, 500))
    async with running_local_picker(snapshot(worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)
        failing = asyncio.ensure_future(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")))
        await worker.next_request()
        behind = asyncio.ensure_future(client.post(envoy.url + CHAT, data=HELLO, headers=of_session("s1")))
        await picker.until_held(1)
        worker.answer = whole(chat_completion(7, 3), JSON)
        opened.set()
        async with await failing as answer:
            assert answer.status == 500
        async with await behind as answer:
            assert answer.status == 200
            await answer.read()
        await picker.until_idle()
        assert (picker.program("s1").steps, picker.program("s1").tokens) == (1, 10)


# The client fails


@pytest.mark.parametrize("sent", ["headers alone", "half of the body"])
async def test_a_client_that_leaves_before_its_request_is_whole_leaves_nothing(
    sent: str, start_envoy: StartEnvoy, worker: ScriptedWorker
) -> None:
    async with running_local_picker(snapshot(worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)
        _, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        writer.write(head.encode() + (b"" if sent == "headers alone" else HELLO))
        await picker.until(lambda each: each.server.open_streams == 1)
        writer.close()
        await writer.wait_closed()
        await picker.until(lambda each: each.server.open_streams == 0)
        assert picker.status.state.programs == {}
        assert picker.requests() == {}
    assert worker.received == []


async def test_a_client_that_leaves_on_the_last_event_completes_its_turn(
    start_envoy: StartEnvoy, worker: ScriptedWorker
) -> None:
    """As OpenAI's own client does: it closes the connection on ``[DONE]``, whose chunk does not end the body."""
    last = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    worker.answer = streamed([last], then=asyncio.Event())
    async with running_local_picker(snapshot(worker.endpoint)) as picker:
        envoy = await start_envoy(picker.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\nx-session-id: s1\r\n"
        writer.write(f"{head}content-length: {len(HELLO)}\r\n\r\n".encode() + HELLO)
        await reader.readuntil(last)
        writer.close()
        await writer.wait_closed()
        await picker.until_idle()
        assert picker.requests() == {"completed": 1}
        assert picker.program("s1").tokens == 11


ENDS: dict[str, Callable[[asyncio.StreamWriter], None]] = {"closes": lambda _: None, "resets": end_with_a_reset}


@pytest.mark.parametrize("how", ENDS)
async def test_a_client_that_goes_without_a_word_while_held_ends_its_hold(
    how: str, start_envoy: StartEnvoy, worker: ScriptedWorker
) -> None:
    async with running_local_picker(snapshot(worker.endpoint, capacity_tokens=150)) as picker:
        envoy = await start_envoy(picker.port)
        _, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        body = big(200)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\nx-session-id: s\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await picker.until_held(1)
        ENDS[how](writer)
        writer.close()
        await writer.wait_closed()
        await picker.until_held(0)
        await picker.until_idle()
        assert picker.status.state.programs == {}


async def test_a_hundred_clients_that_come_and_go_while_held_leave_nothing(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession
) -> None:
    async with running_local_picker(snapshot(worker.endpoint, capacity_tokens=150)) as picker:
        envoy = await start_envoy(picker.port)
        held = [
            asyncio.ensure_future(client.post(envoy.url + CHAT, data=big(200), headers=of_session(f"s{number % 20}")))
            for number in range(100)
        ]
        await picker.until_held(100)
        assert len(picker.status.state.programs) == 20
        for request in held:
            request.cancel()
        await picker.until_held(0)
        await picker.until_idle()
        assert picker.status.state.programs == {}
        assert picker.used == {}
        assert picker.requests() == {"aborted": 100}
