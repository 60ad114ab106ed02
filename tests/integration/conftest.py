from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

import pytest

from thunderagent_epp.envoy_config import EnvoyOptions
from thunderagent_sim.envoy_process import RunningEnvoy, running_envoy


class StartEnvoy(Protocol):
    def __call__(self, picker_port: int, **options: Any) -> Awaitable[RunningEnvoy]: ...


@pytest.fixture
async def start_envoy() -> AsyncIterator[StartEnvoy]:
    """Start real Envoys, on free loopback ports and in plaintext to the picker unless the test says otherwise."""
    async with contextlib.AsyncExitStack() as running:

        async def start(picker_port: int, **options: Any) -> RunningEnvoy:
            chosen = {"listen_address": "127.0.0.1", "listen_port": 0, "tls": False, **options}
            return await running.enter_async_context(running_envoy(EnvoyOptions(picker_port=picker_port, **chosen)))

        yield start
