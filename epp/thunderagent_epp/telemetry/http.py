"""The picker's HTTP port: `/state` beside the pages that every process has. Session ids are shown as given, so the
port belongs inside the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.pages import PageServer
from thunderagent_epp.telemetry.status import Readiness, Status


def status_server(metrics: Metrics, status: Callable[[], Status], readiness: Callable[[], Readiness]) -> PageServer:
    """The server of one picker's telemetry."""

    def why_not_ready() -> str | None:
        reason = readiness()
        return None if reason is Readiness.OK else reason.value

    return PageServer(
        "ThunderAgent endpoint picker",
        metrics.registry,
        healthy=lambda: None,
        ready=why_not_ready,
        pages={
            "/state": (
                "policy, snapshot, workers, programs and what waits, as JSON",
                lambda: state_answer(status()),
            )
        },
    )


def state_answer(status: Status) -> dict[str, Any]:
    """What `/state` says, as a mapping ready for JSON; unknown is None."""
    state = status.state
    return {
        "ready": status.readiness is Readiness.OK,
        "reason": status.readiness,
        "policy": status.policy,
        "snapshot": None if status.snapshot is None else asdict(status.snapshot),
        "holds": status.holds,
        "held_bytes": status.held_bytes,
        "workers": status.workers,
        "programs": state.programs,
        "used": state.used,
        "waiting": state.waiting,
        "tracked": state.tracked,
    }
