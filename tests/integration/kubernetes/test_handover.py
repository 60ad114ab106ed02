"""Two operators, one Lease: who feeds, and what the pickers see when that changes."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import pytest

from support.kube_api import ADMIN, KubeApi
from support.kube_client import Namespace
from support.kube_service import running_service
from support.operator_process import OperatorProcess, running_operator
from support.picker_process import PickerProcess, running_following_picker

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKERS = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [8000], "capacityTokens": 1000}


def applied_ids(picker: PickerProcess) -> list[int]:
    return [line["snapshot"] for line in picker.log if line["event"] == "snapshot in force"]


async def test_the_standby_takes_over_and_no_picker_sees_an_id_go_back(kube_api: KubeApi, namespace: Namespace) -> None:
    await namespace.create_policy(workers=WORKERS)
    await namespace.create_pod("a", "10.0.0.1")

    async with AsyncExitStack() as stack:

        async def start(name: str) -> OperatorProcess:
            options = ("--namespace", namespace.name, "--lease-namespace", namespace.name)
            running = running_operator(kube_api.kubeconfig(ADMIN), *options, pod_name=name)
            return await stack.enter_async_context(running)

        first = await start("first")
        await first.until_serving()
        second = await start("second")
        service = await stack.enter_async_context(running_service(first.feed_port, second.feed_port))
        picker = await stack.enter_async_context(
            running_following_picker(service.address, f"{namespace.name}/coder", "--log-level", "info,feed=debug")
        )
        await picker.until_ready()
        await second.until_status("/readyz", 200)
        assert await holder(namespace) == "first"
        assert not second.has_logged("leading")

        killed = time.monotonic()
        before = len(picker.log)
        await first.kill()
        await second.until_serving()
        served = time.monotonic() - killed
        await picker.logged("following the operator", after=before)
        print(f"after SIGKILL of the leader: the standby feeds after {served:.1f} s, ", end="")
        print(f"the picker follows it after {time.monotonic() - killed:.1f} s")
        assert (await picker.get("/readyz"))[0] == 200, "and it was all the time"
        assert await holder(namespace) == "second"
        await namespace.create_pod("b", "10.0.0.2")
        await picker.until(lambda state: len(state["workers"]) == 2)

        third = await start("third")
        service.backends = [second.feed_port, third.feed_port]
        await third.until_status("/readyz", 200)
        ended = time.monotonic()
        before = len(picker.log)
        assert await second.terminate() == 0
        await third.until_serving()
        served = time.monotonic() - ended
        await picker.logged("following the operator", after=before)
        print(f"after SIGTERM of the leader: the standby feeds after {served:.1f} s, ", end="")
        print(f"the picker follows it after {time.monotonic() - ended:.1f} s")
        assert second.has_logged("stopped")
        assert await holder(namespace) == "third"
        await namespace.delete_pod("a")
        await picker.until(lambda state: [worker["worker"] for worker in state["workers"]] == ["b"])
        await namespace.until_policy(lambda policy: policy.programmed and policy.workers == "1/1")

        ids = applied_ids(picker)
        assert ids == sorted(set(ids)), "each is newer than the one before"
        assert not picker.has_logged("snapshot refused; the last one stays")
        for operator in (first, second, third):
            assert operator.troubles == []


async def holder(namespace: Namespace) -> str:
    lease = await namespace.client.get(namespace.lease)
    return str(lease["spec"]["holderIdentity"])
