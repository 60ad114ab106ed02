"""The demo's agents: a dozen closed loops of turn, tool pause, next turn, sent through the gateway.

`demo.py` runs one `Agents` per policy, over the scripts of `agent_script.py`; the live view reads their state while
they run. An agent waits for its answer as long as it takes, as a held turn wants, and sends what it got back with the
next turn, so its context grows and its beginning stays the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec

from thunderagent_sim.agent_script import (
    LoadShape,
    ScriptedSession,
    ScriptedTurn,
    first_turn_after_seconds,
    sessions,
)

SESSION_HEADER: Final = "x-thunderagent-session-id"
FINAL_HEADER: Final = "x-thunderagent-session-final"

_PAUSE_AFTER_FAILURE_SECONDS: Final = 1.0
_REASON_CHARACTERS_MAX: Final = 200


class AgentState(StrEnum):
    """What an agent is doing, as far as it can tell itself: a turn that is held looks to it like a long prefill."""

    STARTING = "starting"
    WAITING = "waiting"
    """Its turn is sent; no token has come yet."""
    ANSWERING = "answering"
    TOOL = "tool"


@dataclass(slots=True)
class Agent:
    """One agent as it is now. ``since`` is when it came into its state; ``context_tokens`` is what it last sent."""

    number: int
    session: str = ""
    turn: int = 0
    turns: int = 0
    context_tokens: int = 0
    state: AgentState = AgentState.STARTING
    since: float = 0.0
    turn_began: float | None = None
    """When the turn that is not answered yet was sent."""


class TurnError(Exception):
    """A turn was refused or its answer broke off; the text says how."""


@dataclass(slots=True)
class Agents:
    """A load of agents on the gateway at ``url``, and what has become of their turns so far; times are seconds."""

    url: str
    model: str
    shape: LoadShape
    seed: int
    clock: Callable[[], float] = time.monotonic
    agents: list[Agent] = field(init=False)
    turn_seconds: list[float] = field(default_factory=list)
    """How long each answered turn took, from the request to the end of the answer."""
    failures: list[str] = field(default_factory=list)
    """Why turns failed, one text each."""

    def __post_init__(self) -> None:
        self.agents = [Agent(number) for number in range(self.shape.agents)]

    @property
    def unfinished_seconds(self) -> list[float]:
        """How long each turn that is not answered yet has taken until now."""
        now = self.clock()
        return [now - agent.turn_began for agent in self.agents if agent.turn_began is not None]

    async def run(self) -> None:
        """Work until cancelled."""
        # A held turn is a request without a first byte; nothing but the gateway may end it.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as client,
            asyncio.TaskGroup() as group,
        ):
            for agent in self.agents:
                group.create_task(self._work(agent, client), name=f"agent {agent.number}")

    async def _work(self, agent: Agent, client: aiohttp.ClientSession) -> None:
        self._enter(agent, AgentState.STARTING)
        await asyncio.sleep(first_turn_after_seconds(self.shape, self.seed, agent.number))
        for session in sessions(self.shape, self.seed, agent.number):
            try:
                await self._converse(agent, session, client)
            except TurnError as error:
                self.failures.append(str(error))
                self._enter(agent, AgentState.STARTING)
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)

    async def _converse(self, agent: Agent, session: ScriptedSession, client: aiohttp.ClientSession) -> None:
        agent.session, agent.turns, agent.context_tokens = session.id, len(session.turns), 0
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(session.turns, start=1):
            agent.turn = number
            agent.context_tokens += turn.prompt_tokens
            messages.append({"role": "user", "content": turn.prompt})
            headers = {SESSION_HEADER: session.id, "content-type": "application/json"}
            if number == len(session.turns):
                headers[FINAL_HEADER] = "true"
            answer = await self._turn(agent, turn, messages, headers, client)
            messages.append({"role": "assistant", "content": answer})
            agent.context_tokens += turn.answer_tokens
            self._enter(agent, AgentState.TOOL)
            await asyncio.sleep(turn.tool_seconds)

    async def _turn(
        self,
        agent: Agent,
        turn: ScriptedTurn,
        messages: list[dict[str, str]],
        headers: dict[str, str],
        client: aiohttp.ClientSession,
    ) -> str:
        """Send one turn and return its answer. Raises TurnError."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": turn.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = agent.turn_began = self._enter(agent, AgentState.WAITING)
        try:
            async with client.post("/v1/chat/completions", data=msgspec.json.encode(body), headers=headers) as response:
                if response.status != HTTPStatus.OK:
                    raise TurnError(await _refusal(response))
                answer = await self._read(agent, response)
        except aiohttp.ClientError as error:
            raise TurnError(str(error) or type(error).__name__) from error
        finally:
            agent.turn_began = None
        self.turn_seconds.append(self.clock() - began)
        return answer

    async def _read(self, agent: Agent, response: aiohttp.ClientResponse) -> str:
        """Read a streamed answer to its end. Raises TurnError if it has none."""
        pieces: list[str] = []
        done = False
        async for line in response.content:
            done = done or line.startswith(b"data: [DONE]")
            if text := _text(line):
                if not pieces:
                    self._enter(agent, AgentState.ANSWERING)
                pieces.append(text)
        if not done:
            raise TurnError("the answer broke off")
        return "".join(pieces)

    def _enter(self, agent: Agent, state: AgentState) -> float:
        agent.state, agent.since = state, self.clock()
        return agent.since


async def _refusal(answer: aiohttp.ClientResponse) -> str:
    text = (await answer.read()).decode(errors="replace")
    return f"HTTP {answer.status}: {text[:_REASON_CHARACTERS_MAX]}"


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


def _text(line: bytes) -> str:
    """The new text in one line of a streamed answer."""
    if not line.startswith(b"data: {"):
        return ""
    chunk = msgspec.json.decode(line[len(b"data: ") :], type=_Chunk)
    return "".join(choice.delta.content for choice in chunk.choices)
