import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from thunderagent_epp.feed.policy_file import PolicyFileError
from thunderagent_epp.feed.static_file import StaticFileFeed
from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics

A = "{name: a, address: 10.0.0.1, ports: [8000]}"
B = "{name: b, address: 10.0.0.2, ports: [8000]}"
A_MOVED = "{name: a, address: 10.0.0.9, ports: [8000]}"


def policy(*workers: str) -> str:
    return f"workers: [{', '.join(workers)}]\n"


def write(path: Path, text: str) -> None:
    path.write_text(text)


def rewrite_unnoticed(path: Path, text: str) -> None:
    """Another content of the same size, with the time of the old one."""
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Following:
    """A feed under way: what it published, and its metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics()
        self.published: list[Snapshot] = []
        self._arrived: asyncio.Queue[Snapshot] = asyncio.Queue()
        self.feed = StaticFileFeed(path, self._take, self.metrics, look_interval_seconds=0.002)

    def _take(self, snapshot: Snapshot) -> None:
        self.published.append(snapshot)
        self._arrived.put_nowait(snapshot)

    async def next(self) -> Snapshot:
        return await self._arrived.get()

    def reloads(self, result: str) -> float | None:
        return self.metrics.registry.get_sample_value("thunderagent_policy_file_reloads_total", {"result": result})


@asynccontextmanager
async def following(path: Path) -> AsyncIterator[Following]:
    follower = Following(path)
    running = asyncio.create_task(follower.feed.run())
    try:
        await follower.next()
        yield follower
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(policy(A))
    return path


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[dict[str, object]]:
    return [record.msg for record in caplog.records if record.levelno == level and isinstance(record.msg, dict)]


async def test_the_first_snapshot_has_id_one(path: Path) -> None:
    async with following(path) as follower:
        assert [snapshot.id for snapshot in follower.published] == [1]
        assert set(follower.published[0].capacity.by_id) == {WorkerRank("a", 0)}


def test_a_bad_file_at_the_start_is_an_error(path: Path) -> None:
    path.write_text("workers: []\n")
    with pytest.raises(PolicyFileError, match=r"policy.yaml:1: workers: at least one worker is required"):
        StaticFileFeed(path, lambda _: None, Metrics())


async def test_an_edit_in_place_is_published_with_the_next_id(path: Path) -> None:
    async with following(path) as follower:
        write(path, policy(A, B))
        snapshot = await follower.next()
        assert snapshot.id == 2
        assert set(snapshot.capacity.by_id) == {WorkerRank("a", 0), WorkerRank("b", 0)}


async def test_a_file_put_in_the_others_place_is_published(path: Path, tmp_path: Path) -> None:
    async with following(path) as follower:
        new = tmp_path / "policy.yaml~"
        new.write_text(policy(B))
        new.replace(path)
        assert set((await follower.next()).capacity.by_id) == {WorkerRank("b", 0)}


async def test_a_configmap_that_swaps_its_links_is_published(tmp_path: Path) -> None:
    for version, workers in [("..1", policy(A)), ("..2", policy(B))]:
        (tmp_path / version).mkdir()
        (tmp_path / version / "policy.yaml").write_text(workers)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    async with following(tmp_path / "policy.yaml") as follower:
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        assert set((await follower.next()).capacity.by_id) == {WorkerRank("b", 0)}


async def test_an_edit_that_keeps_size_and_time_is_published(path: Path) -> None:
    async with following(path) as follower:
        rewrite_unnoticed(path, policy(A_MOVED))
        assert (await follower.next()).capacity.by_id[WorkerRank("a", 0)].endpoint == "10.0.0.9:8000"


async def test_a_bad_edit_publishes_nothing_and_the_feed_goes_on(path: Path) -> None:
    async with following(path) as follower:
        write(path, "workers: []\n")
        follower.feed.reload()
        write(path, policy(B))
        assert (await follower.next()).id == 2
        assert [snapshot.id for snapshot in follower.published] == [1, 2]


def test_a_bad_edit_is_said_once_with_a_line_per_fault(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = Following(path)
    path.write_text("workers: []\ncolour: red\n")
    with caplog.at_level(logging.INFO, "thunderagent.feed"):
        follower.feed.reload()
        follower.feed.reload()
    assert [line["problem"] for line in said(caplog, logging.WARNING)] == [
        f"{path}:1: workers: at least one worker is required, as a list of {{name, address, ports}}",
        f"{path}:2: colour: unknown field",
    ]
    assert follower.reloads("refused") == 1
    assert follower.metrics.registry.get_sample_value("thunderagent_policy_file_last_reload_applied") == 0
    assert follower.published == []


def test_undoing_a_bad_edit_is_said_and_publishes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = Following(path)
    path.write_text("workers: []\n")
    follower.feed.reload()
    path.write_text(policy(A))
    with caplog.at_level(logging.INFO, "thunderagent.feed"):
        follower.feed.reload()
    assert [line["event"] for line in said(caplog, logging.INFO)] == ["policy file is good again"]
    assert follower.reloads("applied") == 1
    assert follower.metrics.registry.get_sample_value("thunderagent_policy_file_last_reload_applied") == 1
    assert follower.published == []


def test_a_file_that_vanishes_leaves_the_last_good_one_in_force(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = Following(path)
    path.unlink()
    with caplog.at_level(logging.INFO, "thunderagent.feed"):
        follower.feed.reload()
        follower.feed.reload()
    assert [line["problem"] for line in said(caplog, logging.WARNING)] == [
        f"{path}: cannot be read: No such file or directory"
    ]
    path.write_text(policy(A, B))
    follower.feed.reload()
    assert [snapshot.id for snapshot in follower.published] == [2]


def test_a_reload_of_an_unchanged_file_does_nothing(path: Path) -> None:
    follower = Following(path)
    path.touch()
    follower.feed.reload()
    assert follower.published == []
    assert follower.reloads("applied") == 0


def test_an_edit_that_changes_only_comments_publishes_nothing(path: Path) -> None:
    follower = Following(path)
    path.write_text(f"# the same\n{policy(A)}")
    follower.feed.reload()
    assert follower.published == []
    path.write_text(policy(B))
    follower.feed.reload()
    assert [snapshot.id for snapshot in follower.published] == [2]


def test_a_worker_with_another_address_is_another_incarnation(path: Path) -> None:
    follower = Following(path)
    path.write_text(policy(A_MOVED))
    follower.feed.reload()
    assert follower.published[0].capacity.by_id[WorkerRank("a", 0)].incarnation == "10.0.0.9:8000"


async def test_a_content_counts_only_once_two_looks_saw_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half, whole = policy(A).encode(), policy(A, B).encode()
    looks = [b"workers: [", half, whole, whole]
    follower = Following(path)
    monkeypatch.setattr(follower.feed, "_look", lambda: looks.pop(0) if looks else whole)
    running = asyncio.create_task(follower.feed.run())
    await follower.next()
    assert set((await follower.next()).capacity.by_id) == {WorkerRank("a", 0), WorkerRank("b", 0)}
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert [snapshot.id for snapshot in follower.published] == [1, 2]
    assert follower.reloads("refused") == 0


async def test_following_ends_when_cancelled(path: Path) -> None:
    running = asyncio.create_task(Following(path).feed.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_what_the_receiver_of_a_snapshot_raises_ends_the_feed(path: Path) -> None:
    def refuse(_: Snapshot) -> None:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        await StaticFileFeed(path, refuse, Metrics()).run()
