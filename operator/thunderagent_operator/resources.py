"""ThunderAgentPolicy as a model: what a user writes, checked here once more (kubernetes.md, *ThunderAgentPolicy*).

The CustomResourceDefinition is generated from these models (`crd.py`), so the API server refuses most faults before
they get here; clusters that evaluate no CEL, and objects older than the CRD in force, rely on this module alone.
Handlers call `read_policy` with the object as the API gave it. It protects them from every other shape: what comes
out is valid, what does not is a list of sentences for the object's condition, each naming its field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from thunderagent_epp.feed.problems import Problem, problems
from thunderagent_epp.feed.spec import (
    STRICT_SPEC,
    CapacityTokens,
    Engine,
    MetricsSpec,
    Port,
    RequestsSpec,
    SelectionSpec,
    SpecSection,
)
from thunderagent_epp.scheduling.policy import SPEC, AdmissionPolicy, Seconds
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool
from thunderagent_operator.status import PolicyStatus

GROUP: Final = "thunderagent.io"
VERSION: Final = "v1alpha1"
KIND: Final = "ThunderAgentPolicy"
PLURAL: Final = "thunderagentpolicies"

TARGET_PORTS_MAX: Final = 8
"""Ports of an InferencePool v1."""

_LABEL_NAME: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DNS_SUBDOMAIN: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
LABEL_KEY_PATTERN: Final = rf"^({_DNS_SUBDOMAIN}/)?{_LABEL_NAME}$"
LABEL_KEY_CHARACTERS_MAX: Final = 317
LABEL_VALUE_PATTERN: Final = rf"^({_LABEL_NAME})?$"
OBJECT_NAME_PATTERN: Final = rf"^{_DNS_SUBDOMAIN}$"

_ABSENT_NOT_NULL: Final[dict[str, Any]] = {"nullable": False}
"""Schema of an optional field without a default, where null means nothing: the API server drops a null, and CEL's
``has`` tells whether the field was given."""


def _matches(pattern: str, what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {what}, not {text[:60]!r}")
        return text

    return AfterValidator(check)


def _unique(ports: list[int]) -> list[int]:
    twice = next((port for index, port in enumerate(ports) if port in ports[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice} is there twice; each port is a rank of its own")
    return ports


LabelKey = Annotated[
    str,
    Field(max_length=LABEL_KEY_CHARACTERS_MAX, json_schema_extra={"pattern": LABEL_KEY_PATTERN}),
    _matches(LABEL_KEY_PATTERN, "a label's name such as llm-d.ai/role"),
]
LabelValue = Annotated[
    str,
    Field(max_length=63, json_schema_extra={"pattern": LABEL_VALUE_PATTERN}),
    _matches(LABEL_VALUE_PATTERN, "a label's value"),
]


class LabelRequirement(SpecSection):
    """One requirement on a label of a pod."""

    key: LabelKey = Field(description="The label's name.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="In and NotIn compare the label's value with values, Exists and DoesNotExist take none."
    )
    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(
        default_factory=list, description="Values of In and NotIn, at least one.", json_schema_extra=_ABSENT_NOT_NULL
    )

    @model_validator(mode="after")
    def _values_go_with_the_operator(self) -> Self:
        if self.operator in ("In", "NotIn") and not self.values:
            raise ValueError(f"operator {self.operator} needs values")
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise ValueError(f"operator {self.operator} takes no values")
        return self


class LabelSelector(SpecSection):
    """A standard label selector; never the empty one, which would take every pod of the namespace."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        default_factory=dict,
        alias="matchLabels",
        description="Labels a pod must have, with their values.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] = Field(
        default_factory=list,
        alias="matchExpressions",
        description="Further requirements; all must hold.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.match_labels and not self.match_expressions:
            raise ValueError("must name at least one label")
        return self


