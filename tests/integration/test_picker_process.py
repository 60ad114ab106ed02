"""The picker as a process behind a real Envoy: its policy file, its signals, its end and its neighbours' ends."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.picker_process import (
    failing_picker,
    remove,
    replace,
    running_picker_process,
    write_policy,
)
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
EVENT = b'data: {"choices":[]}\n\n'
LAST_EVENT = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"

# Ticks come often, so that what a snapshot changes shows soon.
QUICK = {"schedulerInterval": "50ms"}
NO_DRAIN_DELAY = ("--drain-delay", "0")


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
async def other_worker() -> AsyncIterator[ScriptedWorker]:
    async with running_scripted_worker() as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


class Agents:
    """Clients of one gateway."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url + CHAT

    async def turn(self, session: str, body: bytes = HELLO) -> tuple[int, bytes]:
        """Send a turn and read its answer."""
        async with self._client.post(self._url, data=body, headers=of_session(session)) as answer:
            return answer.status, await answer.read()

    def start(self, session: str, body: bytes = HELLO) -> asyncio.Task[tuple[int, bytes]]:
        return asyncio.create_task(self.turn(session, body))

    async def refused(self, session: str, body: bytes = HELLO) -> tuple[int, str | None]:
        async with self._client.post(self._url, data=body, headers=of_session(session)) as answer:
            return answer.status, answer.headers.get("x-thunderagent-refusal")


# The policy file


async def test_a_worker_that_vanishes_frees_its_programs_and_gets_no_request(
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    other_worker: ScriptedWorker,
    client: aiohttp.ClientSession,
    policy_file: Path,
) -> None:
    write_policy(policy_file, {"a": worker.endpoint, "b": other_worker.endpoint}, 1_000, **QUICK)
    async with running_picker_process(policy_file) as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        assert (await agents.turn("s1"))[0] == 200
        assert (await agents.turn("s2"))[0] == 200
        assert (await picker.state())["used"] == {"a/0": 110, "b/0": 110}

        # A turn that runs on the worker when it vanishes goes on to its end.
        finish = asyncio.Event()
        other_worker.answer = streamed([EVENT], then=finish, rest=[LAST_EVENT])
        await other_worker.next_request()
        running = agents.start("s2")
        await other_worker.next_request()

        write_policy(policy_file, {"a": worker.endpoint}, 1_000, **QUICK)
        state = await picker.until(lambda now: "b/0" not in now["used"])
        assert state["snapshot"]["id"] == 2
        assert [each["worker"] for each in state["workers"]] == ["a"]
        assert state["programs"]["s2"]["worker"] is None
        finish.set()
        assert await running == (200, EVENT + LAST_EVENT)

        for session in ("s1", "s2", "s3"):
            assert (await agents.turn(session))[0] == 200
        assert (await picker.state())["programs"]["s2"]["worker"] == "a"
        assert (await picker.metrics()).value("picks_total", worker="b", rank="0") is None
    assert len(other_worker.received) == 2
    assert len(worker.received) == 4


async def test_a_worker_that_appears_gets_the_work_that_waits(
    start_envoy: StartEnvoy,
    worker: ScriptedWorker,
    other_worker: ScriptedWorker,
    client: aiohttp.ClientSession,
    policy_file: Path,
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 600, **QUICK)
    async with running_picker_process(policy_file) as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        opened = asyncio.Event()
        worker.answer = when(opened, whole(chat_completion(7, 3), JSON))
        running = agents.start("s1", big(400))
        await worker.next_request()
        waiting = agents.start("s2", big(400))
        await picker.until_held(1)

        write_policy(policy_file, {"a": worker.endpoint, "b": other_worker.endpoint}, 600, **QUICK)
        assert (await waiting)[0] == 200
        assert other_worker.bodies == [big(400)]
        opened.set()
        assert (await running)[0] == 200
        metrics = await picker.metrics()
        assert metrics.value("resumes_total", forced="false") == 1
        assert metrics.value("policy_file_reloads_total", result="applied") == 1


