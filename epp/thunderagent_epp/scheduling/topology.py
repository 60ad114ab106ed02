"""Whether prefill and decode run on workers of their own, and what then holds between the two (kubernetes.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
