"""Which leg of a disaggregated turn a simulated worker runs. By itself, so that a command line can name it quickly."""

from __future__ import annotations

from enum import StrEnum


class WorkerRole(StrEnum):
    """A worker without a role runs both legs and hands nothing over."""

    PREFILL = "prefill"
    DECODE = "decode"
