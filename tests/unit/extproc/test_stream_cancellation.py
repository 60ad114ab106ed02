"""Cancellation is part of the contract: a stream cancelled at any of its awaits ends its turn once and leaves nothing.

The streams run over a context that counts every await of theirs, so that each can be struck in turn: reads, writes,
and the wait for a release.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from fake_director import PLACEMENT, FakeDirector
from proxy_messages import B, H, b, h, kinds, t

from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.server import Server
from thunderagent_epp.telemetry.metrics import Metrics

WAIT = "wait"
"""In a script: the next message comes only when the held request has been released and answered."""


class Strike:
    """Cancels a stream, or breaks its connection, at its n-th await."""

    def __init__(self, at: int, *, breaking: bool = False) -> None:
        self.awaits = 0
        self._at = at
        self._breaking = breaking
        self.stream: asyncio.Task[None] | None = None

    async def pause(self) -> None:
        self.awaits += 1
        if self.awaits == self._at:
            assert self.stream is not None
            if self._breaking:
                raise grpc.aio.InternalError("the connection is gone")
            self.stream.cancel()
        await asyncio.sleep(0)


class ScriptedContext:
    def __init__(self, script: Sequence[ProcessingRequest | str], strike: Strike) -> None:
        self.sent: list[ProcessingResponse] = []
        self.aborted: grpc.StatusCode | None = None
        self.writing = False
        self._script = deque(script)
        self._strike = strike
        self._released = asyncio.Event()

    async def read(self) -> Any:
        await self._strike.pause()
        if self._script and self._script[0] == WAIT:
            self._script.popleft()
            await self._released.wait()
        return self._script.popleft() if self._script else grpc.aio.EOF

    async def write(self, response: ProcessingResponse) -> None:
        assert not self.writing, "gRPC takes one message at a time"
        self.writing = True
        try:
            await self._strike.pause()
        finally:
            self.writing = False
        self.sent.append(response)
        if kinds([response]) == ["request_headers"]:
            self._released.set()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.aborted = code
        await self._strike.pause()


async def serve(
    script: Sequence[ProcessingRequest | str],
    strike: Strike,
    *,
    held: bool = False,
    release: Refused | None = None,
) -> tuple[FakeDirector, ScriptedContext, bool]:
    """Run a stream over a script; returns what the director heard, the context, and whether it was cancelled."""
    director = FakeDirector(held=held)
    director.pause = strike.pause
    server = Server(cast(Any, director), Metrics())
    context = ScriptedContext(script, strike)
    strike.stream = asyncio.create_task(server._process(None, cast(Any, context)))
    if held:
        waiting = asyncio.create_task(director.waiting.wait())
        await asyncio.wait((waiting, strike.stream), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        with suppress(asyncio.QueueEmpty):
            turn = director.turns.get_nowait()
            assert turn.release is not None
            if not turn.release.done():
                if release is None:
                    turn.release.set_result(PLACEMENT)
                else:
                    turn.release.set_exception(release)
                    turn.release.exception()
    await asyncio.wait((strike.stream,))
    assert server.open_streams == 0
    assert server.running_turns == 0
    return director, context, strike.stream.cancelled()


def ends(director: FakeDirector) -> list[Any]:
    return [entry for entry in director.log if entry[0] == "ended"]


def admissions(director: FakeDirector) -> int:
    return sum(entry[0] == "admitted" for entry in director.log)


BODY = b'{"prompt":"' + b"x" * 150_000 + b'"}'
ANSWERED = (H(), B(BODY, end=False), B(b"", end=True), h(), b(b'data: {"x":1}\n\n' * 20), b(), t())
HELD_ANSWERED = (H(), B(BODY), WAIT, h(), b(), t())
EARLY_ANSWER = (H(), B(BODY), WAIT, h("413", "text/plain"), b(b"too long", end=True))
LOCAL_REPLY = (H(), B(BODY), h("504", "text/plain"), b(b"timeout", end=True))
LEFT = (H(), B(BODY))

STREAMS = {
    "an answer": (ANSWERED, False, None, 16),
    "an answer after a hold": (HELD_ANSWERED, True, None, 14),
    "an answer before the last chunk is out": (EARLY_ANSWER, True, None, 12),
    "a reply of the proxy's own during a hold": (LOCAL_REPLY, True, None, 8),
    "a client that leaves during a hold": (LEFT, True, None, 4),
    "a hold that is refused": ((H(), B(BODY), WAIT), True, Refused(Refusal.HOLD_TIMEOUT), 5),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_that_is_not_struck_has_the_awaits_that_the_others_strike(name: str) -> None:
    script, held, release, awaits = STREAMS[name]
    strike = Strike(at=0)
    director, _, cancelled = await serve(script, strike, held=held, release=release)
    assert strike.awaits == awaits
    assert len(ends(director)) == 1
    assert not cancelled


@pytest.mark.parametrize(("name", "at"), [(name, at) for name in STREAMS for at in range(1, STREAMS[name][3] + 1)])
async def test_a_stream_cancelled_at_any_await_ends_its_turn_once(name: str, at: int) -> None:
    script, held, release, _ = STREAMS[name]
    director, _, cancelled = await serve(script, Strike(at), held=held, release=release)
    assert len(ends(director)) == admissions(director)
    assert cancelled


@pytest.mark.parametrize(("name", "at"), [(name, at) for name in STREAMS for at in range(1, STREAMS[name][3] + 1)])
async def test_a_stream_whose_connection_breaks_at_any_await_ends_its_turn_once(name: str, at: int) -> None:
    script, held, release, _ = STREAMS[name]
    director, context, _ = await serve(script, Strike(at, breaking=True), held=held, release=release)
    assert len(ends(director)) == admissions(director)
    assert context.aborted is None


async def test_a_stream_cancelled_while_it_says_that_it_failed_has_ended_its_turn() -> None:
    script = (H(), B(), H())
    director, context, _ = await serve(script, unstruck := Strike(at=0))
    assert context.aborted is grpc.StatusCode.FAILED_PRECONDITION
    director, context, cancelled = await serve(script, Strike(at=unstruck.awaits))
    assert context.aborted is grpc.StatusCode.FAILED_PRECONDITION
    assert cancelled
    assert ends(director) == [("ended", False, "failed")]


async def test_an_answer_that_is_cancelled_while_its_end_is_sent_is_completed() -> None:
    director, context, _ = await serve(ANSWERED, Strike(at=15))
    assert kinds(context.sent)[-1] == "response_body"
    assert ends(director) == [("ended", True, "answered")]


async def test_an_answer_that_comes_before_the_last_chunk_is_out_waits_for_it() -> None:
    _, context, _ = await serve(EARLY_ANSWER, Strike(at=0), held=True)
    assert kinds(context.sent) == [
        "request_headers",
        "request_body",
        "request_body",
        "request_body",
        "response_headers",
        "response_body",
    ]
