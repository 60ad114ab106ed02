"""Whether prefill and decode run on workers of their own, and what then holds between the two (kubernetes.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role


class RetentionPool(StrEnum):
    """Whose capacity is the ledger's, and so pauses programs."""

    DECODE = "Decode"
    PREFILL = "Prefill"
    BOTH = "Both"
    """The tighter of the two."""


class Handoff(StrEnum):
    """How a decode worker learns of the prefill worker."""

    LLM_D = "LlmD"
    """By the request header ``x-prefiller-host-port``."""
    DYNAMO = "Dynamo"
    """By the request headers ``x-dynamo-*``."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The terms of disaggregated serving; a policy without one is served aggregated."""

    retention_pool: RetentionPool = RetentionPool.DECODE
    handoff: Handoff = Handoff.LLM_D


def prefill_pool(capacity: CapacitySnapshot) -> CapacitySnapshot:
    """The workers that may do the prefill of another: those of role ``prefill`` and ``prefill-decode``."""
    return _pool(capacity, Role.PREFILL)


def decode_pool(capacity: CapacitySnapshot) -> CapacitySnapshot:
    """The workers a request may be sent to: those of role ``decode`` and ``prefill-decode``."""
    return _pool(capacity, Role.DECODE)


def _pool(capacity: CapacitySnapshot, role: Role) -> CapacitySnapshot:
    members = tuple(worker for worker in capacity.workers if worker.role in (role, Role.BOTH))
    return CapacitySnapshot(members, capacity.liveness_known)
