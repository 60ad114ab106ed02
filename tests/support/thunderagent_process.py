"""A ``thunderagent`` command as it is run: a child process, read by its log and asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import aiohttp

from thunderagent_sim.processes import ended_with_parent

LIMIT_SECONDS = 30.0

COMMAND = (sys.executable, "-P", "-m", "thunderagent_epp.cli")

Process = TypeVar("Process", bound="ThunderAgentProcess")


class ThunderAgentProcess:
    """A command that logs JSON: everything it logged is in ``log``, newest last. ``http_port`` is where its pages are,
    known once it has said so."""

    http_port = 0

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.raw_log: list[str] = []
        self._logged = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())
        self._client = aiohttp.ClientSession()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a page."""
        async with self._client.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def get_text(self, path: str) -> str:
        async with self._client.get(self.url + path) as answer:
            return await answer.text()

    async def until_status(self, path: str, status: int) -> Any:
        """Wait until a page answers so; return its JSON."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                answered, content = await self.get(path)
                if answered == status:
                    return content
                await asyncio.sleep(0.02)

    async def logged(self, event: str, *, after: int = 0, **fields: object) -> dict[str, Any]:
        """Wait for a line of its log, or find it among those that are there from the ``after``-th on."""

        def find() -> dict[str, Any] | None:
            wanted = {"event": event, **fields}
            return next((line for line in self.log[after:] if wanted.items() <= line.items()), None)

        try:
            async with asyncio.timeout(LIMIT_SECONDS), self._logged:
                await self._logged.wait_for(lambda: find() is not None or self._reader.done())
        except TimeoutError:
            raise AssertionError(f"not a word of {event!r}: {self.raw_log[-10:]}") from None
        line = find()
        assert line is not None, f"it ended without a word of {event!r}: {self.raw_log[-10:]}"
        return line

    def has_logged(self, event: str) -> bool:
        return any(line["event"] == event for line in self.log)

    @property
    def troubles(self) -> list[dict[str, Any]]:
        """What it logged as an error, or with a traceback."""
        return [line for line in self.log if line["level"] in ("error", "critical") or "exception" in line]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def terminate(self) -> int:
        """End it as Kubernetes does, and give its exit status."""
        self.signal(signal.SIGTERM)
        return await self.exit_status()

    async def kill(self) -> None:
        """End it as a node's failure does."""
        self.signal(signal.SIGKILL)
        await self.exit_status()

    async def exit_status(self) -> int:
        """Wait for its end, and for all it had to say."""
        async with asyncio.timeout(LIMIT_SECONDS):
            status = await self.process.wait()
            await asyncio.wait((self._reader,))
        return status

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            text = raw.decode().rstrip()
            async with self._logged:
                self.raw_log.append(text)
                with contextlib.suppress(json.JSONDecodeError):
                    self.log.append(json.loads(text))
                self._logged.notify_all()
        async with self._logged:
            self._logged.notify_all()

    async def _end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await asyncio.wait((self._reader,))
        await self._client.close()


@contextlib.asynccontextmanager
async def running_thunderagent(
    of: type[Process], *arguments: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Run ``thunderagent`` with a command and its options, logging JSON, for the length of the block."""
    process = await asyncio.create_subprocess_exec(
        *ended_with_parent(os.getpid()),
        *COMMAND,
        arguments[0],
        "--log-format=json",
        *arguments[1:],
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=2**24,
        env={**os.environ, **(environment or {})},
    )
    running = of(process)
    try:
        yield running
    finally:
        await running._end()