async def test_a_bad_edit_changes_nothing_and_says_so(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 1_000, pauseTarget=0.7)
    async with running_picker_process(policy_file) as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        before = await picker.state()

        replace(policy_file, "admission:\n  pauseTarget: 1.5\n  pauseTreshold: 0.9\nworkers: []\n")
        await picker.logged(
            "policy file refused; the last good one stays",
            problem=f"{policy_file}:2: admission.pauseTarget: must be between 0 and 1, not 1.5",
        )
        await picker.logged(
            "policy file refused; the last good one stays",
            problem=f"{policy_file}:3: admission.pauseTreshold: unknown field; did you mean pauseThreshold?",
        )
        assert (await picker.get("/readyz"))[0] == 200
        metrics = await picker.metrics()
        assert metrics.value("policy_file_reloads_total", result="refused") == 1
        assert metrics.value("policy_file_last_reload_applied") == 0
        after = await picker.state()
        for part in ("policy", "workers", "programs"):
            assert after[part] == before[part]
        assert after["snapshot"]["id"] == before["snapshot"]["id"] == 1
        assert (await agents.turn("s1"))[0] == 200

        write_policy(policy_file, {"a": worker.endpoint}, 1_000, pauseTarget=0.6)
        await picker.logged("policy file is good again")
        state = await picker.until(lambda now: now["snapshot"]["id"] == 2)
        assert state["policy"]["pause_target"] == 0.6
        assert list(state["programs"]) == ["s1"]
        assert (await picker.metrics()).value("policy_file_last_reload_applied") == 1

        remove(policy_file)
        await picker.logged(
            "policy file refused; the last good one stays",
            problem=f"{policy_file}: cannot be read: No such file or directory",
        )
        assert (await agents.turn("s1"))[0] == 200


# Signals


async def test_on_sigterm_holds_are_refused_and_running_answers_are_finished(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 600)
    async with running_picker_process(policy_file, *NO_DRAIN_DELAY) as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        finish = asyncio.Event()
        worker.answer = streamed([EVENT], then=finish, rest=[LAST_EVENT])
        running = agents.start("s1", big(400))
        await worker.next_request()
        behind = asyncio.create_task(agents.refused("s1"))
        elsewhere = asyncio.create_task(agents.refused("s2", big(400)))
        await picker.until_held(2)

        picker.signal(signal.SIGTERM)
        assert await behind == (503, "draining")
        assert await elsewhere == (503, "draining")
        assert await agents.refused("s3") == (503, "draining")
        assert await picker.get("/readyz") == (503, {"ready": False, "reason": "draining"})
        state = await picker.state()
        assert list(state["programs"]) == ["s1"]
        assert (state["tracked"], state["holds"], state["held_bytes"]) == (1, 0, 0)

        finish.set()
        assert await running == (200, EVENT + LAST_EVENT)
        assert await picker.exit_status() == 0
    assert [line["event"] for line in picker.log][-2:] == ["draining", "stopped"]
    assert [line for line in picker.log if line["level"] not in ("info",)] == []


async def test_requests_are_served_while_the_drain_delay_runs_and_a_second_signal_ends_at_once(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 1_000)
    async with running_picker_process(policy_file, "--drain-delay", "3600") as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        worker.answer = streamed([EVENT], then=asyncio.Event())
        running = agents.start("s1", big(400))
        await worker.next_request()
        held = asyncio.create_task(agents.refused("s1"))
        await picker.until_held(1)

        picker.signal(signal.SIGTERM)
        await picker.until_status("/readyz", 503)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.health_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(service="readiness"))).status == NOT_SERVING
            assert (await health.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == SERVING
        worker.answer = whole(chat_completion(7, 3), JSON)
        assert (await agents.turn("s2"))[0] == 200
        assert (await picker.state())["holds"] == 1

        picker.signal(signal.SIGINT)
        assert await picker.exit_status() == 0
        with pytest.raises(aiohttp.ClientPayloadError):
            await running
        assert (await held)[0] == 503


async def test_an_answer_that_outlasts_the_drain_timeout_is_cut_off(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint})
    async with running_picker_process(policy_file, *NO_DRAIN_DELAY, "--drain-timeout", "0.1") as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        worker.answer = streamed([EVENT], then=asyncio.Event())
        running = agents.start("s1")
        await worker.next_request()
        picker.signal(signal.SIGTERM)
        assert await picker.exit_status() == 0
        with pytest.raises(aiohttp.ClientPayloadError):
            await running
    assert (await picker.logged("drain_timed_out"))["running_turns"] == 1


# Killed


async def test_a_killed_picker_leaves_no_client_waiting_and_the_next_one_serves(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 600)
    async with running_picker_process(policy_file) as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        worker.answer = streamed([EVENT], then=asyncio.Event())
        running = agents.start("s1", big(400))
        await worker.next_request()
        held = [asyncio.create_task(agents.refused(f"h{number % 4}", big(400))) for number in range(20)]
        await picker.until_held(20)
        picker.signal(signal.SIGKILL)
        assert await picker.exit_status() == -signal.SIGKILL
        # Envoy's own word: there is nobody to say more.
        assert await asyncio.gather(*held) == [(503, None)] * 20
        with pytest.raises(aiohttp.ClientPayloadError):
            await running
        assert await agents.refused("s1") == (503, None)
    async with running_picker_process(policy_file, "--grpc-port", str(picker.grpc_port)) as again:
        worker.answer = whole(chat_completion(7, 3), JSON)
        assert (await agents.turn("s1"))[0] == 200
        assert (await again.state())["programs"]["s1"]["steps"] == 1


