from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import virtual_time

from support.kube_objects import pod_object, policy_object, pool_object
from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_operator.api import PODS, POLICIES, POOLS
from thunderagent_operator.cluster import Cluster
from thunderagent_operator.conditions import Findings
from thunderagent_operator.discovery import Overlap
from thunderagent_operator.feed import FeedServer, Picker
from thunderagent_operator.probes.prober import Known, ProbeKey, ProbeTarget
from thunderagent_operator.probes.reading import Capacity
from thunderagent_operator.reconciler import Reconciler
from thunderagent_operator.snapshot_book import Absent, Published, Reason

NAME = "llm/coder"
A = ProbeKey(NAME, WorkerRank("a"))
GIVEN = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [8000], "capacityTokens": 1000}


class Probes:
    """Knows what a test says."""

    def __init__(self) -> None:
        self.followed: dict[ProbeKey, ProbeTarget] = {}
        self.answers: dict[ProbeKey, Known] = {}

    def follow(self, key: ProbeKey, target: ProbeTarget) -> None:
        self.followed[key] = target

    def forget(self, key: ProbeKey) -> None:
        del self.followed[key]

    def known(self, key: ProbeKey) -> Known:
        return self.answers.get(key, Known())


class Operated:
    """A reconciler at work between a cluster, probes and a feed, and what it reported last of each policy."""

    def __init__(self) -> None:
        self.pods_known = True
        self.found: dict[str, Findings | None] = {}
        self.probes = Probes()
        self.cluster = Cluster(lambda policy: self.reconciler.due(policy), asyncio.get_running_loop().time)
        self.feed = FeedServer("127.0.0.1:0", clock=lambda: 1000.0)
        self.reconciler = Reconciler(
            self.cluster,
            self.probes,  # type: ignore[arg-type]
            self.feed,
            pods_are_known=lambda policy: self.pods_known,
            reported=self._report,
        )

    def _report(self, policy: str, found: Findings | None) -> None:
        self.found[policy] = found

    def policy(self, name: str = "coder", event: str = "ADDED", **spec: Any) -> None:
        self.cluster.take(POLICIES, event, policy_object(name, **spec))

    def pod(self, name: str = "a", event: str = "ADDED", **more: Any) -> None:
        self.cluster.take(PODS, event, pod_object(name, **more))

    def learn(self, tokens: int | None, trouble: str | None = None) -> None:
        """Let the probe of ``a`` tell something."""
        self.probes.answers[A] = Known(None if tokens is None else Capacity(tokens, 16), trouble)
        self.reconciler.due(NAME)

    def published(self, policy: str = NAME) -> Published | None:
        standing = self.feed.standing(policy)
        return standing if isinstance(standing, Published) else None

    @property
    def capacities(self) -> dict[str, int | None]:
        """By worker, what its snapshot says."""
        published = self.published()
        assert published is not None
        return {worker.id.worker: worker.capacity_tokens for worker in published.snapshot.capacity.workers}


Tale = Callable[[Operated], Awaitable[None]]


def operate(tale: Tale) -> None:
    async def told() -> None:
        operated = Operated()
        running = asyncio.create_task(operated.reconciler.run())
        await tale(operated)
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()

    virtual_time.run(told())


def test_a_policy_and_its_pods_are_published_and_reported() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers=GIVEN, admission={"pauseThreshold": 0.9})
        operated.pod()
        await operated.reconciler.settled()
        published = operated.published()
        assert published is not None
        assert published.snapshot.admission.pause_threshold == 0.9
        assert operated.capacities == {"a": 1000}
        found = operated.found[NAME]
        assert found is not None
        assert found.generation == 1
        assert found.problem is None
        assert found.snapshot is not None
        assert found.snapshot.id == published.snapshot.id
        assert [worker.id.worker for worker in found.workers] == ["a"]
        assert operated.probes.followed == {}, "its capacity is given"

    operate(tale)


def test_many_changes_at_once_are_one_snapshot() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers=GIVEN)
        await operated.reconciler.settled()
        first = operated.published()
        for index in range(100):
            operated.pod(f"pod-{index}", ip=f"10.0.0.{index}")
        await operated.reconciler.settled()
        second = operated.published()
        assert first is not None
        assert second is not None
        assert second.snapshot.id == first.snapshot.id + 1
        assert len(operated.capacities) == 100

    operate(tale)


def test_what_changes_nothing_publishes_nothing() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers=GIVEN)
        operated.pod()
        await operated.reconciler.settled()
        before = operated.published()
        operated.reconciler.due(NAME)
        await operated.reconciler.settled()
        assert operated.published() is before

    operate(tale)


