"""The picker as it is run: a child process, asked for its state over HTTP and read by its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

LIMIT_SECONDS = 30.0

_COMMAND = (sys.executable, "-P", "-m", "thunderagent_epp.cli", "epp")
_ON_FREE_PORTS = ("--host", "127.0.0.1", "--grpc-port", "0", "--health-port", "0", "--http-port", "0")


def write_policy(
    file: Path, workers: Mapping[str, str], capacity_tokens: int | None = None, **admission: object
) -> None:
    """Write a policy file with these workers (``ip:port`` by name), in the place of another at once."""
    listed: list[dict[str, object]] = []
    for name, endpoint in workers.items():
        address, _, port = endpoint.rpartition(":")
        listed.append({"name": name, "address": address, "ports": [int(port)]})
        if capacity_tokens is not None:
            listed[-1]["capacityTokens"] = capacity_tokens
    replace(file, yaml.safe_dump({"admission": admission, "workers": listed}))


def replace(file: Path, text: str) -> None:
    """Put another content in a file's place, as an editor or a ConfigMap does."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def remove(file: Path) -> None:
    file.unlink()


class Metrics:
    """One look at ``/metrics``."""

    def __init__(self, text: str) -> None:
        self._values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        """A sample by its name without the prefix; None where there is none."""
        return self._values.get((f"thunderagent_{name}", *sorted(labels.items())))


class PickerProcess:
    """A picker that listens. Everything it logged is in ``log``, newest last."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.raw_log: list[str] = []
        self.grpc_port = self.health_port = self.http_port = 0
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

    async def state(self) -> dict[str, Any]:
        _, state = await self.get("/state")
        assert isinstance(state, dict)
        return state

    async def until(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until ``/state`` shows it, as long as anything in a test may take."""
        state: dict[str, Any] = {}
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not reached(state := await self.state()):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not reached: {state}") from None
        return state

    async def until_held(self, holds: int) -> dict[str, Any]:
        return await self.until(lambda state: state["holds"] == holds)

    async def until_status(self, path: str, status: int) -> Any:
        """Wait until a page answers so; return its JSON."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                answered, content = await self.get(path)
                if answered == status:
                    return content
                await asyncio.sleep(0.02)

    async def metrics(self) -> Metrics:
        async with self._client.get(f"{self.url}/metrics") as answer:
            return Metrics(await answer.text())

    async def logged(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait for a line of its log, or find it among those that are there."""

        def find() -> dict[str, Any] | None:
            wanted = {"event": event, **fields}
            return next((line for line in self.log if wanted.items() <= line.items()), None)

        async with asyncio.timeout(LIMIT_SECONDS), self._logged:
            await self._logged.wait_for(lambda: find() is not None or self._reader.done())
        line = find()
        assert line is not None, f"it ended without a word of {event!r}: {self.raw_log[-5:]}"
        return line

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

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
async def running_picker_process(
    policy_file: Path | None, *options: str, plaintext: bool = True
) -> AsyncIterator[PickerProcess]:
    """Run ``thunderagent epp`` on free loopback ports for the length of the block; later options win."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        *(() if policy_file is None else ("--policy-file", str(policy_file))),
        *("--log-format", "json"),
        *_ON_FREE_PORTS,
        *(("--plaintext",) if plaintext else ()),
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    picker = PickerProcess(process)
    try:
        listening = await picker.logged("listening")
        picker.grpc_port = listening["grpc_port"]
        picker.health_port = listening["health_port"]
        picker.http_port = listening["http_port"]
        await picker.until_status("/readyz", 200)
        yield picker
    finally:
        await picker._end()


async def failing_picker(*options: str) -> tuple[int | None, list[str]]:
    """Run ``thunderagent epp`` with options that must make it fail; gives its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode().splitlines()
