"""The parts of a policy that a policy file and a ThunderAgentPolicy spell alike, beside admission itself."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from thunderagent_epp.requests.policy import RequestPolicy

HEADER_NAME_PATTERN: Final = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"
"""A field name of RFC 9110, section 5.1: no pseudo-headers."""

STRICT_SPEC: Final = ConfigDict(
    frozen=True, extra="forbid", strict=True, validate_by_alias=True, validate_by_name=False
)
"""Of every model a user writes: unknown fields are errors, text is never read as a number, camelCase only."""


NAMES_MAX: Final = 32
NAME_CHARACTERS_MAX: Final = 256
"""Of a list of names and of each: bounds what the API server reckons the rules on them cost."""


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


HeaderName = Annotated[
    str,
    Field(max_length=NAME_CHARACTERS_MAX, json_schema_extra={"pattern": HEADER_NAME_PATTERN}),
    AfterValidator(_header_name),
]
BodyField = Annotated[
    str, Field(max_length=NAME_CHARACTERS_MAX, json_schema_extra={"minLength": 1}), AfterValidator(_body_field)
]


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
