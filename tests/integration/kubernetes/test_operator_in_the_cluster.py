"""The operator against a real API server: what it finds, what it writes, and what it leaves alone.

It serves the whole cluster, with the rights that the chart gives it.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from support.kube_api import OPERATOR, KubeApi
from support.kube_client import CRDS, KubeClient, Namespace, kube_client
from support.operator_process import OperatorProcess
from support.operator_roles import CASES
from support.picker_process import running_following_picker

pytestmark = pytest.mark.asyncio(loop_scope="session")

SELECTOR = {"matchLabels": {"app": "vllm"}}


def workers(**more: Any) -> dict[str, Any]:
    """Of a capacity that is given: nothing listens at these pods' addresses."""
    return {"selector": SELECTOR, "targetPorts": [8000], "capacityTokens": 1000, **more}


async def test_a_policy_and_its_pods_become_a_snapshot_and_a_status(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers=workers())
    await namespace.create_pod("a", "10.0.0.1")
    await namespace.create_pod("b", "10.0.0.2")
    await namespace.create_pod("other", "10.0.0.3", labels={"app": "sidecar"})
    async with running_following_picker(operator.feed, f"{namespace.name}/coder") as picker:
        await picker.until_ready()
        policy = await namespace.until_policy(lambda policy: policy.programmed and policy.workers == "2/2")
        state = await picker.until(lambda state: state["snapshot"]["id"] == policy.status["snapshot"]["id"])
    assert [(worker["worker"], worker["endpoint"]) for worker in state["workers"]] == [
        ("a", "10.0.0.1:8000"),
        ("b", "10.0.0.2:8000"),
    ]
    assert policy.condition("Accepted") == ("True", "Accepted")
    assert policy.condition("WorkersReady") == ("True", "WorkersLive")
    assert policy.condition("CapacityKnown") == ("True", "CapacityKnown")
    assert policy.status["observedGeneration"] == 1
    assert policy.status["workers"] == {"total": 2, "live": 2, "capacityKnown": 2, "summary": "2/2"}
    assert policy.status["capacityTokens"] == 2000
    assert policy.status["pickers"] == {"connected": 1, "current": 1}


async def test_each_change_of_a_condition_is_an_event_on_the_policy(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers=workers())
    await namespace.until_policy(lambda policy: policy.workers == "0/0")
    await namespace.create_pod("a", "10.0.0.1")
    await namespace.until_policy(lambda policy: policy.workers == "1/1")
    await namespace.until_event("Normal", "WorkersLive")
    listed = await namespace.events()
    assert ("Normal", "Accepted") in listed
    assert listed.index(("Warning", "NoWorkers")) < listed.index(("Normal", "WorkersLive"))


async def test_a_policy_that_cannot_be_used_says_which_field_is_wrong_and_the_last_good_one_stays(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers=workers(), admission={"pauseThreshold": 0.9})
    async with running_following_picker(operator.feed, f"{namespace.name}/coder") as picker:
        good = await namespace.until_policy(lambda policy: policy.programmed)
        # Each number is within its bounds; that they go together is said in CEL, which this API server has not.
        await namespace.patch_policy(admission={"pauseThreshold": 0.5, "pauseTarget": 0.6})
        bad = await namespace.until_policy(lambda policy: policy.condition("Accepted") == ("False", "InvalidSpec"))
        assert "spec.admission" in bad.message("Accepted")
        assert "pauseTarget" in bad.message("Accepted")
        assert bad.status["observedGeneration"] == 2
        assert bad.status["snapshot"] == good.status["snapshot"]
        assert (await picker.state())["policy"]["pause_threshold"] == 0.9
        await namespace.patch_policy(admission={"pauseThreshold": 0.7})
        await namespace.until_policy(lambda policy: policy.condition("Accepted") == ("True", "Accepted"))
        await picker.until(lambda state: state["policy"]["pause_threshold"] == 0.7)


async def test_a_bad_policy_that_was_never_good_has_no_snapshot(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers={"selector": SELECTOR})
    policy = await namespace.until_policy(lambda policy: policy.condition("Programmed") is not None)
    assert policy.condition("Accepted") == ("False", "InvalidSpec")
    assert "targetPorts" in policy.message("Accepted")
    assert policy.condition("Programmed") == ("False", "NoSnapshot")
    assert "snapshot" not in policy.status


