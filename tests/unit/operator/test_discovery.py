from typing import Any

import pytest

from thunderagent_epp.scheduling.capacity import Role, Worker, WorkerRank
from thunderagent_operator.discovery import (
    Overlap,
    PodWorkers,
    UnresolvedError,
    WorkerSource,
    overlaps,
    pod_workers,
    worker_source,
)
from thunderagent_operator.probes.http import Address
from thunderagent_operator.probes.prober import ProbeTarget
from thunderagent_operator.probes.reading import Capacity
from thunderagent_operator.resources import PolicySpec, read_policy

SELECTOR = {"matchLabels": {"app": "vllm"}}


def policy(workers: dict[str, Any] | None = None, **more: Any) -> PolicySpec:
    return read_policy({"spec": {"workers": {"selector": SELECTOR, "targetPorts": [8000], **(workers or {})}, **more}})


def source(workers: dict[str, Any] | None = None, **more: Any) -> WorkerSource:
    return worker_source(policy(workers, **more))


def disaggregated() -> WorkerSource:
    return source(topology="Disaggregated", disaggregation={"roleLabel": "role"})


def pod(
    *,
    name: str = "a",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ip: str | None = "10.0.0.1",
    phase: str = "Running",
    ready: str = "True",
    restarts: int = 0,
    **metadata: Any,
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": f"uid-{name}",
            "labels": {"app": "vllm", **(labels or {})},
            "annotations": annotations,
            **metadata,
        },
        "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready}],
            "containerStatuses": [{"name": "vllm", "restartCount": restarts}],
        },
    }


def workers(found: PodWorkers) -> list[Worker]:
    return [one.worker for one in found.ranks]


def test_a_ready_pod_is_a_live_worker_whose_capacity_is_to_be_probed() -> None:
    found = pod_workers(pod(), source())
    assert found.problems == ()
    (only,) = found.ranks
    assert only.worker == Worker(
        id=WorkerRank("a", 0),
        endpoint="10.0.0.1:8000",
        capacity_tokens=None,
        live=True,
        role=Role.BOTH,
        incarnation="uid-a/0",
        block_size=16,
    )
    assert only.target == ProbeTarget(
        address=Address("10.0.0.1", 8000, "/metrics", None, "http"),
        incarnation="uid-a/0",
        live=True,
        engine="auto",
        engine_label=None,
        interval_seconds=10.0,
    )


def test_each_target_port_is_a_rank() -> None:
    found = pod_workers(pod(), source({"targetPorts": [8001, 8000]}))
    assert [(str(one.id), one.endpoint) for one in workers(found)] == [
        ("a/0", "10.0.0.1:8001"),
        ("a/1", "10.0.0.1:8000"),
    ]


def test_an_address_of_ip_version_6_is_in_brackets() -> None:
    (only,) = pod_workers(pod(ip="fd00::1"), source()).ranks
    assert only.worker.endpoint == "[fd00::1]:8000"
    assert only.target is not None
    assert only.target.address.host == "[fd00::1]"


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_a_pod_in_another_phase_is_no_worker(phase: str) -> None:
    assert pod_workers(pod(phase=phase), source()) == PodWorkers()


@pytest.mark.parametrize("ip", [None, ""])
def test_a_pod_without_an_address_is_no_worker(ip: str | None) -> None:
    assert pod_workers(pod(ip=ip), source()) == PodWorkers()


def test_a_pod_that_is_not_selected_is_no_worker() -> None:
    assert pod_workers(pod(labels={"app": "web"}), source()) == PodWorkers()


def test_the_barest_pod_is_no_worker() -> None:
    assert pod_workers({"metadata": {"name": "a"}}, source()) == PodWorkers()


@pytest.mark.parametrize(
    "unready",
    [
        pod(ready="False"),
        pod(ready="Unknown"),
        pod(deletionTimestamp="2026-01-01T00:00:00Z"),
        {**pod(), "status": {"phase": "Running", "podIP": "10.0.0.1"}},
    ],
)
def test_an_unready_or_dying_pod_stays_a_worker_that_is_not_live(unready: dict[str, Any]) -> None:
    (only,) = pod_workers(unready, source()).ranks
    assert only.worker.live is False
    assert only.target is not None
    assert only.target.live is False


def test_a_restart_of_the_serving_container_is_a_new_incarnation() -> None:
    assert workers(pod_workers(pod(restarts=3), source()))[0].incarnation == "uid-a/3"


def test_the_serving_container_is_the_one_that_declares_the_port() -> None:
    seen = pod()
    seen["spec"]["containers"] = [
        {"name": "exporter", "ports": [{"containerPort": 9400}]},
        {"name": "engine", "ports": [{"containerPort": 8000}]},
    ]
    seen["status"]["containerStatuses"] = [
        {"name": "exporter", "restartCount": 7},
        {"name": "engine", "restartCount": 2},
    ]
    assert workers(pod_workers(seen, source()))[0].incarnation == "uid-a/2"


