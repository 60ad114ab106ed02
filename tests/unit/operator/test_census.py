from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import aiohttp
import pytest
import virtual_time
from kubernetes.aio.client import ApiException

from support.kube_objects import pod_object, policy_object, pool_object
from thunderagent_operator.api import PODS, POLICIES, POOLS, Kind, Listed
from thunderagent_operator.census import INTERVAL_SECONDS, STUCK_SECONDS, Census
from thunderagent_operator.cluster import Cluster
from thunderagent_operator.selectors import PodSelector

Object = dict[str, Any]
AWAY = aiohttp.ClientConnectionError("refused")


class Api:
    """What the API has, and when it was asked for names of which kind."""

    def __init__(self) -> None:
        self.kinds = {POLICIES, POOLS}
        self.objects: dict[Kind, list[Object]] = {POLICIES: [], POOLS: [], PODS: []}
        self.problem: Exception | None = None
        self.asked: list[tuple[float, str, str | None, str]] = []

    async def served(self, kinds: Collection[Kind]) -> set[Kind]:
        if self.problem is not None:
            raise self.problem
        return self.kinds & set(kinds)

    async def names(self, kind: Kind, namespace: str | None, label_selector: str = "") -> dict[str, Listed]:
        self.asked.append((round(asyncio.get_running_loop().time(), 2), kind.plural, namespace, label_selector))
        found = [one["metadata"] for one in self.objects[kind]]
        return {f"{one['namespace']}/{one['name']}": Listed(one["uid"], one["resourceVersion"]) for one in found}

    def rounds(self) -> list[float]:
        """When there was a look at the policies."""
        return [when for when, kind, _, _ in self.asked if kind == "thunderagentpolicies"]


class Watches:
    """Delivers a list at once when it begins, unless it is ``deaf``."""

    def __init__(self, api: Api, cluster: Cluster) -> None:
        self._api = api
        self._cluster = cluster
        self.deaf = False
        self.kinds: frozenset[Kind] = frozenset()
        self.pod_filter = ""
        self.selected: frozenset[PodSelector] = frozenset()
        self.begun: list[tuple[float, str]] = []

    def covers(self, selectors: Collection[PodSelector]) -> bool:
        return self.selected.issuperset(selectors)

    async def watch(self, kinds: Collection[Kind]) -> None:
        self.kinds = frozenset(kinds)
        for kind in sorted(kinds, key=lambda kind: kind.plural):
            self._begin(kind)

    async def select(self, selectors: Collection[PodSelector]) -> None:
        self.selected = frozenset(selectors)
        self.pod_filter = "app=vllm"
        self._begin(PODS)

    async def begin_anew(self, kind: Kind) -> None:
        self._begin(kind)

    def _begin(self, kind: Kind) -> None:
        self.begun.append((round(asyncio.get_running_loop().time(), 2), kind.plural))
        if not self.deaf:
            for one in self._api.objects[kind]:
                self._cluster.take(kind, None, one)


class Counted:
    """A census and all it deals with."""

    def __init__(self, *namespaces: str) -> None:
        clock = asyncio.get_running_loop().time
        self.api = Api()
        self.cluster = Cluster(lambda policy: None, clock)
        self.watches = Watches(self.api, self.cluster)
        self.caught_up: list[float] = []
        self.census = Census(
            self.api,  # type: ignore[arg-type]
            self.cluster,
            self.watches,  # type: ignore[arg-type]
            namespaces,
            lambda: self.caught_up.append(round(clock(), 2)),
        )

    def add(self, kind: Kind, body: Object) -> None:
        """Make an object of which no watch has told yet."""
        self.api.objects[kind].append(body)

    def see(self, kind: Kind, body: Object) -> None:
        """Make an object and have the watch tell of it."""
        self.add(kind, body)
        self.cluster.take(kind, "ADDED", body)


def counted(story: Callable[[Counted], Awaitable[None]], *namespaces: str) -> Counted:
    async def tell() -> None:
        nonlocal told
        told = Counted(*namespaces)
        running = asyncio.create_task(told.census.run())
        await story(told)
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()

    told: Counted = None  # type: ignore[assignment]
    virtual_time.run(tell())
    return told


