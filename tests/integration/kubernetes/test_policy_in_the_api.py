"""The CRD as a real API server takes it, without the operator."""

from __future__ import annotations

from typing import Any

import pytest

from support.kube_client import KubeClient, Namespace, RefusedError

pytestmark = pytest.mark.asyncio(loop_scope="session")

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


async def test_the_kind_is_found_by_its_short_name_and_has_a_status_of_its_own(kube: KubeClient) -> None:
    found = await kube.get("/apis/thunderagent.io/v1alpha1")
    resources = {one["name"]: one for one in found["resources"]}
    assert set(resources) == {"thunderagentpolicies", "thunderagentpolicies/status"}
    policies = resources["thunderagentpolicies"]
    assert (policies["kind"], policies["namespaced"]) == ("ThunderAgentPolicy", True)
    assert (policies["shortNames"], policies["categories"]) == (["tap"], ["thunderagent"])


async def test_the_schema_is_taken_whole_and_structural(kube: KubeClient) -> None:
    crd = await kube.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/thunderagentpolicies.thunderagent.io")
    conditions = {one["type"]: one["status"] for one in crd["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}, "NonStructuralSchema would be here too"


async def test_what_is_left_out_is_filled_in(namespace: Namespace) -> None:
    policy = await namespace.create_policy()
    spec = policy["spec"]
    assert spec["topology"] == "Aggregated"
    assert spec["admission"]["policy"] == "Classic"
    assert spec["admission"]["pauseThreshold"] == 0.95
    assert spec["admission"]["schedulerInterval"] == "5s"
    assert spec["workers"]["engine"] == "auto"
    assert spec["workers"]["metrics"] == {"path": "/metrics", "scheme": "http"}
    assert spec["workers"]["probeInterval"] == "10s"


async def test_a_field_nobody_knows_is_dropped(namespace: Namespace) -> None:
    policy = await namespace.create_policy(surprise={"a": 1})
    assert "surprise" not in policy["spec"]


SELECTOR = {"matchLabels": {"app": "vllm"}}
BAD_SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "no workers": ({"workers": None}, "spec.workers"),
    "a port out of range": ({"workers": {"selector": SELECTOR, "targetPorts": [70000]}}, "spec.workers.targetPorts"),
    "no port": ({"workers": {"selector": SELECTOR, "targetPorts": []}}, "spec.workers.targetPorts"),
    "an unknown engine": (
        {"workers": {"selector": SELECTOR, "targetPorts": [8000], "engine": "abacus"}},
        "spec.workers.engine",
    ),
    "no capacity at all": (
        {"workers": {"selector": SELECTOR, "targetPorts": [8000], "capacityTokens": 0}},
        "spec.workers.capacityTokens",
    ),
    "a fraction above 1": ({"admission": {"pauseThreshold": 1.5}}, "spec.admission.pauseThreshold"),
    "a number for a duration": ({"admission": {"resumeTimeout": 30}}, "spec.admission.resumeTimeout"),
    "a duration without a unit": ({"admission": {"resumeTimeout": "30"}}, "spec.admission.resumeTimeout"),
    "an unknown topology": ({"topology": "Circular"}, "spec.topology"),
}


@pytest.mark.parametrize("case", BAD_SPECS)
async def test_a_bad_policy_is_refused_by_the_name_of_its_field(namespace: Namespace, case: str) -> None:
    spec, field = BAD_SPECS[case]
    with pytest.raises(RefusedError) as refused:
        await namespace.create_policy(**spec)
    assert refused.value.status == 422
    assert field in str(refused.value)


async def test_a_patch_of_the_status_leaves_the_spec_alone_and_the_reverse(namespace: Namespace) -> None:
    made = await namespace.create_policy()
    path = f"{namespace.policies}/coder"
    status = {"capacityTokens": 7}
    after = await namespace.client.patch(f"{path}/status", {"status": status, "spec": {"topology": "Disaggregated"}})
    assert after["status"] == status
    assert after["spec"] == made["spec"]
    assert after["metadata"]["generation"] == 1
    after = await namespace.client.patch(path, {"status": {"capacityTokens": 8}, "spec": {"topology": "Disaggregated"}})
    assert after["status"] == status
    assert after["spec"]["topology"] == "Disaggregated"
    assert after["metadata"]["generation"] == 2


async def test_a_status_that_is_none_is_refused(namespace: Namespace) -> None:
    await namespace.create_policy()
    with pytest.raises(RefusedError) as refused:
        await namespace.client.patch(f"{namespace.policies}/coder/status", {"status": {"capacityTokens": "many"}})
    assert refused.value.status == 422


async def test_the_table_tells_at_a_glance_whether_it_works(namespace: Namespace) -> None:
    await namespace.create_policy()
    condition = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {
        "conditions": [condition],
        "workers": {"total": 4, "live": 3, "capacityKnown": 3, "summary": "3/4"},
        "capacityTokens": 8948160,
        "pickers": {"connected": 1, "current": 1},
    }
    await namespace.client.patch(f"{namespace.policies}/coder/status", {"status": status})
    table = await namespace.client.get(namespace.policies, accept=TABLE)
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Accepted", "Workers", "Capacity", "Pickers", "Age"]
    (row,) = table["rows"]
    assert row["cells"][:5] == ["coder", "True", "3/4", 8948160, 1]
