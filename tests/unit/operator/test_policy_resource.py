from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from support.structural_schema import refusals, with_defaults
from thunderagent_epp.cli import app
from thunderagent_operator.crd import CRD_FILE_NAME, crd, crd_yaml
from thunderagent_operator.resources import InvalidPolicyError, read_policy
from thunderagent_operator.status import Condition, PickerCounts, PolicyStatus, PublishedSnapshot, WorkerCounts

ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests" / "cases" / "policies"
GOOD = yaml.safe_load((CASES / "good.yaml").read_text())
BAD = yaml.safe_load((CASES / "bad.yaml").read_text())


def policy(spec: Any, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "thunderagent.io/v1alpha1",
        "kind": "ThunderAgentPolicy",
        "metadata": {"name": "coder", "namespace": "llm"},
        "spec": spec,
        **more,
    }


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["what"].replace(" ", "-")) for case in cases]


@pytest.mark.parametrize("case", named(GOOD))
def test_a_good_policy_is_taken_by_the_model_and_by_the_schema(case: dict[str, Any]) -> None:
    read_policy(policy(case["spec"]))
    assert refusals(crd(), policy(case["spec"])) == []


@pytest.mark.parametrize("case", named(BAD))
def test_a_bad_policy_is_refused_by_the_model_in_words_that_name_the_field(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError) as caught:
        read_policy(policy(case["spec"]))
    (problem,) = caught.value.problems
    assert problem.field == case["field"]
    assert case["says"] in problem.message


@pytest.mark.parametrize("case", named([case for case in BAD if case.get("only") != "model"]))
def test_a_bad_policy_is_refused_by_the_schema(case: dict[str, Any]) -> None:
    assert refusals(crd(), policy(case["spec"])) != []


@pytest.mark.parametrize("case", named(GOOD))
def test_the_model_has_the_defaults_of_the_schema(case: dict[str, Any]) -> None:
    stored = with_defaults(crd(), policy(case["spec"]))
    assert read_policy(stored) == read_policy(policy(case["spec"]))


def test_every_fault_is_told_in_one_text() -> None:
    with pytest.raises(InvalidPolicyError) as caught:
        read_policy(policy({"workers": {"engine": "vllm"}, "admission": {"pauseThreshold": 2}, "topology": "Ring"}))
    assert str(caught.value) == (
        "spec.workers: exactly one of inferencePool and selector is required; "
        "spec.topology: must be Aggregated or Disaggregated, not 'Ring'; "
        "spec.admission.pauseThreshold: must be between 0 and 1, not 2"
    )


@pytest.mark.parametrize("body", [{}, {"spec": None}, {"spec": []}, {"spec": "x"}])
def test_an_object_without_a_spec_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError, match=r"^spec: must be a mapping"):
        read_policy(body)


def test_the_status_of_an_object_is_not_looked_at() -> None:
    assert read_policy(policy(GOOD[0]["spec"], status={"workers": "nonsense"})).workers.inference_pool == "coder"


def test_durations_become_seconds_and_defaults_are_the_contracts() -> None:
    spec = read_policy(policy({"workers": {"inferencePool": "coder"}}))
    assert spec.model_dump() == {
        "workers": {
            "inference_pool": "coder",
            "selector": None,
            "target_ports": None,
            "engine": "auto",
            "engine_label": "llm-d.ai/engine-type",
            "metrics": {"path": "/metrics", "port": None, "scheme": "http"},
            "capacity_tokens": None,
            "block_size": 16,
            "probe_interval_seconds": 10.0,
        },
        "topology": "Aggregated",
        "disaggregation": None,
        "admission": {
            "policy": "Classic",
            "pause_threshold": 0.95,
            "pause_target": 0.8,
            "resume_hysteresis": 0.1,
            "resume_timeout_seconds": 1800.0,
            "session_retention_seconds": 1800.0,
            "scheduler_interval_seconds": 5.0,
            "acting_token_weight": 1.0,
            "acting_decay_tau_seconds": 1.0,
            "buffer_per_program": 100,
            "max_tracked_requests": 10000,
            "hold_budget": 0.3,
            "prefill_tokens_per_second": 20000.0,
            "max_hold_seconds": None,
        },
        "selection": {},
        "requests": {"session_headers": None, "strip_body_fields": []},
    }