async def test_a_picker_of_a_policy_that_does_not_exist_is_told_and_followed_up(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    async with running_following_picker(operator.feed, f"{namespace.name}/coder") as picker:
        await picker.until_unready("policy_not_found")
        await namespace.create_policy(workers=workers())
        await picker.until_ready()
        await namespace.delete_policy()
        await picker.until_unready("policy_deleted")
        await namespace.create_policy(workers=workers())
        await picker.until_ready()


async def test_policies_that_select_one_pod_both_keep_it_and_both_say_so(
    operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy("first", workers=workers())
    await namespace.create_pod("a", "10.0.0.1")
    await namespace.until_policy(lambda policy: policy.workers == "1/1", "first")
    await namespace.create_policy("second", workers=workers(capacityTokens=2000))
    overlapping = ("True", "OverlappingWorkers")
    second = await namespace.until_policy(lambda policy: policy.condition("Accepted") == overlapping, "second")
    first = await namespace.until_policy(lambda policy: policy.condition("Accepted") == overlapping, "first")
    assert (first.workers, second.workers) == ("1/1", "1/1")
    assert f"{namespace.name}/second" in first.message("Accepted")
    assert f"{namespace.name}/first" in second.message("Accepted")
    await namespace.delete_policy("second")
    await namespace.until_policy(lambda policy: policy.condition("Accepted") == ("True", "Accepted"), "first")


async def test_a_pool_may_be_absent_appear_change_and_go(
    operator: OperatorProcess, kube: KubeClient, namespace: Namespace
) -> None:
    await namespace.create_policy(workers={"inferencePool": "coder", "capacityTokens": 1000})
    absent = await namespace.until_policy(lambda policy: policy.condition("Accepted") is not None)
    assert absent.condition("Accepted") == ("False", "InferencePoolNotFound")
    assert "spec.workers.inferencePool" in absent.message("Accepted")
    await namespace.create_pod("a", "10.0.0.1", labels={"app": "sglang"})
    await namespace.create_pod("b", "10.0.0.2")
    # The operator has started without the CRD.
    await kube.install(yaml.safe_load((CASES / "inferencepool-crd.yaml").read_text()))
    await namespace.create_pool("coder", {"app": "sglang"}, ports=[8000, 8001])
    found = await namespace.until_policy(lambda policy: policy.workers == "2/2")
    assert found.condition("Accepted") == ("True", "Accepted")
    await namespace.patch_pool("coder", {"app": "vllm"}, ports=[8000])
    await namespace.until_policy(lambda policy: policy.workers == "1/1")
    await namespace.delete_pool("coder")
    gone = await namespace.until_policy(lambda policy: policy.condition("Accepted") != ("True", "Accepted"))
    assert gone.condition("Accepted") == ("False", "InferencePoolNotFound")
    assert gone.workers == "1/1", "the last good snapshot stays in force"


async def test_nothing_but_the_status_is_written(operator: OperatorProcess, namespace: Namespace) -> None:
    policy = await namespace.create_policy(workers=workers())
    pod = await namespace.create_pod("a", "10.0.0.1")
    written = await namespace.until_policy(lambda policy: policy.workers == "1/1")
    assert await namespace.client.get(f"{namespace.pods}/a") == pod, "to the resourceVersion"
    metadata = written.body["metadata"]
    assert metadata["generation"] == 1
    assert "finalizers" not in metadata
    assert "annotations" not in metadata
    assert written.body["spec"] == policy["spec"]


async def test_the_operator_may_do_no_more_than_it_must(
    kube_api: KubeApi, operator: OperatorProcess, namespace: Namespace
) -> None:
    await namespace.create_policy(workers=workers())
    await namespace.create_pod("a", "10.0.0.1")
    policy, pod = f"{namespace.policies}/coder", f"{namespace.pods}/a"
    other_lease = "/apis/coordination.k8s.io/v1/namespaces/thunderagent/leases/another"
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/thunderagent-operator"
    refused = [
        ("GET", pod, None),
        ("PATCH", pod, {"metadata": {"annotations": {"a": "b"}}}),
        ("PATCH", pod, {"metadata": {"finalizers": ["thunderagent.io/worker"]}}),
        ("PATCH", f"{pod}/status", {"status": {"phase": "Failed"}}),
        ("DELETE", pod, None),
        ("POST", namespace.pods, {"metadata": {"name": "b"}}),
        ("PATCH", policy, {"metadata": {"finalizers": ["thunderagent.io/policy"]}}),
        ("PATCH", policy, {"spec": {"topology": "Disaggregated"}}),
        ("DELETE", policy, None),
        ("POST", namespace.policies, {"metadata": {"name": "b"}}),
        ("GET", "/api/v1/namespaces", None),
        ("GET", f"/api/v1/namespaces/{namespace.name}/secrets", None),
        ("GET", f"/api/v1/namespaces/{namespace.name}/configmaps", None),
        ("GET", f"/api/v1/namespaces/{namespace.name}/events", None),
        ("GET", "/api/v1/nodes", None),
        ("GET", CRDS, None),
        ("PATCH", f"{CRDS}/thunderagentpolicies.thunderagent.io", {"metadata": {"labels": {"a": "b"}}}),
        ("DELETE", f"{CRDS}/thunderagentpolicies.thunderagent.io", None),
        ("GET", other_lease, None),
        ("PATCH", other_lease, {"spec": {"holderIdentity": "me"}}),
        ("GET", namespace.lease, None),
        ("PATCH", role, {"metadata": {"labels": {"a": "b"}}}),
    ]
    async with kube_client(kube_api, OPERATOR) as client:
        answers = {f"{method} {path}": await client.status(method, path, body) for method, path, body in refused}
    assert {request: status for request, status in answers.items() if status != 403} == {}
