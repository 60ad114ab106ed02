"""Simulated workers to send requests to, whose engine's time passes as fast as it can be computed, or stands still."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from virtual_clock import VirtualClock

from thunderagent_sim.engine import EngineOptions
from thunderagent_sim.worker import SimulatedWorker, WorkerOptions, running_worker

OPTIONS = WorkerOptions(EngineOptions(blocks=200, block_size=4, decode_tokens_per_second=50.0), port=0, model="m")


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    async with running_worker(OPTIONS, VirtualClock()) as running:
        yield running


@pytest.fixture
async def client(worker: SimulatedWorker) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(worker.url) as session:
        yield session


@pytest.fixture
async def stopped_worker() -> AsyncIterator[SimulatedWorker]:
    """A worker that makes one step, enough for a first token, and no other."""
    async with running_worker(OPTIONS, VirtualClock(sleeps_allowed=1)) as running:
        yield running