async def test_a_killed_envoy_has_everything_rolled_back(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 900)
    async with running_picker_process(policy_file) as picker:
        envoy = await start_envoy(picker.grpc_port)
        agents = Agents(client, envoy.url)
        assert (await agents.turn("s0"))[0] == 200
        before = await picker.state()
        await worker.next_request()

        worker.answer = streamed([EVENT], then=asyncio.Event())
        sent = [agents.start("s1", big(300)), agents.start("s0", big(300))]
        for _ in sent:
            await worker.next_request()
        sent += [agents.start(f"h{number % 4}", big(400)) for number in range(20)]
        await picker.until_held(20)
        os.kill(envoy.pid, signal.SIGKILL)
        for each in await asyncio.gather(*sent, return_exceptions=True):
            assert isinstance(each, aiohttp.ClientError)

        state = await picker.until(lambda now: now["tracked"] == 0)
        assert (state["used"], state["programs"]) == (before["used"], before["programs"])
        assert (state["holds"], state["held_bytes"], state["waiting"]) == (0, 0, [])
        metrics = await picker.metrics()
        assert metrics.value("requests_total", path=CHAT, outcome="aborted") == 22
        assert metrics.value("open_streams") == 0
        # Another Envoy, another connection: nothing of the old one is in the way.
        worker.answer = whole(chat_completion(7, 3), JSON)
        assert (await Agents(client, (await start_envoy(picker.grpc_port)).url).turn("s0"))[0] == 200


# What it says of itself


async def health_of(channel: grpc.aio.Channel) -> dict[str, object]:
    stub = health_pb2_grpc.HealthStub(channel)
    found: dict[str, object] = {}
    for service in ("", "readiness", "liveness", "inference-extension", EXT_PROC, "nobody"):
        try:
            found[service] = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
        except grpc.aio.AioRpcError as error:
            found[service] = error.code()
    return found


async def test_health_metrics_and_state_are_told_on_their_ports_and_tls_is_the_default(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint})
    async with running_picker_process(policy_file, plaintext=False) as picker:
        listening = await picker.logged("listening")
        assert listening["tls"] is True
        agents = Agents(client, (await start_envoy(picker.grpc_port, tls=True)).url)
        assert (await agents.turn("s1"))[0] == 200

        healthy = {
            **dict.fromkeys(("", "readiness", "liveness", "inference-extension", EXT_PROC), SERVING),
            "nobody": grpc.StatusCode.NOT_FOUND,
        }
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.health_port}") as channel:
            assert await health_of(channel) == healthy
        certificate = await asyncio.to_thread(served_certificate, picker.grpc_port)
        credentials = grpc.ssl_channel_credentials(certificate)
        async with grpc.aio.secure_channel(f"localhost:{picker.grpc_port}", credentials) as channel:
            assert await health_of(channel) == healthy
            listed = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listed]))
            (answer,) = [each async for each in call]
            assert EXT_PROC in {each.name for each in answer.list_services_response.service}

        assert await picker.get("/healthz") == (200, {"status": "ok"})
        assert await picker.get("/readyz") == (200, {"ready": True, "reason": "ok"})
        state = await picker.state()
        assert state["workers"] == [
            {
                "worker": "a",
                "rank": 0,
                "endpoint": worker.endpoint,
                "role": "prefill-decode",
                "live": True,
                "capacity_tokens": None,
                "used_tokens": 110,
            }
        ]
        assert state["programs"] == {
            "s1": {
                "status": "acting",
                "lifecycle": "active",
                "worker": "a",
                "rank": 0,
                "tokens": 10,
                "steps": 1,
                "marked": False,
            }
        }
        metrics = await picker.metrics()
        assert metrics.value("requests_total", path=CHAT, outcome="completed") == 1
        assert metrics.value("picks_total", worker="a", rank="0") == 1
        assert metrics.value("bytes_per_token", model="m") == pytest.approx(4.2)
        assert metrics.value("ready") == 1
        assert metrics.value("processing_duration_seconds_count") == 1


def served_certificate(port: int) -> bytes:
    return ssl.get_server_certificate(("127.0.0.1", port)).encode()