class WorkersSpec(SpecSection):
    """Which pods are workers, and how much each of their ports can hold."""

    inference_pool: (
        Annotated[
            str,
            Field(max_length=253, json_schema_extra={"pattern": OBJECT_NAME_PATTERN}),
            _matches(OBJECT_NAME_PATTERN, "the name of an InferencePool"),
        ]
        | None
    ) = Field(
        None,
        alias="inferencePool",
        description="InferencePool (inference.networking.k8s.io/v1) of the same namespace whose selector and ports are "
        "taken; exactly one of inferencePool and selector is required.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    selector: LabelSelector | None = Field(
        None,
        description="Labels of the worker pods in the policy's namespace.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    target_ports: (
        Annotated[list[Port], Field(min_length=1, max_length=TARGET_PORTS_MAX), AfterValidator(_unique)] | None
    ) = Field(
        None,
        alias="targetPorts",
        description="Ports of each pod, with selector only; each is one data-parallel rank, in this order.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    engine: Engine = Field(
        "auto",
        description="What serves the model; auto goes by the pod's engine label, else by its metrics; none probes "
        "nothing.",
    )
    engine_label: LabelKey = Field(
        "llm-d.ai/engine-type", alias="engineLabel", description="Label of a pod that names its engine."
    )
    metrics: MetricsSpec = Field(default_factory=MetricsSpec, description="Where a worker's metrics are read.")
    capacity_tokens: CapacityTokens | None = Field(
        None, alias="capacityTokens", description="Tokens the KV cache of each rank holds; null to probe it."
    )
    block_size: Annotated[int, Field(ge=1, le=65536)] = Field(
        16, alias="blockSize", description="Tokens of a KV cache block, used where a worker does not say."
    )
    probe_interval_seconds: Seconds = Field(
        10.0,
        alias="probeInterval",
        description="Time between two probes of a worker; stretched while very many workers are followed.",
    )

    @model_validator(mode="after")
    def _pods_are_named_once(self) -> Self:
        if (self.inference_pool is None) == (self.selector is None):
            raise ValueError("exactly one of inferencePool and selector is required")
        if self.selector is not None and self.target_ports is None:
            raise ValueError("targetPorts is required with selector")
        if self.inference_pool is not None and self.target_ports is not None:
            raise ValueError("targetPorts goes with selector; an inferencePool brings its own")
        return self


class DisaggregationSpec(SpecSection):
    """How prefill and decode workers are told apart and used together."""

    role_label: LabelKey = Field(
        "llm-d.ai/role",
        alias="roleLabel",
        description="Label of a pod with its role: prefill, decode or prefill-decode for both; without it: decode.",
    )
    retention_pool: Literal["Decode", "Prefill", "Both"] = Field(
        "Decode", alias="retentionPool", description="Whose capacity pauses programs."
    )
    handoff: Literal["LlmD", "Dynamo"] = Field(
        "LlmD",
        description="How the prefill worker is named to the decode worker: LlmD by x-prefiller-host-port, Dynamo by "
        "x-dynamo headers.",
    )

    def terms(self) -> Disaggregation:
        """The value the picker works with."""
        return Disaggregation(RetentionPool(self.retention_pool), Handoff(self.handoff))


class PolicySpec(SpecSection):
    """The spec of a ThunderAgentPolicy. Validate by alias with ``context=SPEC``; `read_policy` does."""

    workers: WorkersSpec = Field(description="Which pods are workers, and how much each of their ports can hold.")
    topology: Literal["Aggregated", "Disaggregated"] = Field(
        "Aggregated", description="Whether each worker does prefill and decode, or they are split among workers."
    )
    disaggregation: DisaggregationSpec | None = Field(
        None,
        description="How prefill and decode workers work together; with topology Disaggregated only.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    admission: AdmissionPolicy = Field(
        default_factory=AdmissionPolicy, description="How programs are admitted, paused and resumed."
    )
    selection: SelectionSpec = Field(
        default_factory=SelectionSpec, description="How a worker is chosen; takes no parameters."
    )
    requests: RequestsSpec = Field(default_factory=RequestsSpec, description="How requests are read.")

    @model_validator(mode="before")
    @classmethod
    def _disaggregated_by_default_fields(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("topology") != "Disaggregated":
            return given
        return {**given, "disaggregation": {} if given.get("disaggregation") is None else given["disaggregation"]}

    @model_validator(mode="after")
    def _disaggregation_goes_with_its_topology(self) -> Self:
        if self.topology == "Aggregated" and self.disaggregation is not None:
            raise ValueError("disaggregation goes with topology Disaggregated only")
        return self


class ThunderAgentPolicy(BaseModel):
    """Program-aware admission for one set of inference workers."""

    model_config = STRICT_SPEC

    spec: PolicySpec = Field(description="What is wanted.")
    status: PolicyStatus | None = Field(
        None, description="What the operator did, and what is wrong.", json_schema_extra=_ABSENT_NOT_NULL
    )


class InvalidPolicyError(Exception):
    """A ThunderAgentPolicy that cannot be used. ``problems`` are in the order of the fields; the text joins them."""

    def __init__(self, found: list[Problem]) -> None:
        super().__init__("; ".join(map(str, found)))
        self.problems = found


def read_policy(body: Mapping[str, Any]) -> PolicySpec:
    """Read the spec of an object as the API gives it, its status not looked at. Raises InvalidPolicyError."""
    given = {"spec": body.get("spec")}
    try:
        return ThunderAgentPolicy.model_validate(given, by_alias=True, by_name=False, context=SPEC).spec
    except ValidationError as error:
        found = problems(error, ThunderAgentPolicy, given)
        raise InvalidPolicyError([_in_policy(problem) for problem in found]) from None


def _in_policy(problem: Problem) -> Problem:
    """Say more where the fault has a meaning of its own."""
    match problem.path:
        case ("spec", "selection", str(name)):
            return Problem(problem.path, f"selection takes no parameters, {name} neither")
        case (*path, str(), "[key]"):
            return Problem(tuple(path), problem.message)
        case _:
            return problem
