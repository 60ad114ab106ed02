"""The parameters of admission: their names, defaults, bounds and relations, and nothing else knows them.

Two spellings of one model. In code, traces and metrics the names are snake_case and durations are numbers of
seconds (``resume_timeout_seconds: 1800``). In a ThunderAgentPolicy and a policy file they are camelCase and
durations are Kubernetes duration strings (``resumeTimeout: 30m``); the CRD and the chart's schema are generated
from that spelling. `AdmissionPolicy.from_parameters` reads the first, a model that embeds this one and is
validated by alias with ``context=SPEC`` reads the second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import durationpy
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

SPEC: Final = "spec"
"""Validation context of everything a user writes in YAML: durations must be text, as in the CRD's schema."""

DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"


def _seconds(value: object, info: ValidationInfo) -> object:
    """Turn a Kubernetes duration string into seconds; numbers pass, but not where a spec is read."""
    if isinstance(value, str):
        if not re.fullmatch(DURATION_PATTERN, value):
            raise ValueError(f"must be a duration such as 500ms, 10s, 30m or 1h30m, not {value!r}")
        return durationpy.from_str(value).total_seconds()
    if info.context == SPEC:
        raise ValueError(f"must be a duration such as 500ms, 10s, 30m or 1h30m, not {value!r}")
    return value


Fraction = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Seconds = Annotated[
    float,
    Field(gt=0, strict=True, allow_inf_nan=False),
    BeforeValidator(_seconds),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN}),
]


class AdmissionPolicy(BaseModel):
    """How programs are admitted, paused and resumed (scheduling.md, *Parameters*).

    Fractions are of a worker's capacity and lie in [0, 1]; durations are seconds, finite and > 0.
    Raises pydantic.ValidationError that names each offending field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_alias=True, validate_by_name=False)

    policy: Literal["Disabled", "Classic", "Rotation"] = Field(
        "Classic",
        description="Disabled places every request by load and holds none; Classic admits by program and pauses under "
        "pressure; Rotation admits by program and bounds every hold by holdBudget.",
    )
    pause_threshold: Fraction = Field(
        0.95, alias="pauseThreshold", description="Share of a worker's capacity above which its programs are paused."
    )
    pause_target: Fraction = Field(
        0.80,
        alias="pauseTarget",
        validate_default=True,
        description="Share of capacity down to which a worker over the threshold is emptied.",
    )
    resume_hysteresis: Fraction = Field(
        0.10,
        alias="resumeHysteresis",
        validate_default=True,
        description="Classic only: share of capacity below the threshold that must stay free when programs are "
        "resumed.",
    )
    resume_timeout_seconds: Seconds = Field(
        1800.0, alias="resumeTimeout", description="A turn held this long is resumed even over capacity."
    )
    session_retention_seconds: Seconds = Field(
        1800.0, alias="sessionRetention", description="An idle program is forgotten after this long."
    )
    scheduler_interval_seconds: Seconds = Field(
        5.0, alias="schedulerInterval", description="How often programs are paused and resumed."
    )
    acting_token_weight: Positive = Field(
        1.0, alias="actingTokenWeight", description="Weight of an acting program's tokens in its worker's charge."
    )
    acting_decay_tau_seconds: Seconds = Field(
        1.0, alias="actingDecayTau", description="Half-life of an acting program's weight where a resume is forced."
    )
    buffer_per_program: Annotated[int, Field(ge=0, strict=True)] = Field(
        100, alias="bufferPerProgram", description="Tokens charged for each program beside its context."
    )
    max_tracked_requests: Annotated[int, Field(gt=0, strict=True)] = Field(
        10000, alias="maxTrackedRequests", description="Requests, and programs, known at once; more are refused."
    )
    hold_budget: Annotated[float, Field(gt=0, le=1, strict=True, allow_inf_nan=False)] = Field(
        0.3,
        alias="holdBudget",
        description="Rotation only: share of prefill that rotating programs may cost; 0.14 for throughput, 0.4 for "
        "shorter holds.",
    )
    prefill_tokens_per_second: Positive = Field(
        20000.0,
        alias="prefillTokensPerSecond",
        description="Rotation only: prompt tokens one worker computes in a second when nothing of them is cached.",
    )
    max_hold_seconds: Seconds | None = Field(
        None, alias="maxHold", description="A turn held longer is refused; set it below the route's timeout."
    )

    @field_validator("pause_target", "resume_hysteresis")
    @classmethod
    def _not_above_the_threshold(cls, value: float, info: ValidationInfo) -> float:
        threshold = info.data.get("pause_threshold")
        if threshold is not None and value > threshold:
            raise ValueError(f"must not be above the pause threshold: {value:g} > {threshold:g}")
        return value

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Read parameters by their scheduling.md names, durations in seconds. Raises pydantic.ValidationError."""
        return cls.model_validate(dict(parameters), by_alias=False, by_name=True)
