"""A worker whose answers a test writes: it remembers what came, and answers as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web
from multidict import CIMultiDictProxy

Answer: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

SSE = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Received:
    method: str
    path: str
    headers: CIMultiDictProxy[str]
    body: bytes


class ScriptedWorker:
    """``answer`` may be set at any time; by default a chat completion of 7 + 3 tokens."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.received: list[Received] = []
        self.answer: Answer = whole(chat_completion(7, 3), JSON)
        self.left = 0
        """Requests whose client left before their answer had ended."""
        self._arrivals: asyncio.Queue[Received] = asyncio.Queue()

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.received]

    async def next_request(self) -> Received:
        """Wait for a request that no earlier call has told of."""
        return await self._arrivals.get()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        received = Received(request.method, request.path_qs, request.headers, await request.read())
        self.received.append(received)
        self._arrivals.put_nowait(received)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.left += 1
            raise


@contextlib.asynccontextmanager
async def running_scripted_worker() -> AsyncIterator[ScriptedWorker]:
    """Listen on a free loopback port for the length of the block."""
    worker = ScriptedWorker()
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", worker._handle)
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        host, port = runner.addresses[0][:2]
        worker.endpoint = f"{host}:{port}"
        yield worker
    finally:
        await runner.cleanup()


def chat_completion(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return json.dumps({"object": "chat.completion", "choices": [], "usage": usage}).encode()


def whole(body: bytes, headers: Mapping[str, str], status: int = 200) -> Answer:
    """Answer with all of ``body`` at once."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return answer


def streamed(
    chunks: Iterable[bytes],
    headers: Mapping[str, str] = SSE,
    *,
    status: int = 200,
    then: asyncio.Event | None = None,
    rest: Iterable[bytes] = (),
) -> Answer:
    """Answer with ``chunks``, each sent by itself, and with ``rest`` once ``then`` is set."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then is not None:
            await then.wait()
        for chunk in rest:
            await response.write(chunk)
        await response.write_eof()
        return response

    return answer


def when(opened: asyncio.Event, answer: Answer) -> Answer:
    """Answer once ``opened`` is set; nothing of it before, not even its headers."""

    async def wait(request: web.Request) -> web.StreamResponse:
        await opened.wait()
        return await answer(request)

    return wait
