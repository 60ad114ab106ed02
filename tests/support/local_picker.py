"""The picker's server and director inside the test, with the snapshot the test wants and nothing around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from thunderagent_epp.extproc.director import Director
from thunderagent_epp.extproc.server import DEFAULT_MAX_BODY_BYTES, Server
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import ProgramState
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.status import Status

LIMIT_SECONDS = 20.0


def snapshot(
    *endpoints: str, capacity_tokens: int | None = 100_000_000, admission: dict[str, Any] | None = None, id: int = 1
) -> Snapshot:
    """Workers ``a``, ``b``, … at these endpoints, all of one capacity; parameters by their scheduling.md names."""
    workers = tuple(
        Worker(WorkerRank(chr(ord("a") + index)), endpoint, capacity_tokens=capacity_tokens)
        for index, endpoint in enumerate(endpoints)
    )
    return Snapshot(id, CapacitySnapshot(workers), AdmissionPolicy.from_parameters(admission or {}), RequestPolicy())


@dataclass(frozen=True, slots=True)
class LocalPicker:
    director: Director
    server: Server
    metrics: Metrics
    port: int

    @property
    def status(self) -> Status:
        return self.director.status()

    @property
    def used(self) -> dict[str, int]:
        return dict(self.status.state.used)

    def program(self, session: str) -> ProgramState:
        return self.status.state.programs[session]

    def requests(self) -> dict[str, int]:
        """How many requests ended in which outcome, zeroes left out."""
        found: dict[str, int] = {}
        for metric in self.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name == "thunderagent_requests_total" and sample.value:
                    outcome = sample.labels["outcome"]
                    found[outcome] = found.get(outcome, 0) + int(sample.value)
        return found

    async def until(self, reached: Callable[[LocalPicker], bool]) -> None:
        """Wait for a state to be reached, as long as anything in a test may take."""
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                while not reached(self):  # noqa: ASYNC110 - what is waited for has no event of its own
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"not reached: {self.status}") from None

    async def until_held(self, holds: int) -> None:
        await self.until(lambda picker: picker.status.holds == holds)

    async def until_idle(self) -> None:
        """Wait until every turn has ended."""
        await self.until(lambda picker: picker.server.running_turns == 0)


@contextlib.asynccontextmanager
async def running_local_picker(
    of: Snapshot | None,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    credentials: grpc.ServerCredentials | None = None,
    **director_options: Any,
) -> AsyncIterator[LocalPicker]:
    """Serve on a free loopback port for the length of the block; None is a picker that has no snapshot yet."""
    metrics = Metrics()
    director = Director(metrics, **director_options)
    server = Server(director, metrics, max_body_bytes=max_body_bytes)
    if of is not None:
        director.apply(of)
    port = await server.start("127.0.0.1", 0, credentials)
    ticks = asyncio.create_task(director.run())
    try:
        yield LocalPicker(director, server, metrics, port)
    finally:
        ticks.cancel()
        await asyncio.wait((ticks,))
        await server.stop(0)
