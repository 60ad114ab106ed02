"""Filters that send the picker less, or otherwise, than this project's own configuration: a real Envoy in each mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc

from support.echo_worker import EchoWorker, running_echo_worker
from thunderagent_epp import envoy_config
from thunderagent_epp.extproc.director import Director
from thunderagent_epp.extproc.server import Server
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from conftest import StartEnvoy

Body = ext_proc.ProcessingModeBodySendMode
Header = ext_proc.ProcessingModeHeaderSendMode
SECONDS = 10

HEADERS = {"content-type": "application/json", "x-thunderagent-session-id": "s1"}


def body_of(size: int) -> bytes:
    return json.dumps({"model": "m", "program_id": "p", "prompt": "x" * size}).encode()


def snapshot(endpoint: str, strip: tuple[str, ...] = ()) -> Snapshot:
    workers = (Worker(WorkerRank("w"), endpoint, capacity_tokens=1_000_000),)
    return Snapshot(1, CapacitySnapshot(workers), AdmissionPolicy(), RequestPolicy(strip_body_fields=strip))


class Picker:
    def __init__(self, server: Server, port: int, director: Director) -> None:
        self.server = server
        self.port = port
        self.director = director

    async def no_turn_runs(self) -> None:
        async with asyncio.timeout(SECONDS):
            while self.server.running_turns:  # noqa: ASYNC110 - the server is not to be changed for its tests
                await asyncio.sleep(0.01)

    @property
    def program(self) -> Any:
        return self.director.status().state.programs["s1"]

    def requests(self, outcome: str) -> float | None:
        labels = {"path": "/v1/completions", "outcome": outcome}
        return self.server.metrics.registry.get_sample_value("thunderagent_requests_total", labels)


@asynccontextmanager
async def running_picker(of: Snapshot) -> AsyncIterator[Picker]:
    metrics = Metrics()
    director = Director(metrics)
    director.apply(of)
    server = Server(director, metrics)
    port = await server.start("127.0.0.1", 0, None)
    try:
        yield Picker(server, port, director)
    finally:
        await server.stop(0)


@pytest.fixture
async def worker() -> AsyncIterator[EchoWorker]:
    async with running_echo_worker() as running:
        yield running


def use_mode(
    monkeypatch: pytest.MonkeyPatch, request: Body, response: Body, *, trailers: bool = False, waiting: bool = True
) -> None:
    own = envoy_config._ext_proc
    trailer_mode = Header.SEND if trailers else Header.SKIP

    def changed(options: envoy_config.EnvoyOptions) -> ext_proc.ExternalProcessor:
        mode = ext_proc.ProcessingMode(
            request_header_mode=Header.SEND,
            response_header_mode=Header.SEND,
            request_body_mode=request,
            response_body_mode=response,
            request_trailer_mode=Header.SEND if request is Body.FULL_DUPLEX_STREAMED else trailer_mode,
            response_trailer_mode=Header.SEND if response is Body.FULL_DUPLEX_STREAMED else trailer_mode,
        )
        return replace(own(options), processing_mode=mode, send_body_without_waiting_for_header_response=not waiting)

    monkeypatch.setattr(envoy_config, "_ext_proc", changed)


REQUEST_MODES = {
    "full-duplex": (Body.FULL_DUPLEX_STREAMED, True),
    "buffered": (Body.BUFFERED, True),
    "partly buffered": (Body.BUFFERED_PARTIAL, True),
    "streamed": (Body.STREAMED, True),
    "streamed without waiting": (Body.STREAMED, False),
    "none": (Body.NONE, True),
}


@pytest.mark.parametrize("size", [0, 300_000])
@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("name", REQUEST_MODES)
async def test_a_request_reaches_its_worker_and_completes_in_every_request_body_mode(
    name: str, trailers: bool, size: int, start_envoy: StartEnvoy, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, waiting = REQUEST_MODES[name]
    use_mode(monkeypatch, request, Body.FULL_DUPLEX_STREAMED, trailers=trailers, waiting=waiting)
    async with running_picker(snapshot(worker.endpoint)) as picker, aiohttp.ClientSession() as client:
        envoy = await start_envoy(picker.port)
        async with client.post(f"{envoy.url}/v1/completions", data=body_of(size), headers=HEADERS) as answer:
            assert answer.status == 200
            assert await answer.read() == body_of(size)
        await picker.no_turn_runs()
        assert picker.requests("completed") == 1
        assert picker.program.steps == 1
    (received,) = worker.received
    assert received.body == body_of(size)
    assert "x-thunderagent-session-id" not in received.headers


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("response", [Body.NONE, Body.STREAMED, Body.BUFFERED])
async def test_an_answer_passes_and_completes_its_turn_in_every_response_body_mode(
    response: Body, trailers: bool, start_envoy: StartEnvoy, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mode(monkeypatch, Body.FULL_DUPLEX_STREAMED, response, trailers=trailers)
    async with running_picker(snapshot(worker.endpoint)) as picker, aiohttp.ClientSession() as client:
        envoy = await start_envoy(picker.port)
        async with client.post(f"{envoy.url}/v1/completions", data=body_of(300_000), headers=HEADERS) as answer:
            assert await answer.read() == body_of(300_000)
        await picker.no_turn_runs()
        assert picker.requests("completed") == 1
        assert picker.program.status == "acting"


@pytest.mark.parametrize("name", ["full-duplex", "buffered", "streamed without waiting"])
async def test_fields_are_taken_out_of_a_body_wherever_it_is_shown(
    name: str, start_envoy: StartEnvoy, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, waiting = REQUEST_MODES[name]
    use_mode(monkeypatch, request, Body.FULL_DUPLEX_STREAMED, waiting=waiting)
    async with running_picker(snapshot(worker.endpoint, ("program_id",))) as picker, aiohttp.ClientSession() as client:
        envoy = await start_envoy(picker.port)
        async with client.post(f"{envoy.url}/v1/completions", data=body_of(300_000), headers=HEADERS) as answer:
            assert answer.status == 200
    assert [json.loads(each.body).keys() for each in worker.received] == [{"model", "prompt"}]


@pytest.mark.parametrize("name", ["full-duplex", "buffered", "streamed without waiting"])
async def test_a_body_that_is_no_json_is_refused_wherever_it_is_shown(
    name: str, start_envoy: StartEnvoy, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, waiting = REQUEST_MODES[name]
    use_mode(monkeypatch, request, Body.FULL_DUPLEX_STREAMED, waiting=waiting)
    async with running_picker(snapshot(worker.endpoint)) as picker, aiohttp.ClientSession() as client:
        envoy = await start_envoy(picker.port)
        async with client.post(f"{envoy.url}/v1/completions", data=b"no json", headers=HEADERS) as answer:
            assert answer.status == 400
            assert answer.headers["x-thunderagent-refusal"] == "invalid_request"
    assert worker.received == []