@pytest.mark.parametrize(
    ("annotations", "incarnation"),
    [(None, "uid-a/7"), ({"kubectl.kubernetes.io/default-container": "engine"}, "uid-a/2")],
)
def test_without_a_declared_port_it_is_the_default_container_or_the_first(
    annotations: dict[str, str] | None, incarnation: str
) -> None:
    seen = pod(annotations=annotations)
    seen["spec"]["containers"] = [{"name": "proxy"}, {"name": "engine"}]
    seen["status"]["containerStatuses"] = [
        {"name": "engine", "restartCount": 2},
        {"name": "proxy", "restartCount": 7},
    ]
    assert workers(pod_workers(seen, source()))[0].incarnation == incarnation


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("8000,8001", ["a/0", "a/1"]), (" 8001 ", ["a/1"]), ("8001,", ["a/1"]), ("9999", []), ("", []), (" ", [])],
)
def test_an_annotation_restricts_the_ports_and_leaves_the_ranks_their_numbers(text: str, ranks: list[str]) -> None:
    annotated = pod(annotations={"thunderagent.io/active-ports": text})
    found = pod_workers(annotated, source({"targetPorts": [8000, 8001]}))
    assert [str(one.id) for one in workers(found)] == ranks
    assert found.problems == ()


def test_a_port_that_is_none_is_ignored_and_told() -> None:
    found = pod_workers(pod(annotations={"thunderagent.io/active-ports": "8000,http,-1"}), source())
    assert [str(one.id) for one in workers(found)] == ["a/0"]
    assert found.problems == (
        "pod a: annotation thunderagent.io/active-ports: 'http' is no port",
        "pod a: annotation thunderagent.io/active-ports: '-1' is no port",
    )


def test_the_capacity_of_the_policy_comes_before_that_of_the_pod_and_nothing_is_probed() -> None:
    annotated = pod(annotations={"thunderagent.io/capacity-tokens": "500"})
    (only,) = pod_workers(annotated, source({"capacityTokens": 1000})).ranks
    assert only.worker.capacity_tokens == 1000
    assert only.target is None
    assert only.with_capacity(Capacity(7, 7)) == only.worker


def test_the_capacity_of_the_pod_comes_before_a_probe() -> None:
    (only,) = pod_workers(pod(annotations={"thunderagent.io/capacity-tokens": " 500 "}), source()).ranks
    assert only.worker.capacity_tokens == 500
    assert only.target is None


@pytest.mark.parametrize("text", ["", "0", "-5", "1e6", "1_000", "12k", "٣", "9999999999999", "9" * 100])
def test_a_capacity_that_is_none_is_ignored_and_told(text: str) -> None:
    found = pod_workers(pod(annotations={"thunderagent.io/capacity-tokens": text}), source())
    (only,) = found.ranks
    assert only.worker.capacity_tokens is None
    assert only.target is not None
    (problem,) = found.problems
    assert problem.startswith("pod a: annotation thunderagent.io/capacity-tokens: must be a number of tokens")


def test_a_probe_tells_capacity_and_block_size() -> None:
    (only,) = pod_workers(pod(), source({"blockSize": 32})).ranks
    assert only.with_capacity(None).capacity_tokens is None
    assert only.with_capacity(None).block_size == 32
    assert only.with_capacity(Capacity(9168, 64)).capacity_tokens == 9168
    assert only.with_capacity(Capacity(9168, 64)).block_size == 64
    assert only.with_capacity(Capacity(9168)).block_size == 32
    assert only.with_capacity(Capacity(10**9, 10**9)).block_size == 32


def test_engine_none_probes_nothing() -> None:
    (only,) = pod_workers(pod(), source({"engine": "none"})).ranks
    assert only.worker.capacity_tokens is None
    assert only.target is None


def test_the_policy_says_how_a_worker_is_probed() -> None:
    terms = {
        "engine": "auto",
        "engineLabel": "engine",
        "metrics": {"path": "/m", "port": 9400, "scheme": "https"},
        "probeInterval": "1m",
    }
    (only,) = pod_workers(pod(labels={"engine": "sglang"}), source(terms)).ranks
    assert only.target == ProbeTarget(
        address=Address("10.0.0.1", 8000, "/m", 9400, "https"),
        incarnation="uid-a/0",
        engine="auto",
        engine_label="sglang",
        interval_seconds=60.0,
    )


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({}, Role.DECODE),
        ({"role": "decode"}, Role.DECODE),
        ({"role": "prefill"}, Role.PREFILL),
        ({"role": "prefill-decode"}, Role.BOTH),
        ({"role": "both"}, Role.BOTH),
    ],
)
def test_a_label_tells_the_role_in_a_disaggregated_topology(labels: dict[str, str], role: Role) -> None:
    assert workers(pod_workers(pod(labels=labels), disaggregated()))[0].role is role


