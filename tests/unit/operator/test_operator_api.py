from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kmock
import pytest
import yaml
from kubernetes.aio import client
from kubernetes.aio.client import ApiException
from kubernetes.aio.config import ConfigException

from support.kube_objects import policy_object
from thunderagent_operator.api import PODS, POLICIES, POOLS, Api, ApiError, Listed, connect, error_text

# One that answers as it is told and nothing by itself.
pytestmark = pytest.mark.kmock(cls=kmock.RawHandler)

GROUPS = {
    "groups": [
        {"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]},
        {"name": "thunderagent.io", "versions": [{"groupVersion": "thunderagent.io/v1alpha1", "version": "v1alpha1"}]},
        {"name": "inference.networking.k8s.io", "versions": [{"groupVersion": "x", "version": "v1alpha2"}]},
    ]
}
POLICY_RESOURCES = {"resources": [{"name": "thunderagentpolicies"}, {"name": "thunderagentpolicies/status"}]}


@pytest.fixture
async def api(kmock: kmock.RawHandler) -> AsyncIterator[Api]:
    configuration = client.Configuration(host=str(kmock.url).rstrip("/"))
    async with client.ApiClient(configuration) as connected:
        yield Api(connected, timeout_seconds=0.5)


def page(*names: str, next: str | None = None) -> dict[str, Any]:
    items = [
        {"metadata": {"namespace": "llm", "name": name, "uid": f"uid-{name}", "resourceVersion": "7"}} for name in names
    ]
    return {"metadata": {"continue": next} if next else {}, "items": items}


@pytest.mark.parametrize(
    ("kind", "namespace", "path"),
    [
        (PODS, "llm", "/api/v1/namespaces/llm/pods"),
        (PODS, None, "/api/v1/pods"),
        (POLICIES, "llm", "/apis/thunderagent.io/v1alpha1/namespaces/llm/thunderagentpolicies"),
        (POOLS, None, "/apis/inference.networking.k8s.io/v1/inferencepools"),
    ],
)
async def test_names_are_those_of_a_namespace_or_of_all(
    kmock: kmock.RawHandler, api: Api, kind: Any, namespace: str | None, path: str
) -> None:
    kmock[f"get {path}"] << page("a", "b")
    assert await api.names(kind, namespace) == {"llm/a": Listed("uid-a", "7"), "llm/b": Listed("uid-b", "7")}
    (request,) = kmock["get"]
    assert request.headers["Accept"].startswith("application/json;as=PartialObjectMetadataList")


async def test_names_are_listed_page_by_page_through_the_filter(kmock: kmock.RawHandler, api: Api) -> None:
    kmock["get /api/v1/pods?continue=rest"] << page("c")
    kmock["get /api/v1/pods"] << page("a", "b", next="rest")
    assert set(await api.names(PODS, None, "app in (vllm,sglang)")) == {"llm/a", "llm/b", "llm/c"}
    first, second = kmock["get /api/v1/pods"]
    assert dict(first.params) == {"limit": "500", "labelSelector": "app in (vllm,sglang)"}
    assert dict(second.params) == {"limit": "500", "labelSelector": "app in (vllm,sglang)", "continue": "rest"}


async def test_a_list_of_nothing_has_no_names(kmock: kmock.RawHandler, api: Api) -> None:
    kmock["get /api/v1/pods"] << {"metadata": {}, "items": None}
    assert await api.names(PODS, None) == {}


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
async def test_a_refusal_is_an_error_with_its_status(kmock: kmock.RawHandler, api: Api, status: int) -> None:
    kmock["get /api/v1/pods"] << status
    with pytest.raises(ApiException) as refused:
        await api.names(PODS, None)
    assert refused.value.status == status


async def test_a_refusal_says_which_right_it_takes(kmock: kmock.RawHandler, api: Api) -> None:
    forbidden = 'pods is forbidden: User "system:serviceaccount:a:b" cannot list resource "pods"'
    kmock["get /api/v1/pods"] << 403 << {"kind": "Status", "message": forbidden, "code": 403}
    with pytest.raises(ApiException) as refused:
        await api.names(PODS, None)
    assert error_text(refused.value) == f"403 {forbidden}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ApiException(status=502, reason="Bad Gateway", body="<html>\n502"), "502 Bad Gateway"),
        (ApiException(status=503, reason="Unavailable", body='{"message": null}'), "503 Unavailable"),
        (ApiException(status=422, reason="Invalid", body='{"message": "is\\ninvalid"}'), "422 is invalid"),
        (ApiException(status=404, reason="no CRD"), "404 no CRD"),
        (TimeoutError("late"), "TimeoutError: late"),
    ],
)
def test_whatever_went_wrong_is_one_line(error: Exception, text: str) -> None:
    assert error_text(error) == text


