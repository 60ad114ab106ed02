"""The chart put into a real cluster by a real helm, upgraded and taken out again, and what it installed at work.

The API server at hand is older than what the chart is for: it knows neither gRPC probes nor policy/v1, and is given a
copy of the chart without them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from cryptography import x509

from support.helm import CRDS_CHART, HelmError, helm, helm_binary
from support.kube_api import ADMIN, ASSETS_VARIABLE, OPERATOR, KubeApi, missing_assets, running_kube_api
from support.kube_client import CRDS, KubeClient, Namespace, RefusedError, kube_client
from support.operator_process import running_operator
from support.picker_process import running_following_picker
from thunderagent_operator.crd import crd

POOLS_CRD = yaml.safe_load((Path(__file__).parents[2] / "cases" / "inferencepool-crd.yaml").read_text())
OUR_CRD = f"{CRDS}/thunderagentpolicies.thunderagent.io"
DEPLOYMENTS = "/apis/apps/v1/namespaces/thunderagent/deployments"
SECRETS = "/api/v1/namespaces/thunderagent/secrets"

VALUES: dict[str, Any] = {
    "operator": {"podDisruptionBudget": {"enabled": False}},
    "epp": {"podDisruptionBudget": {"enabled": False}},
    "pools": [{"name": "coder", "inferencePool": {"selector": {"app": "vllm"}, "targetPorts": [8000]}}],
}


@dataclass(frozen=True, slots=True)
class Cluster:
    api: KubeApi
    client: KubeClient
    chart: Path

    def helm(self, *arguments: str | Path, values: dict[str, Any] | None = None) -> str:
        return helm(
            *arguments,
            *("--namespace", "thunderagent"),
            *(() if values is None else ("--values", "-")),
            standard_input="" if values is None else yaml.safe_dump(values),
            environment={"KUBECONFIG": str(self.api.kubeconfig(ADMIN))},
        )

    def put(self, verb: str, values: dict[str, Any] | None = None) -> str:
        """Install or upgrade the release."""
        older = ("--disable-openapi-validation", "--server-side=false")
        return self.helm(verb, "thunderagent", self.chart, *older, values=VALUES | (values or {}))

    def put_crds(self) -> str:
        """As the chart's own refusal says, plus what the older API needs."""
        older = ("--disable-openapi-validation", "--server-side=false")
        return self.helm("upgrade", "--install", "thunderagent-crds", CRDS_CHART, "--take-ownership", *older)

    async def secret(self, name: str) -> dict[str, bytes]:
        data = (await self.client.get(f"{SECRETS}/{name}"))["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    async def mount_secret(self, name: str, folder: Path) -> Path:
        """A Secret as a pod sees it, in a folder."""
        content = await self.secret(name)

        def write() -> None:
            folder.mkdir()
            for key, value in content.items():
                (folder / key).write_bytes(value)

        await asyncio.to_thread(write)
        return folder

    async def crd_is_gone(self) -> None:
        with contextlib.suppress(RefusedError):
            await self.client.delete(OUR_CRD)
            while True:  # until it is not found
                await self.client.get(OUR_CRD)
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    """A cluster of this module's own: what a chart installs is there for all."""
    helm_binary()
    if reason := missing_assets():
        pytest.skip(reason)
    with running_kube_api(Path(os.environ[ASSETS_VARIABLE]), tmp_path_factory.mktemp("chart")) as running:
        yield running


@pytest.fixture
async def cluster(api: KubeApi, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster without any trace of the chart but its namespace, and a chart it can take."""
    async with kube_client(api) as client:
        with contextlib.suppress(RefusedError):
            await client.create_namespace("thunderagent")
        await client.install(POOLS_CRD)
        cluster = Cluster(api, client, older_chart(tmp_path / "chart"))
        yield cluster
        for release in cluster.helm("list", "--short").split():
            cluster.helm("uninstall", release)
        await cluster.crd_is_gone()


def older_chart(to: Path) -> Path:
    shutil.copytree(CRDS_CHART.with_name("thunderagent"), to)
    chart, pickers = to / "Chart.yaml", to / "templates" / "epp.yaml"
    chart.write_text(re.sub(r"kubeVersion: .*\n", "", chart.read_text()))
    pickers.write_text(re.sub(r"grpc: {port: 9003, service: \w+}", "tcpSocket: {port: 9003}", pickers.read_text()))
    return to


async def test_one_command_installs_everything_the_policy_included(cluster: Cluster) -> None:
    cluster.put("install")
    assert (await cluster.client.get(OUR_CRD))["spec"]["names"]["kind"] == "ThunderAgentPolicy"
    names = [one["metadata"]["name"] for one in (await cluster.client.get(DEPLOYMENTS))["items"]]
    assert names == ["thunderagent-coder-epp", "thunderagent-operator"]
    namespace = Namespace(cluster.client, "thunderagent")
    assert (await namespace.policy())["spec"]["workers"]["inferencePool"] == "coder"
    pool = await cluster.client.get(f"{namespace.pools}/coder")
    assert pool["spec"]["endpointPickerRef"]["name"] == "thunderagent-coder-epp"


async def test_what_is_installed_lets_operator_and_picker_do_their_work(cluster: Cluster, tmp_path: Path) -> None:
    """With the rights of the ServiceAccount and the certificates of the Secrets, as the pods have them."""
    cluster.put("install")
    namespace = Namespace(cluster.client, "thunderagent")
    await namespace.create_pod("vllm-0", ip="127.0.0.1", labels={"app": "vllm"})
    operators = await cluster.mount_secret("thunderagent-operator-tls", tmp_path / "operator")
    pickers = await cluster.mount_secret("thunderagent-coder-epp-tls", tmp_path / "picker")
    tls = ("--feed-ca", f"{operators}/ca.crt", "--feed-cert", f"{operators}/tls.crt", "--feed-key")
    lease = ("--lease-namespace", "thunderagent", "--lease-name", "thunderagent-operator")
    async with running_operator(cluster.api.kubeconfig(OPERATOR), *tls, f"{operators}/tls.key", *lease) as operator:
        await operator.until_serving()
        mutual = ("--feed-ca", f"{pickers}/ca.crt", "--feed-cert", f"{pickers}/tls.crt", "--feed-key")
        async with running_following_picker(
            operator.feed, "thunderagent/coder", *mutual, f"{pickers}/tls.key"
        ) as picker:
            await picker.until_ready()
            (worker,) = (await picker.state())["workers"]
            assert (worker["worker"], worker["endpoint"]) == ("vllm-0", "127.0.0.1:8000")
            policy = await namespace.until_policy(lambda policy: policy.programmed)
            assert policy.condition("WorkersReady") == ("True", "WorkersLive")
            await namespace.until_event("Normal", "WorkersLive")
        stranger = ("--feed-ca", f"{pickers}/ca.crt")
        async with running_following_picker(operator.feed, "thunderagent/coder", *stranger) as picker:
            await picker.logged("operator cannot be followed")
            await picker.until_unready("no_snapshot")
        assert operator.troubles == []


async def test_a_gateway_can_verify_the_picker_by_the_ca_of_the_chart(cluster: Cluster, tmp_path: Path) -> None:
    cluster.put("install")
    ca = (await cluster.secret("thunderagent-ca"))["tls.crt"]
    picker = await cluster.secret("thunderagent-coder-epp-tls")
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(picker["tls.key"], picker["tls.crt"])])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    name = "thunderagent-coder-epp.thunderagent.svc"
    options = [("grpc.ssl_target_name_override", name)]
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca), options) as channel:
            await asyncio.wait_for(channel.channel_ready(), 10)
    finally:
        await server.stop(None)


async def test_certificates_are_kept_over_upgrades_and_made_anew_for_another_name(cluster: Cluster) -> None:
    cluster.put("install")
    names = ("thunderagent-ca", "thunderagent-operator-tls", "thunderagent-coder-epp-tls")
    installed = {name: await cluster.secret(name) for name in names}
    cluster.put("upgrade", {"commonLabels": {"team": "platform"}})
    assert {name: await cluster.secret(name) for name in names} == installed
    chat = {"name": "chat", "inferencePool": {"selector": {"app": "chat"}, "targetPorts": [8000]}}
    cluster.put("upgrade", {"pools": [*VALUES["pools"], chat], "clusterDomain": "k8s.example"})
    assert await cluster.secret("thunderagent-ca") == installed["thunderagent-ca"]
    for name in (*names[1:], "thunderagent-chat-epp-tls"):
        made = await cluster.secret(name)
        assert made != installed.get(name)
        leaf = x509.load_pem_x509_certificate(made["tls.crt"])
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(made["ca.crt"]))
        names_of_leaf = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert any(one.endswith(".svc.k8s.example") for one in names_of_leaf.get_values_for_type(x509.DNSName))


async def test_deleting_the_ca_and_upgrading_renews_every_certificate(cluster: Cluster) -> None:
    cluster.put("install")
    before = await cluster.secret("thunderagent-operator-tls")
    await cluster.client.delete(f"{SECRETS}/thunderagent-ca")
    cluster.put("upgrade")
    after = await cluster.secret("thunderagent-operator-tls")
    assert after["ca.crt"] == (await cluster.secret("thunderagent-ca"))["tls.crt"] != before["ca.crt"]
    assert after["tls.crt"] != before["tls.crt"]


async def test_an_upgrade_changes_a_policy_in_place(cluster: Cluster) -> None:
    cluster.put("install")
    namespace = Namespace(cluster.client, "thunderagent")
    uid = (await namespace.policy())["metadata"]["uid"]
    held = VALUES["pools"][0] | {"policy": {"spec": {"admission": {"maxHold": "4m"}}}}
    cluster.put("upgrade", {"pools": [held]})
    policy = await namespace.policy()
    assert (policy["metadata"]["uid"], policy["spec"]["admission"]["maxHold"]) == (uid, "4m")


async def test_uninstalling_leaves_the_crd_and_the_policies_of_others(cluster: Cluster) -> None:
    cluster.put("install")
    namespace = Namespace(cluster.client, "thunderagent")
    await namespace.create_policy("by-hand")
    cluster.helm("uninstall", "thunderagent")
    assert [one["metadata"]["name"] for one in (await cluster.client.get(namespace.policies))["items"]] == ["by-hand"]
    assert (await cluster.client.get(DEPLOYMENTS))["items"] == []
    left = [one["metadata"]["name"] for one in (await cluster.client.get(SECRETS))["items"]]
    assert [name for name in left if name.startswith("thunderagent")] == []
    cluster.put("install")


async def test_a_crd_of_an_earlier_version_is_refused_by_name_until_its_chart_upgrades_it(cluster: Cluster) -> None:
    earlier = crd()
    spec = earlier["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for fields in (spec["admission"], spec["workers"]["properties"]["metrics"]):
        fields["default"] = {}
    del spec["admission"]["properties"]["maxHold"]
    del spec["workers"]["properties"]["metrics"]["properties"]["scheme"]
    spec["workers"]["properties"]["engine"]["enum"].remove("trtllm")
    await cluster.client.install(earlier)
    with pytest.raises(HelmError) as refused:
        cluster.put("install")
    assert "it lacks spec.admission.maxHold spec.workers.engine=trtllm spec.workers.metrics.scheme." in str(
        refused.value
    )
    assert "helm upgrade --install thunderagent-crds charts/thunderagent-crds" in str(refused.value)
    cluster.put_crds()
    cluster.put("install")
    cluster.helm("uninstall", "thunderagent-crds")
    assert (await cluster.client.get(OUR_CRD))["metadata"]["name"] == "thunderagentpolicies.thunderagent.io"
