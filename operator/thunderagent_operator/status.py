"""The status of a ThunderAgentPolicy: what the operator found and did, as users and `kubectl wait` read it.

Written by the handlers, whole, never read back as truth: all of it can be made again from the API and the pickers
(architecture.md, rule 4). Part of the resource's model, so that its schema is in the CRD like the spec's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

STATUS: Final = ConfigDict(frozen=True, extra="ignore", strict=True, validate_by_alias=True, validate_by_name=True)
"""Of every part of the status. Unknown fields are let be: a newer operator may have written them."""

_ABSENT_NOT_NULL: Final[dict[str, Any]] = {"nullable": False}

Count = Annotated[int, Field(ge=0)]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC."""


class ConditionType(StrEnum):
    """The conditions of a policy; each is there from the first time it is looked at."""

    ACCEPTED = "Accepted"
    """The spec is valid and what it refers to exists."""
    WORKERS_READY = "WorkersReady"
    """At least one worker is live, and one that decodes."""
    CAPACITY_KNOWN = "CapacityKnown"
    """The capacity of every live worker is known."""
    PROGRAMMED = "Programmed"
    """Every connected picker has the current snapshot."""


class Condition(BaseModel):
    """A standard Kubernetes condition (metav1.Condition, whose bounds these are)."""

    model_config = STATUS

    type: Annotated[str, Field(max_length=316)] = Field(
        description="Accepted, WorkersReady, CapacityKnown or Programmed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ] = Field(description="Why, in one word for programs.")
    message: Annotated[str, Field(max_length=32768)] = Field(description="Why, in a sentence for people.")
    last_transition_time: Timestamp = Field(alias="lastTransitionTime", description="When its status last changed.")
    observed_generation: Count | None = Field(
        None,
        alias="observedGeneration",
        description="Generation of the object it was set for.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )


class WorkerCounts(BaseModel):
    """Worker ranks: one per pod and target port."""

    model_config = STATUS

    total: Count = Field(0, description="Ranks in the snapshot.")
    live: Count = Field(0, description="Ranks whose pod is ready.")
    capacity_known: Count = Field(0, alias="capacityKnown", description="Live ranks whose capacity is known.")
    summary: Annotated[str, Field(max_length=32)] = Field(
        "0/0", description="live/total as one text: a printer column shows a single field."
    )

    @classmethod
    def of(cls, *, total: int, live: int, capacity_known: int) -> WorkerCounts:
        """Count, with the summary that goes with the counts."""
        return cls(total=total, live=live, capacity_known=capacity_known, summary=f"{live}/{total}")


class PublishedSnapshot(BaseModel):
    """The snapshot the operator last published for the policy."""

    model_config = STATUS

    id: Count = Field(description="Grows with every change of content.")
    content_hash: Annotated[str, Field(max_length=128)] = Field(
        alias="contentHash", description="Equal for snapshots of equal content."
    )
    published_at: Timestamp = Field(alias="publishedAt", description="When it was published.")


class PickerCounts(BaseModel):
    """Endpoint pickers that follow the policy."""

    model_config = STATUS

    connected: Count = Field(0, description="Pickers connected to the operator's feed.")
    current: Count = Field(0, description="Those of them that applied the current snapshot.")


class PolicyStatus(BaseModel):
    """The status of a ThunderAgentPolicy; every field may be missing until the operator has got to it."""

    model_config = STATUS

    observed_generation: Count | None = Field(
        None,
        alias="observedGeneration",
        description="Generation of the object the status is about.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    conditions: Annotated[list[Condition], Field(max_length=8)] = Field(
        default_factory=list,
        description="Accepted, WorkersReady, CapacityKnown, Programmed.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    workers: WorkerCounts | None = Field(None, description="Worker ranks found.", json_schema_extra=_ABSENT_NOT_NULL)
    capacity_tokens: Count | None = Field(
        None,
        alias="capacityTokens",
        description="Sum over the live ranks whose capacity is known.",
        json_schema_extra=_ABSENT_NOT_NULL,
    )
    snapshot: PublishedSnapshot | None = Field(
        None, description="The snapshot in force.", json_schema_extra=_ABSENT_NOT_NULL
    )
    pickers: PickerCounts | None = Field(
        None, description="Endpoint pickers that follow the policy.", json_schema_extra=_ABSENT_NOT_NULL
    )

    def to_json(self) -> dict[str, Any]:
        """What is patched into the object's status: camelCase, without what is not known."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