def test_a_pod_of_an_unknown_role_is_no_worker_and_told() -> None:
    assert pod_workers(pod(labels={"role": "encode"}), disaggregated()) == PodWorkers(
        problems=("pod a: label role must be prefill, decode or prefill-decode, not 'encode'",)
    )


def test_roles_mean_nothing_in_an_aggregated_topology() -> None:
    assert workers(pod_workers(pod(labels={"llm-d.ai/role": "prefill"}), source()))[0].role is Role.BOTH


@pytest.mark.parametrize(
    ("expression", "labels", "selected"),
    [
        ({"key": "tier", "operator": "In", "values": ["a", "b"]}, {"tier": "b"}, True),
        ({"key": "tier", "operator": "In", "values": ["a", "b"]}, {"tier": "c"}, False),
        ({"key": "tier", "operator": "In", "values": ["a", "b"]}, {}, False),
        ({"key": "tier", "operator": "NotIn", "values": ["a", "b"]}, {"tier": "b"}, False),
        ({"key": "tier", "operator": "NotIn", "values": ["a", "b"]}, {"tier": "c"}, True),
        ({"key": "tier", "operator": "NotIn", "values": ["a", "b"]}, {}, True),
        ({"key": "tier", "operator": "Exists"}, {"tier": ""}, True),
        ({"key": "tier", "operator": "Exists"}, {}, False),
        ({"key": "tier", "operator": "DoesNotExist"}, {"tier": ""}, False),
        ({"key": "tier", "operator": "DoesNotExist"}, {}, True),
    ],
)
def test_expressions_select_as_the_api_server_does(
    expression: dict[str, Any], labels: dict[str, str], selected: bool
) -> None:
    wanted = source({"selector": {"matchLabels": {"app": "vllm"}, "matchExpressions": [expression]}})
    assert bool(pod_workers(pod(labels=labels), wanted).ranks) is selected


def test_a_selector_is_written_as_the_api_server_reads_it() -> None:
    selector = {
        "matchLabels": {"b": "2", "a": "1", "empty": ""},
        "matchExpressions": [
            {"key": "c", "operator": "In", "values": ["x", "y"]},
            {"key": "d", "operator": "NotIn", "values": ["z"]},
            {"key": "g", "operator": "NotIn", "values": ["u", "v"]},
            {"key": "e", "operator": "Exists"},
            {"key": "f", "operator": "DoesNotExist"},
        ],
    }
    wanted = source({"selector": selector})
    assert str(wanted.selector) == "a=1,b=2,empty=,c in (x,y),d!=z,g notin (u,v),e,!f"


POOL = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "coder", "namespace": "llm"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    },
    "status": {"parents": []},
}


def pooled() -> PolicySpec:
    return read_policy({"spec": {"workers": {"inferencePool": "coder"}}})


def test_selector_and_ports_are_those_of_the_inference_pool() -> None:
    wanted = worker_source(pooled(), POOL)
    assert str(wanted.selector) == "app=vllm"
    assert wanted.ports == (8000, 8001)


def test_a_pool_that_is_not_there_is_said() -> None:
    with pytest.raises(UnresolvedError) as caught:
        worker_source(pooled(), None)
    assert caught.value.reason == "InferencePoolNotFound"
    assert str(caught.value) == "spec.workers.inferencePool: there is no InferencePool coder"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "InferencePool coder: spec.selector: is required; spec.targetPorts: is required"),
        ({"selector": {}, "targetPorts": [{"number": 1}]}, "spec.selector: must name at least one label"),
        ({"selector": SELECTOR, "targetPorts": []}, "spec.targetPorts: must have at least 1, not 0"),
        ({"selector": SELECTOR, "targetPorts": [{"number": 0}]}, "spec.targetPorts[0].number: must be between 1 and"),
        ({"selector": SELECTOR, "targetPorts": [8000]}, "spec.targetPorts[0]: must be a mapping"),
        ({"selector": {"app": "vllm"}, "targetPortNumber": 8000}, "spec.selector.app: unknown field"),
    ],
)
def test_a_pool_that_is_not_usable_is_said(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(UnresolvedError) as caught:
        worker_source(pooled(), {**POOL, "spec": spec})
    assert caught.value.reason == "InvalidInferencePool"
    assert says in str(caught.value)


def test_a_selector_of_the_policy_needs_no_pool() -> None:
    assert source().ports == (8000,)


def test_a_policy_is_told_of_others_that_select_the_same_pods() -> None:
    others = {"llm/c": {"p4"}, "llm/b": {"p2", "p1", "p5"}, "llm/a": {"p3"}}
    assert overlaps({"p1", "p2", "p3"}, others) == (Overlap("llm/a", 1, "p3"), Overlap("llm/b", 2, "p1"))


def test_policies_apart_overlap_with_nobody() -> None:
    assert overlaps({"p"}, {"llm/b": {"q"}, "llm/c": set()}) == ()
