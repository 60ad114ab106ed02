"""The smallest worker: answers with the body it was sent and remembers what came."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDictProxy


@dataclass(frozen=True, slots=True)
class Received:
    method: str
    path: str
    headers: CIMultiDictProxy[str]
    body: bytes


@dataclass(slots=True)
class EchoWorker:
    endpoint: str
    received: list[Received] = field(default_factory=list)


@contextlib.asynccontextmanager
async def running_echo_worker() -> AsyncIterator[EchoWorker]:
    """Listen on a free loopback port for the length of the block."""
    worker = EchoWorker(endpoint="")

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        worker.received.append(Received(request.method, request.path_qs, request.headers, body))
        return web.Response(body=body, content_type="application/octet-stream")

    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        worker.endpoint = f"{host}:{port}"
        yield worker
    finally:
        await runner.cleanup()
