"""``thunderagent standalone`` as a user runs it: one process, a policy file, and simulated workers of its own kind."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from thunderagent_sim.gateway import read_worker_url
from thunderagent_sim.processes import Child, running_child

LIMIT_SECONDS = 30.0
PROGRAM = (sys.executable, "-P", "-m", "thunderagent_epp.cli")


def write_policy(file: Path, *workers: dict[str, object]) -> None:
    """Put another content in the file's place at once."""
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"workers": list(workers)}))
    new.replace(file)


def a_worker(name: str, port: int, **terms: object) -> dict[str, object]:
    return {"name": name, "address": "127.0.0.1", "ports": [port], "probeInterval": "200ms", **terms}


@contextlib.asynccontextmanager
async def running_worker(capacity_tokens: int, port: int = 0) -> AsyncIterator[int]:
    """A simulated worker with so large a KV cache; gives its port."""
    command = (*PROGRAM, "simulate-worker", "--port", str(port), "--capacity-tokens", str(capacity_tokens))
    async with running_child("worker", *command, remedy="try it by itself") as child:
        url = await child.announces(read_worker_url, LIMIT_SECONDS)
        yield int(url.rpartition(":")[2])


class Standalone:
    """A picker that is ready, asked for its state."""

    def __init__(self, child: Child, http_port: int, client: aiohttp.ClientSession) -> None:
        self.child = child
        self._url = f"http://127.0.0.1:{http_port}"
        self._client = client

    async def capacities(self) -> dict[str, int | None]:
        async with self._client.get(f"{self._url}/state") as answer:
            state: dict[str, Any] = await answer.json()
        return {f"{one['worker']}/{one['rank']}": one["capacity_tokens"] for one in state["workers"]}

    async def until(self, expected: dict[str, int | None]) -> None:
        """Wait until these are the workers, with these capacities."""
        found: dict[str, int | None] = {}
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while (found := await self.capacities()) != expected:  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not reached: {found}") from None


def _http_port(line: str) -> int | None:
    with contextlib.suppress(msgspec.DecodeError):
        entry = msgspec.json.decode(line)
        if isinstance(entry, dict) and entry.get("event") == "listening":
            return int(entry["http_port"])
    return None


@contextlib.asynccontextmanager
async def running_standalone(policy_file: Path) -> AsyncIterator[Standalone]:
    command = (
        *(*PROGRAM, "standalone", "--policy-file", policy_file, "--host", "127.0.0.1", "--plaintext"),
        *("--grpc-port", "0", "--health-port", "0", "--http-port", "0", "--drain-delay", "0", "--log-format", "json"),
    )
    async with running_child("standalone", *command, remedy="try it by itself") as child:
        http_port = await child.announces(_http_port, LIMIT_SECONDS)
        async with aiohttp.ClientSession() as client:
            yield Standalone(child, http_port, client)


async def test_workers_are_learnt_restarted_and_edited_without_a_restart_of_the_picker(tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        await stack.enter_async_context(first)
        port = await first.enter_async_context(running_worker(32768))
        write_policy(policy_file, a_worker("a", port))
        standalone = await stack.enter_async_context(running_standalone(policy_file))
        await standalone.until({"a/0": 32768})

        await first.aclose()
        await stack.enter_async_context(running_worker(16384, port))
        await standalone.until({"a/0": 16384})

        other = await stack.enter_async_context(running_worker(8192))
        write_policy(policy_file, a_worker("a", port, capacityTokens=1000), a_worker("b", other, engine="vllm"))
        await standalone.until({"a/0": 1000, "b/0": 8192})

        write_policy(policy_file, a_worker("b", other))
        await standalone.until({"b/0": 8192})


async def test_a_policy_file_that_cannot_be_used_ends_the_command_with_its_faults(tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text("workers: [{name: a, address: 127.0.0.1, ports: [8000], engine: vLLM}]\n")
    process = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "standalone", "--policy-file", str(policy_file)),
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
    assert process.returncode == 2
    assert said.decode().splitlines() == [
        f"thunderagent: {policy_file}:1: workers[0].engine: must be auto, vllm, sglang, trtllm, llamacpp or none, "
        "not 'vLLM'"
    ]
