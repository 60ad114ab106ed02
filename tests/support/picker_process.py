"""The picker as it is run: a child process, asked for its state over HTTP and read by its log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.thunderagent_process import COMMAND, LIMIT_SECONDS, ThunderAgentProcess, running_thunderagent

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


class PickerProcess(ThunderAgentProcess):
    """A picker that listens."""

    grpc_port = health_port = 0

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

    async def until_ready(self) -> None:
        await self.until_status("/readyz", 200)

    async def until_unready(self, reason: str) -> None:
        """Wait until it is not ready, for this reason."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while (await self.get("/readyz"))[1]["reason"] != reason:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.02)

    async def metrics(self) -> Metrics:
        return Metrics(await self.get_text("/metrics"))


@contextlib.asynccontextmanager
async def running_picker_process(
    policy_file: Path | None, *options: str, plaintext: bool = True
) -> AsyncIterator[PickerProcess]:
    """Run ``thunderagent epp`` on free loopback ports for the length of the block; later options win."""
    source = () if policy_file is None else ("--policy-file", str(policy_file))
    async with running_picker(*source, *options, plaintext=plaintext) as picker:
        await picker.until_ready()
        yield picker


@contextlib.asynccontextmanager
async def running_following_picker(feed: str, policy: str, *options: str) -> AsyncIterator[PickerProcess]:
    """Run ``thunderagent epp --feed`` for the length of the block; it listens, and may not have a snapshot yet."""
    async with running_picker("--feed", feed, "--policy", policy, *options) as picker:
        yield picker


@contextlib.asynccontextmanager
async def running_picker(*options: str, plaintext: bool = True) -> AsyncIterator[PickerProcess]:
    """Run ``thunderagent epp`` on free loopback ports for the length of the block; it listens."""
    in_plaintext = ("--plaintext",) if plaintext else ()
    async with running_thunderagent(PickerProcess, "epp", *_ON_FREE_PORTS, *in_plaintext, *options) as picker:
        listening = await picker.logged("listening")
        picker.grpc_port = listening["grpc_port"]
        picker.health_port = listening["health_port"]
        picker.http_port = listening["http_port"]
        yield picker


async def failing_picker(*options: str) -> tuple[int | None, list[str]]:
    """Run ``thunderagent epp`` with options that must make it fail; gives its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "epp",
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