def test_everything_is_known_once_the_watches_have_delivered_what_is_listed() -> None:
    async def story(told: Counted) -> None:
        told.add(POLICIES, policy_object())
        told.add(PODS, pod_object("a"))
        await told.census.synced.wait()
        assert set(told.cluster.policies["llm/coder"].pods) == {"a"}
        assert told.census.complete

    told = counted(story)
    assert told.caught_up == [0.0]
    assert told.watches.begun == [(0.0, "inferencepools"), (0.0, "thunderagentpolicies"), (0.0, "pods")]


def test_nothing_is_known_while_a_watch_has_not_delivered_a_policy() -> None:
    async def story(told: Counted) -> None:
        told.watches.deaf = True
        told.add(POLICIES, policy_object())
        await asyncio.sleep(3.1)
        assert not told.census.synced.is_set()
        assert not told.census.complete
        told.cluster.take(POLICIES, "ADDED", policy_object())
        told.watches.deaf = False
        await told.census.synced.wait()

    assert counted(story).caught_up == [3.25]


def test_an_empty_cluster_is_known_at_once() -> None:
    async def story(told: Counted) -> None:
        await told.census.synced.wait()

    told = counted(story)
    assert told.caught_up == [0.0]
    assert [kind for _, kind, _, _ in told.api.asked] == ["thunderagentpolicies", "inferencepools"], "no pods"


def test_names_are_listed_once_a_minute_and_when_a_watch_has_begun_anew() -> None:
    async def story(told: Counted) -> None:
        await asyncio.sleep(70)
        told.census.soon()
        await asyncio.sleep(80)

    assert counted(story).api.rounds() == [0.0, 60.0, 70.0, 130.0]


def test_what_is_gone_unseen_is_forgotten() -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        told.see(PODS, pod_object("a"))
        told.see(PODS, pod_object("b"))
        await asyncio.sleep(10)
        told.api.objects[PODS].pop(0)
        told.census.soon()
        await asyncio.sleep(1)
        assert set(told.cluster.policies["llm/coder"].pods) == {"b"}
        told.api.objects[POLICIES].clear()
        told.census.soon()
        await asyncio.sleep(1)
        assert told.cluster.policies == {}

    counted(story)


def test_pods_are_counted_by_the_filter_they_are_watched_by_in_each_namespace() -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        await told.census.synced.wait()

    pods = [
        (namespace, filter) for _, kind, namespace, filter in counted(story, "llm", "a").api.asked if kind == "pods"
    ]
    assert pods == [("a", "app=vllm"), ("llm", "app=vllm")]


def test_a_new_selector_is_watched_and_the_operator_stays_ready() -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        await asyncio.sleep(5)
        workers = {"selector": {"matchLabels": {"app": "sglang"}}, "targetPorts": [8000]}
        told.see(POLICIES, policy_object("second", workers=workers))
        told.add(PODS, pod_object("a", labels={"app": "sglang"}))
        told.census.soon()
        await asyncio.sleep(0.1)
        assert told.census.complete
        await told.census.synced.wait()
        assert set(told.cluster.policies["llm/second"].pods) == {"a"}

    told = counted(story)
    assert [when for when, kind in told.watches.begun if kind == "pods"] == [0.0, 5.0]
    assert told.caught_up == [0.0, 5.0], "the policies are looked at again"


def test_a_crd_that_is_not_there_is_waited_for() -> None:
    async def story(told: Counted) -> None:
        told.api.kinds = set()
        await asyncio.sleep(5)
        assert not told.census.complete
        assert told.census.listed_age_seconds() is None
        assert told.watches.begun == []
        told.api.kinds = {POLICIES}
        told.add(POLICIES, policy_object())
        await told.census.synced.wait()
        assert set(told.cluster.policies) == {"llm/coder"}

    assert counted(story).caught_up == [6.0]


