"""What the operator counts of its probes, for Prometheus (prefix ``thunderagent_``, base units).

Made once per process, in the registry it is given: the operator's own, or that of the picker in ``standalone``. No
series of a worker's own: there are thousands, and the pickers export each one's capacity already.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PROBE_BUCKETS_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ProbeResult(StrEnum):
    """How a probe ended; every probe has exactly one."""

    KNOWN = "known"
    """The worker said what it holds."""
    UNKNOWN = "unknown"
    """It answered, but does not say, or not yet."""
    UNREACHABLE = "unreachable"
    """No connection, or it was lost."""
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    """The answer is not what was asked for."""
    ERROR = "error"
    """A fault of the operator's own."""


class ProbeMetrics:
    """Counts of the prober."""

    def __init__(self, registry: CollectorRegistry) -> None:
        results = Counter(
            "thunderagent_probes", "Probes of a worker's capacity ended, by result.", ("result",), registry=registry
        )
        self._results = {result: results.labels(result) for result in ProbeResult}
        self._duration = Histogram(
            "thunderagent_probe_duration_seconds",
            "Time a probe took, all its requests together.",
            buckets=PROBE_BUCKETS_SECONDS,
            registry=registry,
        )
        self._followed = Gauge("thunderagent_probe_workers", "Worker ranks that are probed.", registry=registry)
        self._failing = Gauge(
            "thunderagent_probe_workers_failing", "Worker ranks whose last probe failed.", registry=registry
        )

    def ended(self, result: ProbeResult, seconds: float) -> None:
        """Count a probe."""
        self._results[result].inc()
        self._duration.observe(seconds)

    def watch(self, followed: Callable[[], int], failing: Callable[[], int]) -> None:
        """Ask for these numbers at each scrape."""
        self._followed.set_function(followed)
        self._failing.set_function(failing)


class OperatorMetrics:
    """What the operator is and does beside probing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._leading = Gauge("thunderagent_operator_leading", "1 while this one holds the Lease.", registry=registry)
        self._policies = Gauge("thunderagent_operator_policies", "Policies known.", registry=registry)
        self._pickers = Gauge("thunderagent_operator_pickers", "Picker streams open on the feed.", registry=registry)
        self._listed = Gauge(
            "thunderagent_operator_listed_age_seconds",
            "Time since the API last answered all lists; -1 before the first time.",
            registry=registry,
        )
        self._status_failures = Gauge(
            "thunderagent_operator_status_failures", "Statuses and events that could not be written.", registry=registry
        )

    def watch(
        self,
        *,
        leading: Callable[[], bool],
        policies: Callable[[], int],
        pickers: Callable[[], int],
        listed_age_seconds: Callable[[], float | None],
        status_failures: Callable[[], int],
    ) -> None:
        """Ask for these numbers at each scrape."""
        self._leading.set_function(leading)
        self._policies.set_function(policies)
        self._pickers.set_function(pickers)
        self._listed.set_function(lambda: -1 if (age := listed_age_seconds()) is None else age)
        self._status_failures.set_function(status_failures)
