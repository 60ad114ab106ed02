"""What a real helm makes of the chart: valid objects that fit each other, and bad values refused by their names."""

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from typer.testing import CliRunner

from support.helm import CHART, CI_VALUES, CRDS_CHART, ROOT, HelmError, Manifest, helm, named, of_kind, render
from support.manifests import faults
from thunderagent_epp.cli import app
from thunderagent_operator.crd import crd
from thunderagent_sim.envoy_process import envoy_binary

POOL: dict[str, Any] = {"name": "coder", "inferencePool": {"selector": {"app": "vllm"}, "targetPorts": [8000]}}


@pytest.fixture(params=CI_VALUES, ids=lambda path: path.name.removesuffix("-values.yaml"), scope="module")
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each Deployment with the spec of its pods."""
    for deployment in of_kind(manifests, "Deployment"):
        yield deployment, deployment["spec"]["template"]["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def selected(manifests: list[Manifest], selector: dict[str, str], namespace: str) -> list[Manifest]:
    """The Deployments of a namespace whose pods have these labels."""
    return [
        one
        for one in of_kind(manifests, "Deployment")
        if one["metadata"]["namespace"] == namespace
        and matches(selector, one["spec"]["template"]["metadata"]["labels"])
    ]


def test_helm_finds_nothing_to_complain_of() -> None:
    for values in CI_VALUES:
        helm("lint", "--strict", CHART, "--values", values)
    helm("lint", "--strict", CRDS_CHART)


def test_every_object_is_valid(manifests: list[Manifest]) -> None:
    assert {f"{one['kind']}/{one['metadata']['name']}": found for one in manifests if (found := faults(one))} == {}


def test_every_object_says_its_namespace_and_whose_it_is(manifests: list[Manifest]) -> None:
    for one in manifests:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "thunderagent"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert one["kind"].startswith("ClusterRole") == ("namespace" not in one["metadata"])


def test_no_two_objects_have_one_name(manifests: list[Manifest]) -> None:
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in manifests]
    assert sorted(names, key=str) == sorted(set(names), key=str)


def test_pods_have_no_privilege_and_nothing_to_write_to(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        user = pod["securityContext"]["runAsUser"]
        assert user in (65532, 10001)
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            for bounds in ("requests", "limits"):
                assert set(container["resources"][bounds]) == {"cpu", "memory"}
            writable = [mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
            assert writable == ["tmp"]
        for volume in pod["volumes"]:
            assert volume.keys() & {"hostPath"} == set()


def test_only_the_operator_has_a_token_of_the_api(manifests: list[Manifest]) -> None:
    for deployment, pod in pods(manifests):
        is_operator = deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"
        assert pod["automountServiceAccountToken"] is is_operator
        assert ("serviceAccountName" in pod) is is_operator


def test_the_operator_may_do_what_its_tests_run_with_and_no_more(manifests: list[Manifest]) -> None:
    tested = yaml.safe_load((ROOT / "tests" / "cases" / "rbac.yaml").read_text())
    for one in manifests:
        if one["kind"] == "ClusterRole":
            assert by_resource(one["rules"]) == by_resource(tested["cluster"][0]["rules"])
        elif one["kind"] == "Role" and one["metadata"]["name"].endswith("-lease"):
            (lease,) = [rule["resourceNames"] for rule in one["rules"] if "resourceNames" in rule]
            assert lease == [one["metadata"]["name"].removesuffix("-lease")]
            expected = by_resource(tested["lease"][0]["rules"])
            assert by_resource(one["rules"]) == [(*rule[:2], rule[2] and lease, *rule[3:]) for rule in expected]
        elif one["kind"] == "Role":
            assert by_resource(one["rules"]) == by_resource(tested["namespaced"][0]["rules"])


def by_resource(rules: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    rows = ((rule["apiGroups"], rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in rules)
    return sorted(rows, key=str)


def test_every_binding_is_of_a_role_and_of_the_operators_account(manifests: list[Manifest]) -> None:
    accounts = {pod["serviceAccountName"] for _, pod in pods(manifests) if "serviceAccountName" in pod}
    for binding in (*of_kind(manifests, "RoleBinding"), *of_kind(manifests, "ClusterRoleBinding")):
        role = named(
            [one for one in manifests if one["metadata"].get("namespace") == binding["metadata"].get("namespace")],
            binding["roleRef"]["kind"],
            binding["roleRef"]["name"],
        )
        assert role["rules"]
        assert [(who["name"], who["namespace"]) for who in binding["subjects"]] == [(*accounts, "thunderagent")]


def test_the_lease_of_the_role_is_the_one_the_operator_is_told(manifests: list[Manifest]) -> None:
    for deployment, pod in pods(manifests):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "operator":
            name = deployment["metadata"]["name"]
            assert f"--lease-name={name}" in pod["containers"][0]["args"]
            assert named(manifests, "Role", f"{name}-lease")["metadata"]["namespace"] == "thunderagent"


def test_selectors_meet_labels_and_ports_meet_ports(manifests: list[Manifest]) -> None:
    for deployment, pod in pods(manifests):
        template = deployment["spec"]["template"]["metadata"]["labels"]
        assert matches(deployment["spec"]["selector"]["matchLabels"], template)
        for spread in pod.get("topologySpreadConstraints", []):
            assert matches(spread["labelSelector"]["matchLabels"], template)
    for one in manifests:
        namespace = one["metadata"].get("namespace", "")
        match one["kind"]:
            case "Service":
                selector, ports = one["spec"]["selector"], [port["targetPort"] for port in one["spec"]["ports"]]
            case "PodDisruptionBudget":
                selector, ports = one["spec"]["selector"]["matchLabels"], []
            case "NetworkPolicy":
                selector = one["spec"]["podSelector"]["matchLabels"]
                ports = [port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]]
            case "PodMonitor":
                selector = one["spec"]["selector"]["matchLabels"]
                ports = [endpoint["port"] for endpoint in one["spec"]["podMetricsEndpoints"]]
            case _:
                continue
        (deployment,) = selected(manifests, selector, namespace)
        pod = deployment["spec"]["template"]["spec"]
        there = [port for container in containers(pod) for port in container["ports"]]
        named_or_numbered = {port["name"] for port in there} | {port["containerPort"] for port in there}
        assert set(ports) <= named_or_numbered, f"{one['kind']} {one['metadata']['name']}"


def test_probes_ask_ports_that_are_there(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        for container in containers(pod):
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                (asked,) = container[probe].keys() & {"grpc", "httpGet", "tcpSocket"}
                port = container[probe][asked]["port"]
                assert port in ports or port in ports.values()


def test_a_picker_is_asked_on_its_plaintext_health_port(manifests: list[Manifest]) -> None:
    for deployment, pod in pods(manifests):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "epp":
            (epp,) = pod["containers"]
            assert {"name": "health", "containerPort": 9003, "protocol": "TCP"} in epp["ports"]
            assert epp["readinessProbe"]["grpc"] == {"port": 9003, "service": "readiness"}
            assert epp["livenessProbe"]["grpc"] == {"port": 9003, "service": "liveness"}


def test_a_pod_is_given_longer_than_its_drain(manifests: list[Manifest]) -> None:
    for deployment, pod in pods(manifests):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "epp":
            options = dict(
                argument.removeprefix("--").split("=")
                for argument in pod["containers"][0]["args"][1:]
                if "=" in argument
            )
            drain = float(options["drain-delay"]) + float(options["drain-timeout"])
            assert pod["terminationGracePeriodSeconds"] > drain


def test_the_commands_know_their_options(manifests: list[Manifest]) -> None:
    for _, pod in pods(manifests):
        command, *options = pod["containers"][0]["args"]
        known = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        for option in options:
            assert f"{option.partition('=')[0]} " in known


def test_every_secret_that_is_mounted_is_made_or_named_by_the_user(manifests: list[Manifest]) -> None:
    made = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in of_kind(manifests, "Secret")}
    made |= {(one["metadata"]["namespace"], one["spec"]["secretName"]) for one in of_kind(manifests, "Certificate")}
    for deployment, pod in pods(manifests):
        for volume in pod["volumes"]:
            if "secret" in volume and not volume["secret"]["secretName"].endswith("-certificate"):
                assert (deployment["metadata"]["namespace"], volume["secret"]["secretName"]) in made


def test_an_inference_pool_and_its_policy_refer_to_what_is_there(manifests: list[Manifest]) -> None:
    services = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in of_kind(manifests, "Service")}
    pools = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in of_kind(manifests, "InferencePool")}
    for pool in of_kind(manifests, "InferencePool"):
        picker = pool["spec"]["endpointPickerRef"]
        assert (pool["metadata"]["namespace"], picker["name"]) in services
        assert picker["port"] == {"number": 9002}
    for policy in of_kind(manifests, "ThunderAgentPolicy"):
        if pool_name := policy["spec"]["workers"].get("inferencePool"):
            assert (policy["metadata"]["namespace"], pool_name) in pools


def test_a_picker_follows_the_policy_of_its_pool() -> None:
    (epp,) = named(render({"pools": [POOL]}, namespace="llm"), "Deployment", "thunderagent-coder-epp")["spec"][
        "template"
    ]["spec"]["containers"]
    assert epp["args"][:3] == ["epp", "--feed=thunderagent-operator.llm.svc:9004", "--policy=llm/coder"]
    assert {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in epp["env"]} == {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
    }


def test_large_numbers_stay_numbers() -> None:
    (epp,) = named(render({"pools": [POOL]}), "Deployment", "thunderagent-coder-epp")["spec"]["template"]["spec"][
        "containers"
    ]
    assert "--max-held-bytes=1073741824" in epp["args"]
    assert "--max-body-bytes=67108864" in epp["args"]


def test_a_pool_overrides_what_all_pools_share() -> None:
    pool = POOL | {"drainTimeoutSeconds": 60, "resources": {"limits": {"memory": "4Gi"}}}
    pod = named(render({"pools": [pool], "epp": {"drainDelaySeconds": 7}}), "Deployment", "thunderagent-coder-epp")[
        "spec"
    ]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 97
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "500m", "memory": "256Mi"},
        "limits": {"cpu": "2", "memory": "4Gi"},
    }


def test_certificates_made_by_the_chart_are_for_the_services_and_of_one_ca() -> None:
    made = render({"pools": [POOL]}, namespace="llm")
    (ca,) = x509.load_pem_x509_certificates(content(named(made, "Secret", "thunderagent-ca"), "tls.crt"))
    for secret, service in (
        ("thunderagent-operator-tls", "thunderagent-operator"),
        ("thunderagent-coder-epp-tls", "thunderagent-coder-epp"),
    ):
        (leaf,) = x509.load_pem_x509_certificates(content(named(made, "Secret", secret), "tls.crt"))
        leaf.verify_directly_issued_by(ca)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert f"{service}.llm.svc" in names.get_values_for_type(x509.DNSName)
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH} <= set(usage)
        assert content(named(made, "Secret", secret), "ca.crt") == content(
            named(made, "Secret", "thunderagent-ca"), "tls.crt"
        )


def content(secret: Manifest, key: str) -> bytes:
    return base64.b64decode(secret["data"][key])


def test_the_standalone_envoy_runs_what_envoy_config_prints() -> None:
    printed = CliRunner().invoke(app, ["envoy-config", "--access-log"]).output
    made = render(CHART / "ci" / "standalone-values.yaml")
    assert yaml.safe_load(named(made, "ConfigMap", "thunderagent-coder-epp-envoy")["data"]["envoy.yaml"]) == (
        yaml.safe_load(printed)
    )
    six = CliRunner().invoke(app, ["envoy-config", "--access-log", "--listen", "[::]:8080"]).output
    listening = yaml.safe_load(six)
    del listening["static_resources"]["listeners"][0]["address"]["socket_address"]["ipv4_compat"]
    assert yaml.safe_load(named(made, "ConfigMap", "thunderagent-chat-epp-envoy")["data"]["envoy.yaml"]) == listening


@pytest.mark.parametrize("pool", ["coder", "chat"])
def test_the_standalone_envoy_takes_its_configuration(pool: str, tmp_path: Path) -> None:
    made = render(CHART / "ci" / "standalone-values.yaml")
    file = tmp_path / "envoy.yaml"
    file.write_text(named(made, "ConfigMap", f"thunderagent-{pool}-epp-envoy")["data"]["envoy.yaml"])
    checked = subprocess.run(
        [envoy_binary(), "--mode", "validate", "--config-path", file], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_the_standalone_envoy_outlives_the_picker() -> None:
    made = render(CHART / "ci" / "standalone-values.yaml")
    (envoy,) = named(made, "Deployment", "thunderagent-coder-epp")["spec"]["template"]["spec"]["initContainers"]
    assert envoy["restartPolicy"] == "Always"
    assert of_kind(made, "InferencePool") == []
    (port,) = named(made, "Service", "thunderagent-coder")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (8080, "inference")


def test_a_picker_may_talk_to_the_operator_and_nobody_else() -> None:
    egress = named(render({"pools": [POOL]}), "NetworkPolicy", "thunderagent-coder-epp")["spec"]["egress"]
    dns, operator = egress
    assert {port["port"] for port in dns["ports"]} == {53, 5353}
    assert operator["ports"] == [{"port": 9004, "protocol": "TCP"}]
    (to,) = operator["to"]
    assert to["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "thunderagent"}
    assert to["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"


def test_the_crd_comes_with_the_chart_and_is_kept_by_the_one_that_upgrades_it() -> None:
    with_crds = yaml.safe_load_all(helm("template", "thunderagent", CHART, "--include-crds", "--kube-version", "1.33"))
    (installed,) = [one for one in with_crds if one and one["kind"] == "CustomResourceDefinition"]
    assert installed == crd()
    upgraded = yaml.safe_load(helm("template", "thunderagent-crds", CRDS_CHART))
    assert upgraded["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert upgraded["spec"] == crd()["spec"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"pools": [POOL | {"policy": {"spec": {"admission": {"pauseThreshold": 1.5}}}}]},
            "/pools/0/policy/spec/admission/pauseThreshold",
        ),
        (
            {"pools": [POOL | {"policy": {"spec": {"admission": {"maxHold": "4 minutes"}}}}]},
            "/pools/0/policy/spec/admission/maxHold",
        ),
        (
            {"pools": [POOL | {"policy": {"spec": {"admission": {"pauseThreshold": 0.5}}}}]},
            "pools[0].policy.spec.admission.pauseTarget: must not be above pauseThreshold",
        ),
        ({"pools": [POOL | {"policy": {"spec": {"selection": {"prefix": 3}}}}]}, "/pools/0/policy/spec/selection"),
        (
            {"pools": [POOL | {"policy": {"spec": {"disaggregation": {}}}}]},
            "pools[0].policy.spec.disaggregation: goes with topology Disaggregated only",
        ),
        ({"pools": [POOL | {"polcy": {}}]}, "'polcy'"),
        ({"pools": [{"inferencePool": {}}]}, "missing property 'name'"),
        ({"pools": [{"name": "coder"}]}, "pools[0].inferencePool.selector: needed"),
        (
            {"pools": [{"name": "coder", "inferencePool": {"selector": {"app": "vllm"}}}]},
            "pools[0].inferencePool.targetPorts: needed",
        ),
        (
            {"pools": [{"name": "coder", "inferencePool": {"create": False}}]},
            "pools[0].policy.spec.workers: exactly one of inferencePool and selector",
        ),
        ({"pools": [POOL, POOL]}, "pools[1].name: thunderagent/coder is there twice"),
        ({"pools": [POOL | {"name": "c" * 60}]}, "pools[0].name: with the release's name it makes"),
        ({"operator": {"replicas": -1}}, "/operator/replicas"),
        (
            {"operator": {"namespaces": ["llm"]}, "pools": [POOL]},
            "pools[0].namespace: thunderagent is not among operator.namespaces",
        ),
        ({"operator": {"enabled": False}, "pools": [POOL]}, "feed.address: needed with operator.enabled false"),
        ({"operator": {"enabled": False}, "feed": {"address": "operator:9004"}, "pools": [POOL]}, "tls.mode: with"),
        ({"feed": {"address": "operator"}}, "/feed/address"),
        ({"tls": {"mode": "existing"}}, "tls.existing.operatorSecretName: needed"),
        (
            {"tls": {"mode": "existing", "existing": {"operatorSecretName": "o"}}, "pools": [POOL]},
            "pools[0].tls.secretName: needed",
        ),
        (
            {"tls": {"mode": "certManager"}, "pools": [POOL | {"namespace": "llm"}]},
            "pools[0].namespace: a pool outside of the release's namespace needs a ClusterIssuer",
        ),
        (
            {"pools": [POOL | {"standalone": {"enabled": True}, "plaintext": True}]},
            "pools[0].plaintext: the standalone",
        ),
        ({"operator": {"serviceAccount": {"create": False}}}, "operator.serviceAccount.name: needed"),
        ({"runAsUser": 0}, "/runAsUser"),
        ({"epp": {"extraArgs": ["host=::"]}}, "/epp/extraArgs/0"),
        ({"epp": {"maxHeldBytes": 0}}, "/epp/maxHeldBytes"),
        ({"tls": {"mode": "none"}}, "/tls/mode"),
        ({"standalone": {"service": {"port": 70000}}}, "/standalone/service/port"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], says: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(values)
    assert says in str(refused.value)


def test_a_cluster_may_choose_the_user() -> None:
    for _, pod in pods(render({"pools": [POOL], "runAsUser": None})):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_the_notes_say_what_to_do_next(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"pools": [POOL]}))
    printed = helm(
        "install",
        "thunderagent",
        CHART,
        "--dry-run=client",
        "--values",
        values,
        "--namespace",
        "llm",
        environment={"KUBECONFIG": str(tmp_path / "none")},
    )
    notes = printed.partition("NOTES:")[2]
    assert "kubectl -n llm get tap coder" in notes
    assert "kind: InferencePool, name: coder" in notes
