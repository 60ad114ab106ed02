"""kopf in its threads, against a mock of the API: what is passed on, and that it goes on whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import kmock
import pytest
import yaml

from support.kube_objects import pod_object, policy_object
from thunderagent_operator.api import PODS, POLICIES, Kind
from thunderagent_operator.handlers import Watches
from thunderagent_operator.selectors import PodSelector, Requirement

VLLM = PodSelector((Requirement("app", "In", ("vllm",)),))
LIMIT_SECONDS = 30.0


class Heard:
    """What the watches have passed on."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, str | None, str]] = asyncio.Queue()
        self.threads: set[bool] = set()
        self._loop = asyncio.get_running_loop()

    def deliver(self, kind: Kind, event: str | None, body: Any) -> None:
        self.threads.add(asyncio.get_running_loop() is self._loop)
        self.events.put_nowait((kind.plural, event, body["metadata"]["name"]))

    async def until(self, plural: str, event: str | None, name: str) -> None:
        """Wait for this event. Others may come before: the mock's watches begin with what is there."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while await self.events.get() != (plural, event, name):
                pass


class Cluster:
    """The mock as a cluster: objects are made and deleted over HTTP, so that watches hear of it."""

    def __init__(self, mock: kmock.KubernetesEmulator, client: aiohttp.ClientSession) -> None:
        self.mock = mock
        self._client = client

    async def create(self, kind: Kind, body: dict[str, Any]) -> None:
        async with self._client.post(kind.path("llm"), json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def delete(self, kind: Kind, name: str) -> None:
        async with self._client.delete(f"{kind.path('llm')}/{name}") as answer:
            assert answer.status == 200, await answer.text()

    async def until_watched(self, kind: Kind, times: int = 1) -> None:
        """Wait until there have been so many watches of a kind."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(self.watched(kind)) < times:  # noqa: ASYNC110 - the mock's own requests
                await asyncio.sleep(0.01)

    def watched(self, kind: Kind) -> list[dict[str, str]]:
        """The query of each watch of a kind."""
        return [
            dict(one.params) for one in self.mock["get"] if "watch" in one.params and one.url.path == kind.path("llm")
        ]


@pytest.fixture
async def cluster(
    kmock: kmock.KubernetesEmulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Cluster]:
    """A cluster with both kinds, to which a kubeconfig leads."""
    # kopf waits until discovery tells of the last two; it reads neither.
    for resource, kind in (
        ("thunderagent.io/v1alpha1/thunderagentpolicies", "ThunderAgentPolicy"),
        ("v1/pods", "Pod"),
        ("v1/namespaces", "Namespace"),
        ("apiextensions.k8s.io/v1/customresourcedefinitions", "CustomResourceDefinition"),
    ):
        kmock.resources[resource] = {"kind": kind, "namespaced": True, "verbs": {"list", "watch"}}
    server = str(kmock.url).rstrip("/")
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    async with aiohttp.ClientSession(server) as client:
        yield Cluster(kmock, client)


@pytest.fixture
async def heard() -> Heard:
    return Heard()


@pytest.fixture
async def watches(cluster: Cluster, heard: Heard) -> AsyncIterator[Watches]:
    made = Watches(["llm"], heard.deliver)
    yield made
    await made.stop()
    assert not any((made._pods.alive, made._objects is not None and made._objects.alive))


async def test_nothing_is_watched_at_first_and_that_is_healthy(watches: Watches, cluster: Cluster) -> None:
    assert watches.alive
    assert watches.covers(())
    assert not watches.covers({VLLM})
    assert len(cluster.mock) == 0


async def test_what_is_there_and_what_comes_and_goes_is_passed_on_in_the_main_loop(
    watches: Watches, cluster: Cluster, heard: Heard
) -> None:
    await cluster.create(POLICIES, policy_object("before"))
    await watches.watch({POLICIES})
    assert watches.kinds == {POLICIES}
    await heard.until("thunderagentpolicies", None, "before")
    await cluster.until_watched(POLICIES)
    await cluster.create(POLICIES, policy_object("after"))
    await heard.until("thunderagentpolicies", "ADDED", "after")
    await cluster.delete(POLICIES, "before")
    await heard.until("thunderagentpolicies", "DELETED", "before")
    assert heard.threads == {True}
    assert watches.alive


async def test_pods_are_watched_through_what_the_policies_select(
    watches: Watches, cluster: Cluster, heard: Heard
) -> None:
    await cluster.create(PODS, pod_object("a"))
    await watches.select({VLLM})
    assert watches.covers({VLLM})
    assert watches.pod_filter == "app=vllm"
    await heard.until("pods", None, "a")
    await cluster.until_watched(PODS)
    (query,) = cluster.watched(PODS)
    assert query["labelSelector"] == "app=vllm"


async def test_another_selection_is_another_watch(watches: Watches, cluster: Cluster, heard: Heard) -> None:
    await watches.select({VLLM})
    await cluster.until_watched(PODS)
    other = PodSelector((Requirement("app", "In", ("sglang",)),))
    await watches.select({VLLM, other})
    await cluster.until_watched(PODS, times=2)
    assert [query["labelSelector"] for query in cluster.watched(PODS)] == ["app=vllm", "app in (sglang,vllm)"]
    await watches.select(())
    assert watches.alive
    assert not watches._pods.alive


async def test_a_watch_can_be_begun_anew(watches: Watches, cluster: Cluster, heard: Heard) -> None:
    await cluster.create(POLICIES, policy_object())
    await watches.watch({POLICIES})
    await heard.until("thunderagentpolicies", None, "coder")
    await cluster.until_watched(POLICIES)
    await watches.begin_anew(POLICIES)
    await heard.until("thunderagentpolicies", None, "coder")


async def test_nothing_is_written(watches: Watches, cluster: Cluster, heard: Heard) -> None:
    await cluster.create(POLICIES, policy_object())
    await cluster.create(PODS, pod_object("a"))
    made = len(cluster.mock)
    await watches.watch({POLICIES})
    await heard.until("thunderagentpolicies", None, "coder")
    await watches.select({VLLM})
    await heard.until("pods", None, "a")
    assert {request.method.name for request in list(cluster.mock)[made:]} == {"GET"}
