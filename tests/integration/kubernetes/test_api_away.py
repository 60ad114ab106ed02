"""An API server that is killed and comes back: what the operator and the pickers do meanwhile and after."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from support.kube_api import KubeApi
from support.kube_client import Namespace
from support.operator_process import OperatorProcess
from support.picker_process import running_following_picker

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKERS = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [8000], "capacityTokens": 1000}


def names(state: dict[str, Any]) -> list[str]:
    return [worker["worker"] for worker in state["workers"]]


async def test_watches_go_on_after_the_api_was_away(
    kube_api: KubeApi, operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers=WORKERS)
    await namespace.create_pod("a", "10.0.0.1")
    async with running_following_picker(operator.feed, f"{namespace.name}/coder") as picker:
        await picker.until_ready()
        await picker.until(lambda state: names(state) == ["a"])
        async with away(kube_api):
            assert (await picker.get("/readyz"))[0] == 200
            assert (await operator.get("/healthz"))[0] == 200
        await namespace.create_pod("b", "10.0.0.2")
        await namespace.patch_policy(admission={"pauseThreshold": 0.9})
        await picker.until(lambda state: names(state) == ["a", "b"] and state["policy"]["pause_threshold"] == 0.9)
        await namespace.until_policy(lambda policy: policy.programmed and policy.workers == "2/2")


async def test_what_was_deleted_while_the_api_was_away_is_noticed(
    kube_api: KubeApi, operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers=WORKERS)
    await namespace.create_pod("a", "10.0.0.1")
    await namespace.until_policy(lambda policy: policy.workers == "1/1")
    # No watch will ever tell: the revisions between are compacted, and the list after them has no pod to mention.
    async with away(kube_api), aiohttp.ClientSession(kube_api.etcd_url) as etcd:
        deleted = await ask(etcd, "/v3/kv/deleterange", key=encoded(f"/registry/pods/{namespace.name}/a"))
        assert deleted["deleted"] == "1"
        await ask(etcd, "/v3/kv/compaction", revision=deleted["header"]["revision"], physical=True)
    await namespace.until_policy(lambda policy: policy.workers == "0/0")
    await namespace.create_pod("b", "10.0.0.2")
    await namespace.until_policy(lambda policy: policy.workers == "1/1")


@contextlib.asynccontextmanager
async def away(kube_api: KubeApi) -> AsyncIterator[None]:
    """Kill the API server, and have it again at the end of the block."""
    kube_api.kill()
    try:
        yield
    finally:
        await asyncio.to_thread(kube_api.start)


async def ask(etcd: aiohttp.ClientSession, path: str, **request: Any) -> Any:
    async with etcd.post(path, json=request) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def encoded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()
