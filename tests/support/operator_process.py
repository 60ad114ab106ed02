"""The operator as it is run: a child process on free loopback ports."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from support.thunderagent_process import ThunderAgentProcess, running_thunderagent


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