async def test_session_ids_are_not_logged_as_given_above_debug(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    secret = "very-secret-session"
    write_policy(policy_file, {"a": worker.endpoint}, 600, resumeTimeout="100ms", **QUICK)
    async with running_picker_process(policy_file, "--log-level", "info") as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        assert (await agents.turn(secret))[0] == 200
        # Held over the resume timeout: forced, which is logged as a warning.
        assert (await agents.turn(f"{secret}-2", big(900)))[0] == 200
        assert (await agents.refused(secret * 20))[0] == 400
        await picker.logged("resumes forced", level="warning", programs=1)
        # A stream that makes no sense is logged too.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
            process = channel.stream_stream(f"/{EXT_PROC}/Process")
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [each async for each in process(iter([b"\xff" + secret.encode()]))]
        picker.signal(signal.SIGTERM)
        picker.signal(signal.SIGTERM)
        await picker.exit_status()
    assert [line for line in picker.raw_log if secret in line] == []


async def test_session_ids_are_logged_as_given_at_debug_for_the_part_that_was_raised(
    start_envoy: StartEnvoy, worker: ScriptedWorker, client: aiohttp.ClientSession, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": worker.endpoint}, 600)
    async with running_picker_process(policy_file, "--log-level", "info,scheduling=debug") as picker:
        agents = Agents(client, (await start_envoy(picker.grpc_port)).url)
        assert (await agents.turn("s1"))[0] == 200
        assert (await picker.logged("ended"))["session"] == "s1"
    assert {line["logger"] for line in picker.log if line["level"] == "debug"} == {"scheduling"}
    assert not any(hashlib.sha256(b"s1").hexdigest()[:12] in line for line in picker.raw_log)


# What it cannot start with


PORTS = ("--grpc-port", "--health-port", "--http-port")


async def test_a_port_that_is_taken_is_told_in_one_line_with_exit_status_1(policy_file: Path) -> None:
    write_policy(policy_file, {"a": "127.0.0.1:1"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def on_the_port(option: str) -> tuple[str, ...]:
            free = (word for other in PORTS if other != option for word in (other, "0"))
            return ("--policy-file", str(policy_file), "--host", "127.0.0.1", option, str(port), *free)

        ends = await asyncio.gather(*(failing_picker(*on_the_port(option)) for option in PORTS))
    assert ends == [
        (1, [f"thunderagent: {option}: cannot listen on 127.0.0.1:{port}: Address already in use"]) for option in PORTS
    ]


@pytest.mark.parametrize("host", ["nonsense.invalid", "192.0.2.1"])
async def test_a_host_that_is_not_this_machines_is_told_in_one_line_with_exit_status_1(
    host: str, policy_file: Path
) -> None:
    write_policy(policy_file, {"a": "127.0.0.1:1"})
    status, (line,) = await failing_picker("--policy-file", str(policy_file), "--host", host)
    assert status == 1
    assert line.startswith(f"thunderagent: --host: {host}: ")


async def test_a_bad_policy_file_is_told_line_by_line_with_exit_status_2(policy_file: Path) -> None:
    replace(
        policy_file,
        "admission:\n"
        "  pauseThreshold: 0.5\n"
        "  pauseTarget: 0.9\n"
        "  unheardOf: 1\n"
        "workers:\n"
        "- {name: a, address: 10.0.0.1, ports: [80, 80]}\n",
    )
    assert await failing_picker("--policy-file", str(policy_file)) == (
        2,
        [
            f"thunderagent: {policy_file}:3: admission.pauseTarget: must not be above the pause threshold: 0.9 > 0.5",
            f"thunderagent: {policy_file}:4: admission.unheardOf: unknown field",
            f"thunderagent: {policy_file}:6: workers[0].ports: 80 is there twice; each port is a rank of its own",
        ],
    )


async def test_bad_options_are_told_in_one_line_with_exit_status_2(policy_file: Path) -> None:
    write_policy(policy_file, {"a": "127.0.0.1:1"})
    file = ("--policy-file", str(policy_file))
    ends: list[tuple[int | None, list[str]]] = await asyncio.gather(
        failing_picker("--policy-file", "/nowhere.yaml"),
        failing_picker(*file, "--plaintext", "--tls-cert", "c"),
        failing_picker(*file, "--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.key"),
        failing_picker(*file, "--log-level", "loud"),
        failing_picker(*file, "--drain-timeout", "inf"),
    )
    assert ends == [
        (2, ["thunderagent: /nowhere.yaml: cannot be read: No such file or directory"]),
        (2, ["thunderagent: --plaintext: takes no --tls-cert and no --tls-key"]),
        (2, ["thunderagent: TLS certificate /nowhere.pem cannot be read: No such file or directory"]),
        (2, ["thunderagent: --log-level: unknown log level 'loud': choose from debug, info, warning, error"]),
        (2, ["thunderagent: --drain-timeout: must be a number of seconds, not inf"]),
    ]