def test_a_worker_is_probed_as_long_as_it_is_there() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy()
        operated.pod("a")
        operated.pod("b", ip="10.0.0.2")
        await asyncio.sleep(0.1)
        assert set(operated.probes.followed) == {A, ProbeKey(NAME, WorkerRank("b"))}
        operated.pod("b", "DELETED")
        await asyncio.sleep(0.1)
        assert set(operated.probes.followed) == {A}
        operated.policy(event="MODIFIED", workers=GIVEN)
        await asyncio.sleep(0.1)
        assert operated.probes.followed == {}
        operated.policy(event="MODIFIED")
        await asyncio.sleep(0.1)
        operated.policy(event="DELETED")
        await asyncio.sleep(0.1)
        assert operated.probes.followed == {}

    operate(tale)


def test_a_first_snapshot_waits_for_the_first_answer_of_its_workers() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy()
        operated.pod()
        await asyncio.sleep(1)
        assert operated.feed.standing(NAME) == Absent(Reason.NOT_FOUND)
        operated.learn(5000)
        await operated.reconciler.settled()
        assert asyncio.get_running_loop().time() < 1.2
        assert operated.capacities == {"a": 5000}

    operate(tale)


@pytest.mark.parametrize("trouble", ["connection refused", None])
def test_a_first_snapshot_waits_for_no_worker_that_cannot_tell(trouble: str | None) -> None:
    async def tale(operated: Operated) -> None:
        operated.policy()
        operated.pod()
        await asyncio.sleep(1)
        if trouble is not None:
            operated.learn(None, trouble)
        await operated.reconciler.settled()
        assert operated.capacities == {"a": None}
        assert asyncio.get_running_loop().time() == pytest.approx(1.05 if trouble else 3.05, abs=0.1)

    operate(tale)


def test_later_snapshots_wait_for_nothing() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy()
        await operated.reconciler.settled()
        operated.pod()
        await operated.reconciler.settled()
        assert asyncio.get_running_loop().time() < 0.2
        assert operated.capacities == {"a": None}
        operated.learn(5000)
        await operated.reconciler.settled()
        assert operated.capacities == {"a": 5000}

    operate(tale)


def test_nothing_is_published_before_the_pods_are_known() -> None:
    async def tale(operated: Operated) -> None:
        operated.pods_known = False
        operated.policy(workers=GIVEN)
        await asyncio.sleep(10)
        assert operated.published() is None
        found = operated.found[NAME]
        assert found is not None
        assert found.snapshot is None
        operated.pod()
        operated.pods_known = True
        operated.reconciler.due(NAME)
        await operated.reconciler.settled()
        assert operated.capacities == {"a": 1000}

    operate(tale)


def test_what_a_probe_cannot_tell_is_reported_and_what_it_told_stays() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy()
        operated.pod()
        operated.learn(5000)
        await operated.reconciler.settled()
        operated.learn(5000, "HTTP 500")
        await operated.reconciler.settled()
        found = operated.found[NAME]
        assert found is not None
        assert {str(worker.id): why for worker, why in found.trouble.items()} == {"a/0": "HTTP 500"}
        assert operated.capacities == {"a": 5000}

    operate(tale)


def test_a_bad_policy_that_was_never_good_is_withheld_from_its_pickers() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(topology="Circular")
        await operated.reconciler.settled()
        standing = operated.feed.standing(NAME)
        assert isinstance(standing, Absent)
        assert standing.reason is Reason.NOT_ACCEPTED
        assert standing.detail.startswith("spec.topology: ")
        found = operated.found[NAME]
        assert found is not None
        assert found.problem == ("InvalidSpec", standing.detail)

    operate(tale)


def test_a_bad_edit_leaves_the_last_good_snapshot_and_pods_still_come_and_go() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers=GIVEN, admission={"pauseThreshold": 0.9})
        operated.pod("a")
        await operated.reconciler.settled()
        operated.policy(event="MODIFIED", workers=GIVEN, admission={"pauseThreshold": 9})
        operated.pod("b", ip="10.0.0.2")
        await operated.reconciler.settled()
        published, found = operated.published(), operated.found[NAME]
        assert published is not None
        assert found is not None
        assert published.snapshot.admission.pause_threshold == 0.9
        assert operated.capacities == {"a": 1000, "b": 1000}
        assert found.problem is not None

    operate(tale)


def test_a_missing_pool_is_reported_until_it_is_there() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers={"inferencePool": "coder", "capacityTokens": 1000})
        operated.pod()
        await operated.reconciler.settled()
        found = operated.found[NAME]
        assert found is not None
        assert found.problem is not None
        assert found.problem[0] == "InferencePoolNotFound"
        operated.cluster.take(POOLS, "ADDED", pool_object())
        await operated.reconciler.settled()
        assert operated.capacities == {"a": 1000}

    operate(tale)


