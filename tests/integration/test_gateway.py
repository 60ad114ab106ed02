"""The gateway's own promises, kept by a real Envoy between a client, a picker that decides nothing and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
from bare_picker import running_bare_picker

from support.echo_worker import EchoWorker, running_echo_worker
from thunderagent_epp.envoy_config import EnvoyOptions
from thunderagent_epp.extproc.tls import self_signed, server_credentials
from thunderagent_sim.envoy_process import EnvoyError, running_envoy

if TYPE_CHECKING:
    from conftest import StartEnvoy


@pytest.fixture
async def worker() -> AsyncIterator[EchoWorker]:
    async with running_echo_worker() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A loopback port that refuses connections: bound, so that nobody else gets it, but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def test_a_request_goes_to_the_worker_the_picker_names(
    start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession
) -> None:
    async with running_bare_picker(worker.endpoint) as picker_port:
        envoy = await start_envoy(picker_port)
        async with client.post(f"{envoy.url}/v1/chat/completions", data=b'{"model":"m"}') as answer:
            assert answer.status == 200
            assert await answer.read() == b'{"model":"m"}'
    (received,) = worker.received
    assert (received.method, received.path, received.body) == ("POST", "/v1/chat/completions", b'{"model":"m"}')


async def test_a_request_without_a_body_goes_too(
    start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession
) -> None:
    async with running_bare_picker(worker.endpoint) as picker_port:
        envoy = await start_envoy(picker_port)
        async with client.get(f"{envoy.url}/v1/models?limit=1") as answer:
            assert answer.status == 200
    assert [(each.method, each.path) for each in worker.received] == [("GET", "/v1/models?limit=1")]


async def test_the_clients_own_destination_reaches_neither_picker_nor_worker(
    start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession
) -> None:
    names: list[str] = []

    def note(message: Any) -> None:
        names.extend(header.key for header in message.request_headers.headers.headers)

    async with running_bare_picker(worker.endpoint, seen=note) as picker_port:
        envoy = await start_envoy(picker_port)
        forged = {
            "x-gateway-destination-endpoint": "127.0.0.1:1",
            "x-prefiller-host-port": "127.0.0.1:1",
            "session_id": "kept",
        }
        async with client.post(envoy.url, data=b"{}", headers=forged) as answer:
            assert answer.status == 200
    assert "x-gateway-destination-endpoint" not in names
    assert "session_id" in names
    (received,) = worker.received
    assert received.headers.getall("x-gateway-destination-endpoint") == [worker.endpoint]
    assert "x-prefiller-host-port" not in received.headers


async def test_the_picker_learns_who_served_and_the_client_does_not(
    start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession
) -> None:
    served: list[str] = []

    def note(message: Any) -> None:
        if message.WhichOneof("request") == "response_headers":
            metadata = message.metadata_context.filter_metadata["envoy.lb"]
            served.append(metadata["x-gateway-destination-endpoint-served"])

    async with running_bare_picker(worker.endpoint, seen=note) as picker_port:
        envoy = await start_envoy(picker_port)
        async with client.post(envoy.url, data=b"{}") as answer:
            assert "x-gateway-destination-endpoint-served" not in answer.headers
    assert served == [worker.endpoint]


@pytest.mark.parametrize("length", [0, 62_000, 62_001, 1_100_000, 20_000_000])
async def test_a_body_of_any_size_passes_unchanged_both_ways(
    length: int, start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession
) -> None:
    body = (b"0123456789" * (length // 10 + 1))[:length]
    async with running_bare_picker(worker.endpoint) as picker_port:
        envoy = await start_envoy(picker_port)
        async with client.post(envoy.url, data=io.BytesIO(body)) as answer:
            assert answer.status == 200
            assert await answer.read() == body
    assert [len(each.body) for each in worker.received] == [length]


async def test_trailers_pass_both_ways(start_envoy: StartEnvoy) -> None:
    arrived: list[bytes] = []

    async def answer_with_trailers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await reader.readuntil(b"0\r\n"))
        arrived.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-usage\r\n\r\n"
            b"5\r\nhello\r\n0\r\nx-usage: 7\r\n\r\n"
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_with_trailers, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    phases: list[str] = []
    async with (
        server,
        running_bare_picker(f"{host}:{port}", seen=lambda m: phases.append(m.WhichOneof("request"))) as p,
    ):
        envoy = await start_envoy(p)
        reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        writer.write(
            b"POST / HTTP/1.1\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-sum: 9\r\n\r\n"
        )
        answer = await reader.readuntil(b"x-usage: 7\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nhello\r\n" in answer
    assert b"abc" in arrived[0]
    assert arrived[1] == b"x-sum: 9\r\n\r\n"
    assert phases[0] == "request_headers"
    assert "request_trailers" in phases
    assert phases[-1] == "response_trailers"


GET = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(GET + b"x: a\x01b\r\n\r\n", 400, id="a control character in a header"),
        pytest.param(GET + b"x: " + b"a" * 100_000 + b"\r\n\r\n", 431, id="a header of 100 kB"),
        pytest.param(GET + b"".join(b"x%d: 1\r\n" % n for n in range(200)) + b"\r\n", 431, id="200 headers"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /a%00b HTTP/1.1\r\nhost: gateway\r\n\r\n", 400, id="a zero in the path"),
        pytest.param(b"no HTTP\r\n\r\n", 400, id="no HTTP"),
        pytest.param(b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n", 404, id="CONNECT"),
    ],
)
async def test_what_the_proxy_refuses_by_itself_is_answered_and_the_picker_is_not_asked(
    request_bytes: bytes, status: int, start_envoy: StartEnvoy, worker: EchoWorker
) -> None:
    asked: list[Any] = []
    async with running_bare_picker(worker.endpoint, seen=asked.append) as picker_port:
        envoy = await start_envoy(picker_port)
        reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        writer.write(request_bytes)
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert asked == []
    assert worker.received == []


async def test_http_1_0_is_served_with_and_without_a_host(start_envoy: StartEnvoy, worker: EchoWorker) -> None:
    async with running_bare_picker(worker.endpoint) as picker_port:
        envoy = await start_envoy(picker_port)
        for host in (b"host: gateway\r\n", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.0\r\n" + host + b"content-length: 2\r\n\r\n{}")
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\n{}")
    assert [(each.path, each.body) for each in worker.received] == [("/v1/chat/completions", b"{}")] * 2


async def test_without_a_picker_requests_are_refused_with_503(
    start_envoy: StartEnvoy, client: aiohttp.ClientSession
) -> None:
    with closed_port() as nobody:
        envoy = await start_envoy(nobody)
        async with client.post(envoy.url, data=b"{}") as answer:
            assert answer.status == 503


async def test_a_self_signed_picker_is_spoken_to_over_tls(
    start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession
) -> None:
    async with running_bare_picker(worker.endpoint, credentials=server_credentials()) as picker_port:
        envoy = await start_envoy(picker_port, tls=True)
        async with client.post(envoy.url, data=b"{}") as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("certified", "called", "status"),
    [
        ("127.0.0.1", None, 200),
        ("picker.example", "picker.example", 200),
        ("127.0.0.2", None, 503),
        ("picker.example", "other.example", 503),
    ],
)
async def test_a_verified_picker_must_have_a_certificate_for_the_name_it_is_called_by(
    certified: str,
    called: str | None,
    status: int,
    start_envoy: StartEnvoy,
    worker: EchoWorker,
    client: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    pair = self_signed([certified])
    authority = tmp_path / "ca.pem"
    authority.write_bytes(pair.certificate)
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    async with running_bare_picker(worker.endpoint, credentials=credentials) as picker_port:
        envoy = await start_envoy(picker_port, tls=True, picker_ca=authority, picker_server_name=called)
        async with client.post(envoy.url, data=b"{}") as answer:
            assert answer.status == status


async def test_a_picker_no_authority_vouches_for_is_not_spoken_to(
    start_envoy: StartEnvoy, worker: EchoWorker, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(self_signed(["127.0.0.1"]).certificate)
    async with running_bare_picker(worker.endpoint, credentials=server_credentials()) as picker_port:
        envoy = await start_envoy(picker_port, tls=True, picker_ca=authority)
        async with client.post(envoy.url, data=b"{}") as answer:
            assert answer.status == 503


async def test_a_worker_that_is_gone_is_a_503_at_once(start_envoy: StartEnvoy, client: aiohttp.ClientSession) -> None:
    with closed_port() as nobody:
        async with running_bare_picker(f"127.0.0.1:{nobody}") as picker_port:
            envoy = await start_envoy(picker_port)
            async with client.post(envoy.url, data=b"{}") as answer:
                assert answer.status == 503


async def test_a_configuration_envoy_cannot_run_is_told_in_its_own_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = EnvoyOptions(listen_address="127.0.0.1", listen_port=0, admin_port=taken.getsockname()[1])
        with pytest.raises(EnvoyError, match="Address already in use"):
            async with running_envoy(options):
                raise AssertionError("Envoy cannot have started")


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
async def test_envoy_ends_even_when_its_parent_is_killed() -> None:
    program = (
        "import asyncio\n"
        "from thunderagent_epp.envoy_config import EnvoyOptions\n"
        "from thunderagent_sim.envoy_process import running_envoy\n"
        "async def main():\n"
        "    options = EnvoyOptions(listen_address='127.0.0.1', listen_port=0)\n"
        "    async with running_envoy(options) as envoy:\n"
        "        print(envoy.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    envoy = os.pidfd_open(int(await parent.stdout.readline()))
    try:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
        ended = select.poll()
        ended.register(envoy, select.POLLIN)
        assert await asyncio.to_thread(ended.poll, 30_000)
    finally:
        os.close(envoy)