def test_a_disaggregated_topology_has_the_roles_of_llm_d_by_default() -> None:
    spec = read_policy(policy({"workers": {"inferencePool": "coder"}, "topology": "Disaggregated"}))
    assert spec.disaggregation is not None
    assert spec.disaggregation.model_dump() == {
        "role_label": "llm-d.ai/role",
        "retention_pool": "Decode",
        "handoff": "LlmD",
    }


def test_the_schema_names_the_parameter_that_selection_refuses() -> None:
    spec = {"workers": {"inferencePool": "coder"}, "selection": {"bufferPerProgram": 100}}
    assert refusals(crd(), policy(spec)) == ["spec.selection: selection takes no parameters, bufferPerProgram neither"]


def test_the_crd_checked_in_is_the_one_generated() -> None:
    assert (ROOT / "crds" / CRD_FILE_NAME).read_text() == crd_yaml(), "run: thunderagent crd > crds/" + CRD_FILE_NAME


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}.{key}")


SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def test_the_schema_is_structural() -> None:
    allowed = {"type", "description", "default", "nullable", "enum", "pattern", "format", "properties", "required"}
    allowed |= {"items", "additionalProperties", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength"}
    allowed |= {"minItems", "maxItems", "maxProperties"}
    allowed |= {"x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-validations"}
    for path, node in nodes(SCHEMA):
        if node == {"x-kubernetes-int-or-string": True}:
            continue
        assert set(node) <= allowed, path
        assert node["type"] in ("object", "array", "string", "integer", "number", "boolean"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert isinstance(node.get("additionalProperties", {}), dict), path


def test_every_field_has_a_description() -> None:
    fields = {
        f"{path}.{name}": field for path, node in nodes(SCHEMA) for name, field in node.get("properties", {}).items()
    }
    # Of metadata the API server lets nothing be said.
    assert [path for path, field in fields.items() if not field.get("description")] == [".metadata"]


def test_everything_of_a_size_is_bounded_in_the_spec_so_that_rules_are_cheap() -> None:
    for path, node in nodes(SCHEMA["properties"]["spec"]):
        bound = {"array": "maxItems", "string": "maxLength"}.get(node.get("type", ""))
        assert bound is None or bound in node or "enum" in node, path
        assert "additionalProperties" not in node or "maxProperties" in node, path


def test_every_rule_has_a_message() -> None:
    rules = [rule for _, node in nodes(SCHEMA) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) > 10
    assert all(rule["message"] for rule in rules)


def test_kubectl_shows_what_matters_at_a_glance() -> None:
    spec = crd()["spec"]
    assert spec["names"]["shortNames"] == ["tap"]
    assert spec["versions"][0]["subresources"] == {"status": {}}
    assert [column["name"] for column in spec["versions"][0]["additionalPrinterColumns"]] == [
        "Accepted",
        "Workers",
        "Capacity",
        "Pickers",
        "Age",
    ]


def test_a_whole_status_is_written_as_the_contract_has_it_and_fits_the_schema() -> None:
    status = PolicyStatus(
        observed_generation=3,
        conditions=[
            Condition(
                type="Accepted",
                status="True",
                reason="Accepted",
                message="",
                last_transition_time="2026-01-02T03:04:05Z",
                observed_generation=3,
            )
        ],
        workers=WorkerCounts.of(total=4, live=3, capacity_known=2),
        capacity_tokens=8948160,
        snapshot=PublishedSnapshot(id=1767323045000, content_hash="ab12", published_at="2026-01-02T03:04:05Z"),
        pickers=PickerCounts(connected=1, current=1),
    ).to_json()
    assert status == {
        "observedGeneration": 3,
        "conditions": [
            {
                "type": "Accepted",
                "status": "True",
                "reason": "Accepted",
                "message": "",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
                "observedGeneration": 3,
            }
        ],
        "workers": {"total": 4, "live": 3, "capacityKnown": 2, "summary": "3/4"},
        "capacityTokens": 8948160,
        "snapshot": {"id": 1767323045000, "contentHash": "ab12", "publishedAt": "2026-01-02T03:04:05Z"},
        "pickers": {"connected": 1, "current": 1},
    }
    assert refusals(crd(), policy({"workers": {"inferencePool": "coder"}}, status=status)) == []


def test_a_status_says_nothing_of_what_is_not_known() -> None:
    assert PolicyStatus(observed_generation=1).to_json() == {"observedGeneration": 1, "conditions": []}


def test_the_command_line_prints_the_crd() -> None:
    result = CliRunner().invoke(app, ["crd"])
    assert result.exit_code == 0
    assert result.stdout == crd_yaml()