@pytest.mark.parametrize("answer", [b"<html>502 Bad Gateway</html>", b"", b"[]", b'{"items": [{}]}', b'{"metadata'])
async def test_what_the_api_would_not_answer_is_an_error_like_others(
    kmock: kmock.RawHandler, api: Api, answer: bytes
) -> None:
    kmock["get /api/v1/pods"] << answer
    with pytest.raises(ApiException, match="answers what the API would not"):
        await api.names(PODS, None)


async def test_an_api_that_does_not_answer_is_given_up(kmock: kmock.RawHandler, api: Api) -> None:
    kmock["get /api/v1/pods"] << (lambda: asyncio.sleep(60))
    with pytest.raises(ApiError):
        await api.names(PODS, None)


async def test_an_api_that_is_away_is_an_error_like_others() -> None:
    async with client.ApiClient(client.Configuration(host="http://127.0.0.1:1")) as nowhere:
        with pytest.raises(ApiError):
            await Api(nowhere).names(PODS, None)


async def test_a_kind_is_served_when_discovery_lists_its_group_version_and_name(
    kmock: kmock.RawHandler, api: Api
) -> None:
    kmock["get /apis"] << GROUPS
    kmock["get /apis/thunderagent.io/v1alpha1"] << POLICY_RESOURCES
    assert await api.served((POLICIES, POOLS)) == {POLICIES}, "there are pools, but of another version"


@pytest.mark.parametrize("answer", [404, {"resources": [{"name": "somethingelse"}]}, {"resources": []}])
async def test_a_kind_is_not_served_while_its_crd_comes_or_goes(kmock: kmock.RawHandler, api: Api, answer: Any) -> None:
    kmock["get /apis"] << GROUPS
    kmock["get /apis/thunderagent.io/v1alpha1"] << answer
    assert await api.served((POLICIES, POOLS)) == set()


async def test_discovery_that_is_refused_is_an_error(kmock: kmock.RawHandler, api: Api) -> None:
    kmock["get /apis"] << GROUPS
    kmock["get /apis/thunderagent.io/v1alpha1"] << 500
    with pytest.raises(ApiException):
        await api.served((POLICIES,))


STATUS_PATH = "/apis/thunderagent.io/v1alpha1/namespaces/llm/thunderagentpolicies/coder/status"


async def test_a_status_is_put_in_place_of_the_one_before(kmock: kmock.RawHandler, api: Api) -> None:
    kmock[f"patch {STATUS_PATH}"] << {}
    await api.patch_status("llm", "coder", {"observedGeneration": 2, "capacityTokens": 0})
    (request,) = kmock["patch"]
    assert request.headers["Content-Type"] == "application/merge-patch+json"
    assert request.data == {
        "status": {
            "observedGeneration": 2,
            "conditions": None,
            "workers": None,
            "capacityTokens": 0,
            "snapshot": None,
            "pickers": None,
        }
    }, "what is not there any more is taken away"


async def test_a_policy_that_is_gone_needs_no_status(kmock: kmock.RawHandler, api: Api) -> None:
    kmock[f"patch {STATUS_PATH}"] << 404
    await api.patch_status("llm", "coder", {})


async def test_a_status_that_is_refused_is_an_error(kmock: kmock.RawHandler, api: Api) -> None:
    kmock[f"patch {STATUS_PATH}"] << 422
    with pytest.raises(ApiException):
        await api.patch_status("llm", "coder", {})


async def test_an_event_is_about_its_policy(kmock: kmock.RawHandler, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "thunderagent-operator-0")
    kmock["post /api/v1/namespaces/llm/events"] << {}
    await api.event(policy_object("x" * 250), reason="NoWorkers", message="m" * 2000, warning=True)
    (request,) = kmock["post"]
    event: Any = request.data
    assert event["involvedObject"] == {
        "apiVersion": "thunderagent.io/v1alpha1",
        "kind": "ThunderAgentPolicy",
        "name": "x" * 250,
        "namespace": "llm",
        "uid": f"uid-{'x' * 250}",
    }
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "NoWorkers", 1)
    assert event["message"] == "m" * 1024
    assert event["reportingInstance"] == "thunderagent-operator-0"
    assert event["metadata"]["namespace"] == "llm"
    assert len(event["metadata"]["name"]) <= 253


async def test_without_a_cluster_there_is_nothing_to_connect_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigException):
        await connect()


async def test_a_kubeconfig_goes_before_the_pods_own_account(
    kmock: kmock.RawHandler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": str(kmock.url).rstrip("/")}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    kmock["get /api/v1/pods"] << page("a")
    connected = await connect()
    try:
        assert await Api(connected).names(PODS, None) == {"llm/a": Listed("uid-a", "7")}
    finally:
        await connected.close()
    (request,) = kmock["get"]
    assert request.headers["Authorization"] == "Bearer secret"
