"""The operator as it is run, and pickers that follow it, on free loopback ports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from support.thunderagent_process import LIMIT_SECONDS, ThunderAgentProcess, running_thunderagent


class OperatorProcess(ThunderAgentProcess):
    """An operator that listens."""

    feed_port = 0

    @property
    def feed(self) -> str:
        return f"127.0.0.1:{self.feed_port}"

    async def until_serving(self) -> None:
        """Wait until it leads and feeds."""
        await self.logged("feed serves")


@contextlib.asynccontextmanager
async def running_operator(
    kubeconfig: Path, *options: str, feed_port: int = 0, pod_name: str = "operator-0"
) -> AsyncIterator[OperatorProcess]:
    """Run ``thunderagent operator`` for the length of the block; it listens, and may not know anything yet."""
    async with running_thunderagent(
        OperatorProcess,
        "operator",
        *("--feed-host", "127.0.0.1", "--feed-port", str(feed_port)),
        *("--http-host", "127.0.0.1", "--http-port", "0"),
        *options,
        environment={"KUBECONFIG": str(kubeconfig), "POD_NAME": pod_name},
    ) as operator:
        listening = await operator.logged("operating")
        operator.feed_port, operator.http_port = listening["feed_port"], listening["http_port"]
        yield operator


class FollowingPicker(ThunderAgentProcess):
    """A picker that listens, and may not have a snapshot yet."""

    grpc_port = 0

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

    async def until_ready(self) -> None:
        await self.until_status("/readyz", 200)

    async def until_unready(self, reason: str) -> None:
        """Wait until it is not ready, for this reason."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while (await self.get("/readyz"))[1]["reason"] != reason:  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running_following_picker(feed: str, policy: str, *options: str) -> AsyncIterator[FollowingPicker]:
    """Run ``thunderagent epp --feed`` in plaintext for the length of the block."""
    async with running_thunderagent(
        FollowingPicker,
        *("epp", "--feed", feed, "--policy", policy, "--plaintext", "--host", "127.0.0.1"),
        *("--grpc-port", "0", "--health-port", "0", "--http-port", "0"),
        *options,
    ) as picker:
        listening = await picker.logged("listening")
        picker.grpc_port, picker.http_port = listening["grpc_port"], listening["http_port"]
        yield picker
