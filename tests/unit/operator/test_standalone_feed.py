"""The feed of a picker without Kubernetes: what the policy file says, with what the workers say they can hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from thunderagent_epp.scheduling.capacity import Worker, WorkerRank
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_operator.standalone import ProbedFileFeed


def page(blocks: object, block_size: int = 16) -> str:
    return f'vllm:cache_config_info{{block_size="{block_size}",num_gpu_blocks="{blocks}"}} 1.0\n'


class Engine:
    """A worker's metrics on a free port, and who asked for them."""

    def __init__(self) -> None:
        self.page = page(500)
        self.status = 200
        self.asked: list[str] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.Response(text=self.page, status=self.status)


@asynccontextmanager
async def running_engine() -> AsyncIterator[Engine]:
    engine = Engine()
    runner = web.ServerRunner(web.Server(engine.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.port = runner.addresses[0][1]
    try:
        yield engine
    finally:
        await runner.cleanup()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with running_engine() as running:
        yield running


class Following:
    """A feed under way over one file."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.say(text)
        self.metrics = Metrics()
        self.published: list[Snapshot] = []
        self._arrived = asyncio.Condition()
        self.feed = ProbedFileFeed(path, self._take, self.metrics, look_interval_seconds=0.002)

    def say(self, text: str) -> None:
        """Put another content in the file's place."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.published[-1].capacity.workers

    async def until(self, *capacities: int | None) -> None:
        """Wait for a snapshot in which the ranks have these capacities, in order."""
        async with self._arrived:
            await self._arrived.wait_for(
                lambda: bool(self.published) and tuple(one.capacity_tokens for one in self.workers) == capacities
            )

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"thunderagent_{name}", labels)

    def _take(self, snapshot: Snapshot) -> None:
        self.published.append(snapshot)
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()


@asynccontextmanager
async def following(path: Path, text: str) -> AsyncIterator[Following]:
    follower = Following(path, text)
    running = asyncio.create_task(follower.feed.run())
    try:
        yield follower
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def worker(engine: Engine, name: str = "a", terms: str = "probeInterval: 100ms") -> str:
    return f"{{name: {name}, address: 127.0.0.1, ports: [{engine.port}], {terms}}}"


def policy(*workers: str) -> str:
    return f"workers: [{', '.join(workers)}]\n"


async def test_an_unknown_capacity_is_learnt_with_its_block_size(path: Path, engine: Engine) -> None:
    engine.page = page(500, block_size=32)
    async with following(path, policy(worker(engine))) as follower:
        await follower.until(16000)
        endpoint = f"127.0.0.1:{engine.port}"
        assert follower.workers == (
            Worker(WorkerRank("a"), endpoint=endpoint, capacity_tokens=16000, incarnation=endpoint, block_size=32),
        )
        assert [snapshot.id for snapshot in follower.published] == [1, 2]
        assert [snapshot.capacity.workers[0].capacity_tokens for snapshot in follower.published] == [None, 16000]


async def test_a_capacity_the_file_gives_wins_and_its_worker_is_not_asked(path: Path, engine: Engine) -> None:
    async with running_engine() as told:
        text = policy(worker(engine, "a"), worker(told, "b", "capacityTokens: 4000"))
        async with following(path, text) as follower:
            await follower.until(8000, 4000)
        assert told.asked == []


async def test_engine_none_is_not_asked(path: Path, engine: Engine) -> None:
    async with running_engine() as silent:
        text = policy(worker(engine, "a"), worker(silent, "b", "engine: none"))
        async with following(path, text) as follower:
            await follower.until(8000, None)
        assert silent.asked == []


async def test_the_metrics_are_read_where_the_file_says(path: Path, engine: Engine) -> None:
    terms = f"engine: vllm, metrics: {{path: /inner/metrics, port: {engine.port}}}"
    text = f"workers: [{{name: a, address: 127.0.0.1, ports: [1, 2], {terms}}}]\n"
    async with following(path, text) as follower:
        await follower.until(8000, 8000)
    assert set(engine.asked) == {"/inner/metrics"}


async def test_another_capacity_is_a_snapshot_of_its_own(path: Path, engine: Engine) -> None:
    async with following(path, policy(worker(engine))) as follower:
        await follower.until(8000)
        engine.page = page(400)
        await follower.until(6400)
        assert [snapshot.id for snapshot in follower.published] == [1, 2, 3]


async def test_a_probe_that_fails_leaves_the_last_capacity(path: Path, engine: Engine) -> None:
    other = "{name: b, address: 127.0.0.2, ports: [8000], engine: none}"
    async with following(path, policy(worker(engine), other)) as follower:
        await follower.until(8000, None)
        engine.page = "<html>"
        while follower.value("probe_workers_failing") != 1:  # noqa: ASYNC110 - a gauge tells nobody
            await asyncio.sleep(0.005)
        # A change of something else shows what is known by now.
        follower.say(policy(worker(engine), other.replace("engine: none", "capacityTokens: 4000")))
        await follower.until(8000, 4000)
        assert [snapshot.id for snapshot in follower.published] == [1, 2, 3]


async def test_a_worker_at_another_address_is_unknown_until_it_has_told(path: Path, engine: Engine) -> None:
    async with running_engine() as other, following(path, policy(worker(engine))) as follower:
        await follower.until(8000)
        other.page = page(None)
        follower.say(policy(worker(other)))
        await follower.until(None)
        other.page = page(100)
        await follower.until(1600)


async def test_a_worker_taken_off_the_file_is_asked_no_more(path: Path, engine: Engine) -> None:
    async with running_engine() as other, following(path, policy(worker(engine, "a"), worker(other, "b"))) as follower:
        await follower.until(8000, 8000)
        follower.say(policy(worker(engine, "a")))
        await follower.until(8000)
        assert follower.value("probe_workers") == 1


async def test_an_edit_of_how_a_worker_is_asked_takes_effect(path: Path, engine: Engine) -> None:
    async with following(path, policy(worker(engine, terms="engine: sglang, probeInterval: 100ms"))) as follower:
        await follower.until(None)
        follower.say(policy(worker(engine, terms="engine: vllm, probeInterval: 100ms")))
        await follower.until(8000)
