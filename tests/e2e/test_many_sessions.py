"""Thousands of agent sessions at once through a real Envoy and the picker as a process: nothing hangs, nothing stays.

Agents and workers run in the test's own process, as light as they can be; the time they take is not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from support.picker_process import PickerProcess, running_picker_process, write_policy
from thunderagent_epp.envoy_config import EnvoyOptions
from thunderagent_sim.envoy_process import running_envoy

HOLD_CLASSES = ("new", "continuation", "paused")
SESSIONS = 2048
HELD = 5000
HELD_BODY_BYTES = 16_000
MEMORY_BYTES = 500_000_000

FILES = 3 * HELD
LIMIT_SECONDS = 90

CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Files enough for every connection, here and in the processes started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"needs {FILES} open files, {hard} are allowed (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def running_worker() -> AsyncIterator[str]:
    """Answer every turn after a moment, streamed or not, with the usage of its prompt; gives the endpoint."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        usage = {"usage": {"prompt_tokens": len(body) // 4, "completion_tokens": 10}}
        if b'"stream":true' not in body[:40]:
            return web.json_response(usage)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        await asyncio.sleep(0.05)
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    application = web.Application(client_max_size=2**24)
    application.router.add_post(CHAT, answer)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


@dataclass(slots=True)
class Agents:
    """The clients of one gateway, and what they saw."""

    client: aiohttp.ClientSession
    url: str
    sent: int = 0
    left: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    async def turn(
        self,
        session: str,
        number: int,
        *,
        final: bool = False,
        stream: bool = True,
        leave_after_seconds: float | None = None,
        leave_when_answered: bool = False,
        body_bytes: int = 1_600,
    ) -> None:
        """Send a turn, whose context grows with its number, and read its answer or leave."""
        prompt = "x" * (body_bytes * number)
        body = f'{{"stream":{"true" if stream else "false"},"prompt":"{prompt}"}}'.encode()
        headers = {"content-type": "application/json", "x-thunderagent-session-id": session}
        if final:
            headers["x-thunderagent-session-final"] = "true"
        self.sent += 1
        try:
            async with (
                asyncio.timeout(leave_after_seconds),
                self.client.post(self.url, data=body, headers=headers) as answer,
            ):
                if leave_when_answered and answer.status == 200:
                    await answer.content.readuntil(EVENT)
                    self.left += 1
                    answer.close()
                    return
                await answer.read()
        except TimeoutError:
            self.left += 1
            return
        self.statuses[answer.status] += 1
        if "x-thunderagent-refusal" in answer.headers:
            self.refusals[answer.headers["x-thunderagent-refusal"]] += 1

    async def session(self, number: int) -> None:
        """Three turns; some leave on the way and come back, some leave for good, some never say that they end."""
        name = f"session-{number}"
        match number % 16:
            case 10:
                await self.turn(name, 1)
                await self.turn(name, 2, leave_after_seconds=0.5)
                await self.turn(name, 2)
                await self.turn(name, 3, final=True)
            case 11:
                await self.turn(name, 1)
                await self.turn(name, 2, leave_when_answered=True)
                await self.turn(name, 2)
                await self.turn(name, 3, final=True)
            case 12:
                await self.turn(name, 1)
                await self.turn(name, 2)
                await self.turn(name, 3, leave_when_answered=True)
            case 13:
                await self.turn(name, 1, leave_after_seconds=0.5)
            case 14:
                for turn in (1, 2, 3):
                    await self.turn(name, turn, stream=False)
            case 15:
                await self.turn(name, 1)
                await asyncio.gather(self.turn(name, 2), self.turn(name, 3))
                await self.turn(name, 3, final=True)
            case _:
                await self.turn(name, 1)
                await self.turn(name, 2)
                await self.turn(name, 3, final=True)


@contextlib.asynccontextmanager
async def running_agents(picker: PickerProcess) -> AsyncIterator[Agents]:
    options = EnvoyOptions(
        listen_address="127.0.0.1", listen_port=0, picker_port=picker.grpc_port, tls=False, admin_port=0
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        running_envoy(options) as envoy,
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client,
    ):
        yield Agents(client, envoy.url + CHAT)


def nothing_is_left(state: dict[str, object]) -> bool:
    nothing = {"tracked": 0, "waiting": [], "programs": {}, "used": {}, "holds": 0, "held_bytes": 0}
    return nothing.items() <= state.items()


@pytest.mark.timeout(LIMIT_SECONDS + 30)
async def test_2048_sessions_at_once_come_to_their_ends_and_leave_nothing(tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    # Room for a third of the sessions, so that most wait, many are paused, and all are resumed.
    policy = {"schedulerInterval": "200ms", "sessionRetention": "2s"}
    async with running_worker() as a, running_worker() as b:
        write_policy(policy_file, {"a": a, "b": b}, 300_000, **policy)
        async with (
            running_picker_process(policy_file) as picker,
            running_agents(picker) as agents,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            async with asyncio.TaskGroup() as sessions:
                for number in range(SESSIONS):
                    sessions.create_task(agents.session(number))
            await picker.until(nothing_is_left)
            metrics = await picker.metrics()

        assert agents.refusals == {}
        assert agents.statuses == {200: agents.sent - agents.left}
        assert agents.left >= SESSIONS // 16 * 2

        def ended(outcome: str) -> int:
            return int(metrics.value("requests_total", path=CHAT, outcome=outcome) or 0)

        assert ended("refused") == 0
        # Who has left may have been answered all the same, or not even have been heard of.
        assert agents.statuses[200] <= ended("completed")
        assert ended("completed") + ended("aborted") <= agents.sent
        assert ended("aborted") > 0
        assert metrics.value("open_streams") == 0
        # Which kinds of turns had to wait depends on how fast the machine's clients come back.
        held = [metrics.value("hold_duration_seconds_count", **{"class": kind}) or 0 for kind in HOLD_CLASSES]
        assert sum(held) > 0
        assert (metrics.value("resumes_total", forced="false") or 0) > 0
        assert metrics.value("resumes_total", forced="true") == 0
        assert [line for line in picker.log if line["level"] not in ("debug", "info")] == []


def resident_bytes(pid: int) -> int:
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc for the memory of a process")
@pytest.mark.timeout(LIMIT_SECONDS + 30)
async def test_5000_requests_are_held_at_once_within_500_megabytes_besides_their_bodies(tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    async with running_worker() as worker:
        policy = {"schedulerInterval": "200ms", "sessionRetention": "1s"}
        # Room for none of them.
        write_policy(policy_file, {"a": worker}, 1_000, **policy)
        async with (
            running_picker_process(policy_file) as picker,
            running_agents(picker) as agents,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            held = [
                asyncio.create_task(agents.turn(f"session-{number}", 1, body_bytes=HELD_BODY_BYTES))
                for number in range(HELD)
            ]
            state = await picker.until_held(HELD)
            assert len(state["programs"]) == state["tracked"] == HELD
            assert state["held_bytes"] >= HELD * HELD_BODY_BYTES
            assert resident_bytes(picker.process.pid) - state["held_bytes"] <= MEMORY_BYTES

            for leaving in held[::2]:
                leaving.cancel()
            state = await picker.until_held(HELD // 2)
            assert len(state["programs"]) == state["tracked"] == HELD // 2

            write_policy(policy_file, {"a": worker}, 100_000_000, **policy)
            await asyncio.gather(*held[1::2])
            assert agents.statuses == {200: HELD // 2}
            await picker.until(nothing_is_left)
