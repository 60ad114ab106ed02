from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import virtual_time
from kubernetes.aio.client import ApiException

from support.kube_objects import policy_object
from thunderagent_epp.scheduling.capacity import Worker, WorkerRank
from thunderagent_operator.api import POLICIES
from thunderagent_operator.cluster import Cluster
from thunderagent_operator.conditions import Findings
from thunderagent_operator.status_writer import StatusWriter

NAME = "llm/coder"


class WrittenTo:
    """An API that notes what is written and when; each request fails with the next of ``failures``."""

    def __init__(self) -> None:
        self.patches: list[tuple[float, str, dict[str, Any]]] = []
        self.events: list[tuple[str, str, bool]] = []
        self.failures: list[Exception] = []
        self.event_failures: list[Exception] = []
        self.seconds = 0.0

    async def patch_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        await asyncio.sleep(self.seconds)
        if self.failures:
            raise self.failures.pop(0)
        self.patches.append((round(asyncio.get_running_loop().time(), 2), f"{namespace}/{name}", dict(status)))

    async def event(self, policy: Mapping[str, Any], *, reason: str, message: str, warning: bool) -> None:
        if self.event_failures:
            raise self.event_failures.pop(0)
        self.events.append((reason, message, warning))

    @property
    def live(self) -> list[tuple[float, int]]:
        """When which number of live workers was written."""
        return [(when, status["workers"]["live"]) for when, _, status in self.patches]


class Writing:
    def __init__(self) -> None:
        self.api = WrittenTo()
        self.cluster = Cluster(lambda policy: None, asyncio.get_running_loop().time)
        self.cluster.take(POLICIES, "ADDED", policy_object())
        self.writer = StatusWriter(self.api, self.cluster)  # type: ignore[arg-type]

    def find(self, live: int, policy: str = NAME) -> None:
        workers = [Worker(WorkerRank(f"w{index}"), "10.0.0.1:8000", 1000) for index in range(live)]
        self.writer.take(policy, Findings(generation=1, workers=workers))

    def show(self, status: dict[str, Any] | None, uid: str = "uid-coder") -> None:
        """Let the watch show a policy with this status."""
        self.cluster.take(POLICIES, "MODIFIED", {**policy_object(uid=uid), "status": status})


def written(story: Callable[[Writing], Awaitable[None]]) -> WrittenTo:
    """What was written while a story was told."""

    async def tell() -> None:
        nonlocal api
        writing = Writing()
        api = writing.api
        running = asyncio.create_task(writing.writer.run())
        await story(writing)
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()

    api = None  # type: ignore[assignment]
    virtual_time.run(tell())
    return api


def test_a_status_is_written_once_and_again_when_it_changes() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(10)
        writing.find(1)
        await asyncio.sleep(3)
        writing.show(writing.api.patches[-1][2])
        writing.find(1)
        await asyncio.sleep(7)
        writing.find(2)
        await asyncio.sleep(10)

    # The watch is late with what was written first: it is written once more, for it might have been lost.
    assert written(story).live == [(0.0, 1), (10.0, 1), (20.0, 2)]


def test_a_policy_is_written_once_a_second_at_most_with_what_is_true_by_then() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        for live in range(30):
            writing.find(live)
            await asyncio.sleep(0.1)
        await asyncio.sleep(5)

    live = written(story).live
    assert live[0] == (0.0, 0)
    assert live[-1][1] == 29
    assert len(live) <= 5
    assert all(later - sooner >= 1 for (sooner, _), (later, _) in pairwise(live))


def test_nothing_is_written_by_one_that_does_not_lead() -> None:
    async def story(writing: Writing) -> None:
        writing.find(1)
        await asyncio.sleep(5)
        assert writing.api.patches == []
        writing.writer.lead(True)
        await asyncio.sleep(5)
        writing.writer.lead(False)
        writing.find(2)
        await asyncio.sleep(5)

    assert written(story).live == [(5.0, 1)]


def test_a_new_leader_writes_what_is_not_there_already() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(5)
        writing.show(writing.api.patches[-1][2])
        writing.writer.lead(False)
        writing.writer.lead(True)
        await asyncio.sleep(5)
        writing.show({})
        writing.find(1)
        await asyncio.sleep(5)

    assert written(story).live == [(0.0, 1), (10.0, 1)]


def test_a_policy_that_was_made_anew_is_written_anew() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(2)
        writing.show(None, uid="uid of another")
        writing.find(1)
        await asyncio.sleep(2)

    assert written(story).live == [(0.0, 1), (2.0, 1)]


def test_what_somebody_else_wrote_over_it_is_put_right() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(1)
        writing.show(writing.api.patches[-1][2])
        await asyncio.sleep(9)
        writing.show({"capacityTokens": 7})
        writing.find(1)
        await asyncio.sleep(1)

    assert written(story).live == [(0.0, 1), (10.0, 1)]


@pytest.mark.parametrize(
    "failure", [ApiException(status=500, reason="oops"), aiohttp.ClientConnectionError("refused"), TimeoutError()]
)
def test_what_cannot_be_written_is_tried_again_with_what_is_true_by_then(failure: Exception) -> None:
    async def story(writing: Writing) -> None:
        writing.api.failures = [failure, failure]
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(1)
        writing.find(2)
        await asyncio.sleep(9)
        assert writing.writer.failures == 2

    (only,) = written(story).live
    assert only[1] == 2
    assert 4.0 <= only[0] < 4.5


def test_each_condition_that_changed_is_an_event() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(0)
        await asyncio.sleep(2)
        writing.api.events.clear()
        writing.find(1)
        await asyncio.sleep(2)

    assert written(story).events == [
        ("WorkersLive", "WorkersReady is True: 1 of 1 worker ranks are live.", False),
        ("CapacityKnown", "CapacityKnown is True: The capacity of all 1 live worker ranks is known.", False),
    ]


def test_what_is_bad_is_a_warning() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(0)
        await asyncio.sleep(2)

    assert [(reason, warning) for reason, _, warning in written(story).events] == [
        ("Accepted", False),
        ("NoWorkers", True),
        ("NoLiveWorkers", False),
        ("NoSnapshot", True),
    ]


def test_an_event_that_is_not_taken_does_not_hold_up_statuses() -> None:
    async def story(writing: Writing) -> None:
        writing.api.event_failures = [ApiException(status=403, reason="Forbidden")]
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(2)
        writing.find(2)
        await asyncio.sleep(2)

    assert written(story).live == [(0.0, 1), (2.0, 2)]


def test_a_policy_that_is_gone_is_written_no_more() -> None:
    async def story(writing: Writing) -> None:
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(0.5)
        writing.find(2)
        writing.writer.take(NAME, None)
        await asyncio.sleep(5)

    assert written(story).live == [(0.0, 1)]


def test_what_comes_due_while_another_is_written_is_not_forgotten() -> None:
    async def story(writing: Writing) -> None:
        writing.cluster.take(POLICIES, "ADDED", policy_object("second"))
        writing.api.seconds = 2.0
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(1)
        writing.find(1, "llm/second")
        await asyncio.sleep(5)

    assert [(when, name) for when, name, _ in written(story).patches] == [(2.0, NAME), (4.1, "llm/second")]


def test_a_status_that_nobody_can_read_is_replaced() -> None:
    async def story(writing: Writing) -> None:
        writing.show({"conditions": [{"type": "Accepted"}]})
        writing.writer.lead(True)
        writing.find(1)
        await asyncio.sleep(2)

    assert written(story).live == [(0.0, 1)]