def test_a_policy_that_is_gone_is_deleted_from_the_feed_and_the_reports() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers=GIVEN)
        await operated.reconciler.settled()
        operated.policy(event="DELETED")
        await operated.reconciler.settled()
        assert operated.feed.standing(NAME) == Absent(Reason.DELETED)
        assert operated.found[NAME] is None

    operate(tale)


def test_a_policy_that_goes_before_its_first_answers_holds_up_nobody() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy()
        operated.pod()
        await asyncio.sleep(1)
        operated.policy(event="DELETED")
        await operated.reconciler.settled()
        assert asyncio.get_running_loop().time() < 1.2
        await asyncio.sleep(5)
        assert operated.published() is None

    operate(tale)


def test_policies_that_share_pods_are_told_of_each_other() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy("coder", workers=GIVEN)
        operated.policy("other", workers=GIVEN)
        operated.pod("a")
        operated.pod("b", ip="10.0.0.2")
        await operated.reconciler.settled()
        found = operated.found[NAME]
        assert found is not None
        assert found.overlaps == (Overlap("llm/other", 2, "a"),)
        assert operated.capacities == {"a": 1000, "b": 1000}, "both keep them"

    operate(tale)


def test_the_trouble_with_one_policy_does_not_become_that_of_others(caplog: pytest.LogCaptureFixture) -> None:
    async def tale(operated: Operated) -> None:
        publish = operated.feed.publish

        def broken(policy: str, *args: Any) -> Published:
            if policy == NAME:
                raise ValueError("a number that takes more than 64 bits")
            return publish(policy, *args)

        operated.feed.publish = broken  # type: ignore[method-assign, assignment]
        operated.policy("coder", workers=GIVEN)
        operated.policy("other", workers=GIVEN)
        await operated.reconciler.settled()
        assert operated.published() is None
        assert operated.published("llm/other") is not None

    operate(tale)
    assert "policy could not be looked at" in caplog.text


def test_a_pods_wrong_annotation_is_noted() -> None:
    async def tale(operated: Operated) -> None:
        operated.policy(workers=GIVEN)
        pod = pod_object()
        pod["metadata"]["annotations"] = {"thunderagent.io/active-ports": "8000,http"}
        operated.cluster.take(PODS, "ADDED", pod)
        await operated.reconciler.settled()
        found = operated.found[NAME]
        assert found is not None
        assert found.notes == ["pod a: annotation thunderagent.io/active-ports: 'http' is no port"]

    operate(tale)


def test_a_picker_is_given_a_moment_before_it_is_reported_to_lag() -> None:
    async def tale(operated: Operated) -> None:
        def picker(*, current: bool, refusal: str | None = None) -> None:
            found = Picker("epp-0", "0.1.0", "ipv4:10.0.0.9:1", None, current, refusal, None)
            operated.feed.pickers = lambda policy: (found,)  # type: ignore[method-assign]
            operated.reconciler.due(NAME)

        def live() -> tuple[int, list[bool]] | None:
            found = operated.found.get(NAME)
            return found and (len(found.workers), [picker.current for picker in found.pickers])

        operated.policy(workers=GIVEN)
        picker(current=True)
        await asyncio.sleep(0.2)
        assert live() == (0, [True])

        operated.pod("a")
        picker(current=False)
        await asyncio.sleep(0.8)
        assert live() == (0, [True]), "it may be on its way"
        picker(current=True)
        await asyncio.sleep(0.2)
        assert live() == (1, [True])

        picker(current=False)
        await asyncio.sleep(0.9)
        assert live() == (1, [True])
        await asyncio.sleep(0.3)
        assert live() == (1, [False])
        operated.pod("b", ip="10.0.0.2")
        await asyncio.sleep(0.2)
        assert live() == (2, [False]), "what lags for long holds up no report"

        picker(current=True)
        await asyncio.sleep(0.2)
        picker(current=False, refusal="not newer")
        await asyncio.sleep(0.2)
        assert live() == (2, [False]), "a refusal is no lag"

    operate(tale)


def test_a_picker_that_waits_for_a_good_spec_holds_up_no_report() -> None:
    async def tale(operated: Operated) -> None:
        waiting = Picker("epp-0", "0.1.0", "ipv4:10.0.0.9:1", None, False, None, None)
        operated.feed.pickers = lambda policy: (waiting,)  # type: ignore[method-assign]
        operated.policy(workers={})
        await asyncio.sleep(0.2)
        found = operated.found[NAME]
        assert found is not None
        assert found.problem is not None

    operate(tale)
