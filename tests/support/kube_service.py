"""A Service: one address before several servers, each connection passed on to the next of them that takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count


class Service:
    """``backends`` are loopback ports, and may change at any time; a connection stays where it is."""

    def __init__(self) -> None:
        self.backends: list[int] = []
        self.port = 0
        self._turn = count()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._pass_on(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(self._turn)
        for index in range(len(self.backends)):
            port = self.backends[(first + index) % len(self.backends)]
            with contextlib.suppress(ConnectionRefusedError):
                there, back = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            return
        copying = [asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))]
        try:
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in copying:
                task.cancel()
            await asyncio.wait(copying)
            back.close()

    async def end(self) -> None:
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while some := await source.read(65536):
            target.write(some)
            await target.drain()


@contextlib.asynccontextmanager
async def running_service(*backends: int) -> AsyncIterator[Service]:
    """Listen on a free loopback port for the length of the block."""
    service = Service()
    service.backends = list(backends)
    server = await asyncio.start_server(service.take, "127.0.0.1", 0)
    service.port = server.sockets[0].getsockname()[1]
    try:
        yield service
    finally:
        server.close()
        await service.end()
