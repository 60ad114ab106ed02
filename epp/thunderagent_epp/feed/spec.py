"""The parts of a policy that a policy file and a ThunderAgentPolicy spell alike, beside admission itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool

PATH_PATTERN: Final = r"^/[!-~]*$"
HEADER_NAME_PATTERN: Final = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"
"""A field name of RFC 9110, section 5.1: no pseudo-headers."""

STRICT_SPEC: Final = ConfigDict(
    frozen=True, extra="forbid", strict=True, validate_by_alias=True, validate_by_name=False
)
"""Of every model a user writes: unknown fields are errors, text is never read as a number, camelCase only."""

CAPACITY_TOKENS_MAX: Final = 10**12
"""Far above any KV cache (at 1 KB a token: a petabyte) and far below what an int64 sum over a fleet holds."""

NAMES_MAX: Final = 32
NAME_CHARACTERS_MAX: Final = 256
"""Of a list of names and of each: bounds what the API server reckons the rules on them cost."""


def _path(text: str) -> str:
    if not re.fullmatch(PATH_PATTERN, text):
        raise ValueError(f"must be an absolute path such as /metrics, not {text[:60]!r}")
    return text


def _header_name(name: str) -> str:
    if not re.fullmatch(HEADER_NAME_PATTERN, name):
        raise ValueError(f"must be a header's name, not {name!r}")
    return name.lower()


def _body_field(name: str) -> str:
    if not name:
        raise ValueError("must be the name of a top-level field, not empty")
    return name


def _unique(names: list[str]) -> list[str]:
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice} is there twice")
    return names


Port = Annotated[int, Field(ge=1, le=65535)]
CapacityTokens = Annotated[int, Field(ge=1, le=CAPACITY_TOKENS_MAX)]
Engine = Literal["auto", "vllm", "sglang", "trtllm", "llamacpp", "none"]
HeaderName = Annotated[
    str,
    Field(max_length=NAME_CHARACTERS_MAX, json_schema_extra={"pattern": HEADER_NAME_PATTERN}),
    AfterValidator(_header_name),
]
BodyField = Annotated[
    str, Field(max_length=NAME_CHARACTERS_MAX, json_schema_extra={"minLength": 1}), AfterValidator(_body_field)
]


class SpecSection(BaseModel):
    """A mapping of the spec. A field given as null is one that was left out, as at the API server."""

    model_config = STRICT_SPEC

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None}


class MetricsSpec(SpecSection):
    """Where the metrics of a worker rank are read."""

    path: Annotated[str, Field(max_length=1024, json_schema_extra={"pattern": PATH_PATTERN}), AfterValidator(_path)] = (
        Field("/metrics", description="Path of the Prometheus metrics.")
    )
    port: Port | None = Field(None, description="Port of the metrics; null for the rank's own.")
    scheme: Literal["http", "https"] = Field(
        "http", description="https is used without verifying the certificate: pods have none for their address."
    )


class RequestsSpec(BaseModel):
    """How requests are read."""

    model_config = STRICT_SPEC

    session_headers: Annotated[list[HeaderName], Field(max_length=NAMES_MAX), AfterValidator(_unique)] | None = Field(
        None,
        alias="sessionHeaders",
        description="Headers that may name a request's session, first hit wins; null for the built-in list.",
    )
    strip_body_fields: Annotated[list[BodyField], Field(max_length=NAMES_MAX), AfterValidator(_unique)] = Field(
        default_factory=list,
        alias="stripBodyFields",
        description="Top-level fields of a JSON body that are not passed on to the worker.",
    )

    def policy(self) -> RequestPolicy:
        """The value the picker works with."""
        headers = self.session_headers
        return RequestPolicy(
            session_headers=None if headers is None else tuple(headers),
            strip_body_fields=tuple(self.strip_body_fields),
        )


class SelectionSpec(BaseModel):
    """Selection takes no parameters: a worker's cost is fixed by scheduling.md."""

    model_config = STRICT_SPEC


class DisaggregationTerms(BaseModel):
    """How prefill and decode workers are used together."""

    model_config = STRICT_SPEC

    retention_pool: Literal["Decode", "Prefill", "Both"] = Field(
        "Decode", alias="retentionPool", description="Whose capacity pauses programs."
    )
    handoff: Literal["LlmD", "Dynamo"] = Field(
        "LlmD", description="How the prefill worker is named to the decode worker."
    )

    def terms(self) -> Disaggregation:
        """The value the picker works with."""
        return Disaggregation(RetentionPool(self.retention_pool), Handoff(self.handoff))
