"""Agents as clients: what they send, what they count, what they make of a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from thunderagent_sim.agent_script import Between, LoadShape
from thunderagent_sim.agents import Agents, AgentState

ONE_AGENT = LoadShape(
    agents=1,
    opening_tokens=Between(20, 20),
    tool_output_tokens=Between(5, 5),
    answer_tokens=Between(2, 2),
    turns=Between(2, 2),
    tool_seconds=Between(0.001, 0.002),
    first_turn_within_seconds=0.0,
)
HELLO = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"ok "}}]}\n\n'
)
GOODBYE = b'data: {"choices":[{"delta":{"content":"go."}}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'


@dataclass
class Gateway:
    """Answers in two pieces, or as told; ``received`` counts up as requests come in."""

    answers: list[web.Response] = field(default_factory=list)
    received: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    stop_after: int = 1000
    """Requests beyond these are left without an answer, after the first piece."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.received.append(({name.lower(): value for name, value in request.headers.items()}, await request.json()))
        if self.answers:
            return self.answers.pop(0)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(HELLO)
        if len(self.received) > self.stop_after:
            self.stopped.set()
            await asyncio.Event().wait()
        await response.write(GOODBYE)
        return response


@contextlib.asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[Gateway]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", gateway.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gateway.url = "http://{}:{}".format(*runner.addresses[0])
        yield gateway
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def working_until_stopped(gateway: Gateway) -> AsyncIterator[Agents]:
    """One agent that has come as far as the gateway lets it, and still waits for the rest of an answer."""
    async with listening(gateway):
        agents = Agents(gateway.url, "m", ONE_AGENT, seed=1)
        work = asyncio.create_task(agents.run())
        try:
            await gateway.stopped.wait()
            while agents.agents[0].state is not AgentState.ANSWERING:  # noqa: ASYNC110 - the piece is on its way
                await asyncio.sleep(0)
            yield agents
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def test_the_context_grows_by_answer_and_tool_output_and_keeps_its_beginning() -> None:
    gateway = Gateway(stop_after=1)
    async with working_until_stopped(gateway):
        pass
    (_, first), (_, second) = gateway.received
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1]["content"] == "ok go."
    assert len(first["messages"][0]["content"]) == 20 * 4 - 1
    assert (first["model"], first["max_tokens"], first["stream"]) == ("m", 2, True)
    assert first["stream_options"] == {"include_usage": True}


async def test_turns_name_their_session_and_the_last_one_says_so() -> None:
    gateway = Gateway(stop_after=2)
    async with working_until_stopped(gateway):
        pass
    assert [
        (headers["x-thunderagent-session-id"], headers.get("x-thunderagent-session-final"))
        for headers, _ in gateway.received
    ] == [("agent-00.1", None), ("agent-00.1", "true"), ("agent-00.2", None)]


async def test_answered_turns_count_and_the_running_one_is_unfinished() -> None:
    async with working_until_stopped(Gateway(stop_after=2)) as agents:
        assert len(agents.turn_seconds) == 2
        assert len(agents.unfinished_seconds) == 1
        assert agents.failures == []
        (agent,) = agents.agents
        assert (agent.session, agent.turn, agent.turns) == ("agent-00.2", 1, 2)


async def test_a_turn_that_is_ended_from_outside_has_not_failed() -> None:
    async with working_until_stopped(Gateway(stop_after=0)) as agents:
        pass
    assert (agents.turn_seconds, agents.failures) == ([], [])


async def test_a_refused_turn_fails_and_the_agent_goes_on_with_another_session(monkeypatch) -> None:
    monkeypatch.setattr("thunderagent_sim.agents._PAUSE_AFTER_FAILURE_SECONDS", 0)
    gateway = Gateway(answers=[web.Response(status=429, text="hold_limit")], stop_after=1)
    async with working_until_stopped(gateway) as agents:
        assert agents.failures == ["HTTP 429: hold_limit"]
        assert agents.turn_seconds == []
        assert agents.agents[0].session == "agent-00.2"


async def test_an_answer_that_breaks_off_has_failed(monkeypatch) -> None:
    monkeypatch.setattr("thunderagent_sim.agents._PAUSE_AFTER_FAILURE_SECONDS", 0)
    gateway = Gateway(answers=[web.Response(body=HELLO)], stop_after=1)
    async with working_until_stopped(gateway) as agents:
        assert agents.failures == ["the answer broke off"]


async def test_a_gateway_that_cannot_be_reached_fails_turns() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        agents = Agents(f"http://127.0.0.1:{port}", "m", ONE_AGENT, seed=1)
        work = asyncio.create_task(agents.run())
        while not agents.failures:  # noqa: ASYNC110 - nobody else would tell
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert agents.failures[0].startswith(f"Cannot connect to host 127.0.0.1:{port}")