def test_pools_whose_crd_comes_later_are_looked_for_as_soon_as_a_policy_needs_one() -> None:
    async def story(told: Counted) -> None:
        told.api.kinds = {POLICIES}
        told.see(POLICIES, policy_object())
        await asyncio.sleep(10)
        told.see(POLICIES, policy_object("pooled", workers={"inferencePool": "coder"}))
        told.api.kinds = {POLICIES, POOLS}
        told.add(POOLS, pool_object())
        await asyncio.sleep(5)
        assert told.cluster.policies["llm/pooled"].problem is None

    assert (counted(story).watches.begun[-1])[1] in ("pods", "thunderagentpolicies")


@pytest.mark.parametrize("left", [{POLICIES}, {POOLS}, set()])
def test_a_kind_whose_crd_is_gone_is_watched_no_longer_and_again_when_it_is_back(left: set[Kind]) -> None:
    async def story(told: Counted) -> None:
        await asyncio.sleep(1)
        assert told.watches.kinds == {POLICIES, POOLS}
        told.api.kinds = left
        told.census.soon()
        await asyncio.sleep(1)
        assert told.watches.kinds == left
        told.api.kinds = {POLICIES, POOLS}
        told.census.soon()
        await asyncio.sleep(3)
        assert told.watches.kinds == {POLICIES, POOLS}

    counted(story)


def test_a_watch_that_delivers_nothing_of_what_is_there_is_begun_anew() -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        await told.census.synced.wait()
        told.add(PODS, pod_object("a"))
        told.census.soon()
        await asyncio.sleep(30)
        assert set(told.cluster.policies["llm/coder"].pods) == {"a"}

    begun = counted(story).watches.begun
    assert [kind for _, kind in begun] == ["inferencepools", "thunderagentpolicies", "pods", "pods"]
    assert begun[-1][0] == pytest.approx(15.25, abs=0.3)


def test_a_watch_that_delivers_slowly_is_let_be() -> None:
    async def story(told: Counted) -> None:
        told.watches.deaf = True
        told.see(POLICIES, policy_object())
        bodies = [pod_object(f"pod-{index}") for index in range(10)]
        for body in bodies:
            told.add(PODS, body)
        for body in bodies:
            await asyncio.sleep(10)
            told.cluster.take(PODS, None, body)
        await told.census.synced.wait()

    assert [kind for _, kind in counted(story).watches.begun].count("pods") == 1


def test_a_watch_that_has_died_is_begun_anew_when_something_has_changed_unheard() -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        told.see(PODS, pod_object("a"))
        await asyncio.sleep(70)
        told.api.objects[PODS] = [pod_object("a", version="2", ready=False)]
        await asyncio.sleep(INTERVAL_SECONDS + 2 * STUCK_SECONDS)
        (rank,) = told.cluster.policies["llm/coder"].pods["a"].ranks
        assert not rank.worker.live

    assert [kind for _, kind in counted(story).watches.begun].count("pods") == 2


def test_a_watch_that_is_a_moment_behind_a_list_is_let_be() -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        told.see(PODS, pod_object("a"))
        for version in range(2, 200):
            await asyncio.sleep(1)
            told.api.objects[PODS] = [pod_object("a", version=str(version))]
            await asyncio.sleep(1)
            told.cluster.take(PODS, "MODIFIED", pod_object("a", version=str(version)))

    assert [kind for _, kind in counted(story).watches.begun].count("pods") == 1


@pytest.mark.parametrize("problem", [AWAY, TimeoutError(), ApiException(status=403, reason="Forbidden")])
def test_an_api_that_does_not_answer_is_asked_again_and_what_is_known_stays(problem: Exception) -> None:
    async def story(told: Counted) -> None:
        told.see(POLICIES, policy_object())
        told.see(PODS, pod_object("a"))
        await asyncio.sleep(1)
        told.api.problem = problem
        told.census.soon()
        await asyncio.sleep(20)
        assert told.census.complete
        assert told.census.listed_age_seconds() == pytest.approx(21, abs=0.5)
        assert set(told.cluster.policies["llm/coder"].pods) == {"a"}
        told.api.problem = None
        await asyncio.sleep(2.5)
        age = told.census.listed_age_seconds()
        assert age is not None
        assert age <= 2.5

    counted(story)
