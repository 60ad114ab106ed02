"""An operator that serves one namespace and may do nothing in any other."""

from __future__ import annotations

import pytest

from support.kube_api import NAMESPACED_OPERATOR, OPERATOR_NAMESPACE, KubeApi
from support.kube_client import KubeClient, Namespace, kube_client, own_namespace
from support.operator_process import running_operator
from support.operator_roles import bind_to
from support.picker_process import running_following_picker

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKERS = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [8000], "capacityTokens": 1000}


async def test_everything_works_in_the_namespace_that_is_served_and_nothing_elsewhere(
    kube_api: KubeApi, kube: KubeClient, namespace: Namespace
) -> None:
    await bind_to(kube, namespace)
    options = ("--namespace", namespace.name, "--lease-namespace", OPERATOR_NAMESPACE, "--lease-name", "namespaced")
    async with (
        own_namespace(kube) as other,
        running_operator(kube_api.kubeconfig(NAMESPACED_OPERATOR), *options) as operator,
    ):
        await other.create_policy(workers=WORKERS)
        await namespace.create_policy(workers=WORKERS)
        await namespace.create_pod("a", "10.0.0.1")
        await operator.until_serving()
        async with (
            running_following_picker(operator.feed, f"{namespace.name}/coder") as picker,
            running_following_picker(operator.feed, f"{other.name}/coder") as lost,
        ):
            await picker.until_ready()
            await lost.until_unready("policy_not_found")
            policy = await namespace.until_policy(lambda policy: policy.programmed and policy.workers == "1/1")
            assert policy.condition("Accepted") == ("True", "Accepted")
        await namespace.until_event("Normal", "WorkersLive")
        assert operator.troubles == []
        assert [line for line in operator.log if line["level"] == "warning"] == []

    async with kube_client(kube_api, NAMESPACED_OPERATOR) as client:
        for path in (
            "/api/v1/pods",
            other.pods,
            other.policies,
            other.pools,
            "/apis/thunderagent.io/v1alpha1/thunderagentpolicies",
            f"/api/v1/namespaces/{namespace.name}",
            f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods",
        ):
            assert await client.status("GET", path, None) == 403, path
        assert await client.status("PATCH", f"{other.policies}/coder/status", {"status": {}}) == 403
        assert await client.status("POST", f"/api/v1/namespaces/{other.name}/events", {}) == 403
