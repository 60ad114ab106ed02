import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from thunderagent_operator.probes.http import Address, HttpFetch, ProbeError
from thunderagent_operator.probes.plan import METRICS, JsonDocument, MetricsText
from thunderagent_operator.telemetry import ProbeResult

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def worker(handler: Handler) -> AsyncIterator[Address]:
    """A worker that answers everything with one handler."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    server = TestServer(app, host="127.0.0.1", port=0)
    await server.start_server()
    try:
        assert server.port is not None
        yield Address("127.0.0.1", server.port)
    finally:
        await server.close()


@asynccontextmanager
async def raw_worker(answer: bytes) -> AsyncIterator[Address]:
    """A worker that sends these bytes to whatever is asked, and hangs up."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


async def text(_: web.Request) -> web.Response:
    return web.Response(text="x 1\n")


async def failure(address: Address, fetch: HttpFetch) -> ProbeError:
    with pytest.raises(ProbeError) as caught:
        await fetch(address, METRICS)
    return caught.value


def test_metrics_are_at_the_policys_place_and_documents_on_the_ranks_port() -> None:
    address = Address("10.0.0.1", 8000, metrics_path="/m?format=text", metrics_port=9400, scheme="https")
    assert str(address.url(METRICS)) == "https://10.0.0.1:9400/m?format=text"
    assert str(address.url(MetricsText("/prometheus/metrics"))) == "https://10.0.0.1:9400/prometheus/metrics"
    assert str(address.url(JsonDocument("/props"))) == "https://10.0.0.1:8000/props"
    assert str(Address("[fd00::1]", 8000).url(METRICS)) == "http://[fd00::1]:8000/metrics"


async def test_a_document_is_fetched_with_a_plain_question() -> None:
    asked: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(text="x 1\n")

    async with worker(handler) as address, HttpFetch() as fetch:
        assert await fetch(address, METRICS) == b"x 1\n"
    (request,) = asked
    assert request.path == "/metrics"
    assert request.headers["Accept"].startswith("text/plain;version=0.0.4")
    assert request.headers["Accept-Encoding"] == "identity"
    assert request.headers["User-Agent"].startswith("thunderagent-operator/")
    assert request.headers["Connection"] == "close"


@pytest.mark.parametrize("status", [204, 301, 400, 401, 404, 500, 503])
async def test_any_other_status_is_no_document(status: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "http://127.0.0.1:1/"} if status == 301 else {})

    async with worker(handler) as address, HttpFetch() as fetch:
        assert await fetch(address, METRICS) is None


async def test_a_body_is_read_up_to_its_bound() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1000)

    async with worker(handler) as address, HttpFetch(body_bytes_max=1000) as fetch:
        assert await fetch(address, METRICS) == b"x" * 1000
    async with worker(handler) as address, HttpFetch(body_bytes_max=999) as fetch:
        assert (await failure(address, fetch)).result is ProbeResult.TOO_LARGE


async def test_ten_megabytes_are_too_large_and_not_read_to_the_end() -> None:
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"vllm:x 1\n" * 11_000)
            sent += 1
        return response

    async with worker(handler) as address, HttpFetch() as fetch:
        assert (await failure(address, fetch)).result is ProbeResult.TOO_LARGE
    assert sent < 1000


async def test_a_worker_that_does_not_answer_is_given_up() -> None:
    never = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    async with worker(handler) as address, HttpFetch(timeout=aiohttp.ClientTimeout(total=0.05)) as fetch:
        assert (await failure(address, fetch)).result is ProbeResult.TIMEOUT
        never.set()


async def test_a_worker_that_stops_in_its_answer_is_given_up() -> None:
    never = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x 1\n")
        await never.wait()
        return response

    async with worker(handler) as address, HttpFetch(timeout=aiohttp.ClientTimeout(total=0.05)) as fetch:
        assert (await failure(address, fetch)).result is ProbeResult.TIMEOUT
        never.set()


async def test_a_port_nobody_listens_on_is_unreachable() -> None:
    async with worker(text) as address:
        pass
    async with HttpFetch() as fetch:
        error = await failure(address, fetch)
    assert error.result is ProbeResult.UNREACHABLE
    assert str(error).startswith(f"http://127.0.0.1:{address.port}/metrics: ")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx 1\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nx 1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_http_or_breaks_off_is_unreachable(answer: bytes) -> None:
    async with raw_worker(answer) as address, HttpFetch() as fetch:
        assert (await failure(address, fetch)).result is ProbeResult.UNREACHABLE


async def test_http_is_not_https() -> None:
    async with worker(text) as address, HttpFetch() as fetch:
        secure = Address(address.host, address.port, scheme="https")
        assert (await failure(secure, fetch)).result is ProbeResult.UNREACHABLE


async def test_a_compressed_body_is_not_unpacked() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=b"\x1f\x8b\x08", headers={"Content-Encoding": "gzip"})

    async with worker(handler) as address, HttpFetch() as fetch:
        assert await fetch(address, METRICS) == b"\x1f\x8b\x08"


async def test_a_fetch_can_be_cancelled() -> None:
    never = asyncio.Event()
    asked = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        asked.set()
        await never.wait()
        return web.Response()

    async with worker(handler) as address, HttpFetch() as fetch:
        running = asyncio.create_task(fetch(address, METRICS))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        never.set()
