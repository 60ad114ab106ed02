"""Everything the picker counts, for Prometheus (prefix ``thunderagent_``, base units).

What happens on the path of a request is a counter or a histogram whose label children are found by one dictionary
look-up; what merely *is* (workers, programs, the snapshot's age) is read when somebody scrapes. The server and its
director call in, `http.py` renders. Protects the time-series database from clients: each label a client can choose
is mapped to a closed set or capped, and the series of a worker go when it goes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from thunderagent_epp import __version__
from thunderagent_epp.requests.inference import INFERENCE_PATHS
from thunderagent_epp.scheduling.capacity import WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Mark, Pause, Resume
from thunderagent_epp.scheduling.program import Lifecycle, Status
from thunderagent_epp.telemetry.status import Gauges, Readiness

# A second series beside each counter, of the time it was made, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

OTHER: Final = "other"
"""Label value of every path and model without a series of its own."""

MODELS_MAX: Final = 50
"""Models with a series of their own; the model is whatever a client wrote."""

MODEL_CHARACTERS_MAX: Final = 128

HOLD_BUCKETS_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
PROCESSING_BUCKETS_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class Outcome(StrEnum):
    """How a request ended; every request has exactly one."""

    COMPLETED = "completed"
    """A 2xx answer was seen to its end."""
    ABORTED = "aborted"
    """The client left, the worker failed or answered otherwise than 2xx."""
    REFUSED = "refused"
    """The picker answered it itself."""


class HoldClass(StrEnum):
    """Why a request waited."""

    NEW = "new"
    """The first turn of its program."""
    CONTINUATION = "continuation"
    """A later turn, behind another turn of its session or without room on its worker."""
    PAUSED = "paused"
    """A later turn of a program that was paused between turns."""


class Metrics:
    """One process's metrics, in a registry of their own. Not thread-safe beyond what prometheus_client is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "thunderagent_requests", "Requests ended.", ("path", "outcome"), registry=self.registry
        )
        self._request_children = {
            (path, outcome): self._requests.labels(path, outcome)
            for path in (*sorted(INFERENCE_PATHS), OTHER)
            for outcome in Outcome
        }
        self._refusals = Counter(
            "thunderagent_refusals", "Requests the picker refused itself.", ("code",), registry=self.registry
        )
        self._hold = Histogram(
            "thunderagent_hold_duration_seconds",
            "Time a request was held, one observation per request that had to wait, however the hold ended.",
            ("class",),
            buckets=HOLD_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._hold_children = {held: self._hold.labels(held) for held in HoldClass}
        self._processing = Histogram(
            "thunderagent_processing_duration_seconds",
            "Time a request spent in the picker besides being held, from its last byte to the answer to the proxy.",
            buckets=PROCESSING_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._picks = Counter(
            "thunderagent_picks", "Requests sent to a worker rank.", ("worker", "rank"), registry=self.registry
        )
        self._pick_children: dict[WorkerRank, Counter] = {}
        self._prefills = Counter(
            "thunderagent_prefills",
            "Requests whose prefill a worker rank was named for, with topology Disaggregated.",
            ("worker", "rank"),
            registry=self.registry,
        )
        self._prefill_children: dict[WorkerRank, Counter] = {}
        self._pauses = Counter("thunderagent_pauses", "Idle programs paused.", registry=self.registry)
        self._marks = Counter(
            "thunderagent_marks", "Programs marked to be paused when their turn completes.", registry=self.registry
        )
        resumes = Counter(
            "thunderagent_resumes",
            "Programs resumed; forced: by the resume timeout, even over capacity.",
            ("forced",),
            registry=self.registry,
        )
        self._resumes = {forced: resumes.labels(str(forced).lower()) for forced in (False, True)}
        self._missing_usage = Counter(
            "thunderagent_answers_without_usage",
            "Answers that completed without usage; their size was estimated.",
            registry=self.registry,
        )
        reloads = Counter(
            "thunderagent_policy_file_reloads",
            "Changes of the policy file seen, by whether they could be applied.",
            ("result",),
            registry=self.registry,
        )
        self._reloads = {applied: reloads.labels("applied" if applied else "refused") for applied in (False, True)}
        self._reload_applied = Gauge(
            "thunderagent_policy_file_last_reload_applied",
            "1 if the policy file as it is now is in force, 0 if it is refused and an older one stays.",
            registry=self.registry,
        )
        self._reload_applied.set(1)
        build = Gauge("thunderagent_build_info", "Always 1.", ("version", "python_version"), registry=self.registry)
        build.labels(__version__, platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Ask ``gauges`` at each scrape for the numbers of that moment. Call once."""
        self.registry.register(_Moment(gauges))

    def watch_feed(self, connected: Callable[[], bool], refusals: Callable[[], int]) -> None:
        """Show the feed of an operator, asked at each scrape. Call once, where there is one."""
        Gauge(
            "thunderagent_feed_connected", "1 while the operator's feed is followed.", registry=self.registry
        ).set_function(connected)
        Gauge(
            "thunderagent_feed_refused_snapshots", "Snapshots that could not be applied.", registry=self.registry
        ).set_function(refusals)

    def request(self, path: str, outcome: Outcome) -> None:
        """Count a request when it has ended; ``path`` without its query, any client's text is safe."""
        self._request_children[path if path in INFERENCE_PATHS else OTHER, outcome].inc()

    def refusal(self, code: str) -> None:
        """Count a refusal by its code in the table of extproc.md; `request` counts the request as well."""
        self._refusals.labels(code).inc()

    def hold(self, seconds: float, held: HoldClass) -> None:
        """Observe the end of a hold: a release, a refusal or a client that left. Not called when nothing waited."""
        self._hold_children[held].observe(seconds)

    def processing(self, seconds: float) -> None:
        """Observe what a request cost in the picker itself, holding excluded."""
        self._processing.observe(seconds)

    def pick(self, worker: WorkerRank) -> None:
        """Count a request sent to this rank."""
        child = self._pick_children.get(worker)
        if child is None:
            child = self._pick_children[worker] = self._picks.labels(worker.worker, str(worker.rank))
        child.inc()

    def prefill(self, worker: WorkerRank) -> None:
        """Count a request whose prefill this rank was named for."""
        child = self._prefill_children.get(worker)
        if child is None:
            child = self._prefill_children[worker] = self._prefills.labels(worker.worker, str(worker.rank))
        child.inc()

    def keep_workers(self, workers: Iterable[WorkerRank]) -> None:
        """Drop the series of every other worker; call when a snapshot is applied."""
        kept = set(workers)
        for children, family in ((self._pick_children, self._picks), (self._prefill_children, self._prefills)):
            for gone in children.keys() - kept:
                del children[gone]
                family.remove(gone.worker, str(gone.rank))

    def decided(self, decisions: Iterable[Decision]) -> None:
        """Count the pauses, marks and resumes among what an admission policy decided."""
        for decision in decisions:
            match decision:
                case Resume(forced=forced):
                    self._resumes[forced].inc()
                case Pause():
                    self._pauses.inc()
                case Mark():
                    self._marks.inc()

    def missing_usage(self) -> None:
        """Count a completed answer that told no usage."""
        self._missing_usage.inc()

    def policy_file_reload(self, *, applied: bool) -> None:
        """Count a change of the policy file."""
        self._reloads[applied].inc()
        self._reload_applied.set(applied)


class _Moment(Collector):
    """Turns one `Gauges` into metric families; a worker without a known capacity has no capacity series."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._models: set[str] = set()
        """Models with a series of their own: kept from scrape to scrape, so that none comes and goes."""

    def describe(self) -> Iterator[Metric]:
        """Name the families without asking for their values: registering must not look at an unfinished process."""
        return self._families(Gauges())

    def collect(self) -> Iterator[Metric]:
        """Read the numbers of this moment."""
        return self._families(self._gauges())

    def _families(self, now: Gauges) -> Iterator[Metric]:
        def single(name: str, text: str, value: float | None) -> Metric:
            family = GaugeMetricFamily(f"thunderagent_{name}", text)
            if value is not None:
                family.add_metric((), value)
            return family

        snapshot = now.snapshot
        yield single("ready", "1 if requests are taken.", now.readiness is Readiness.OK)
        yield single("snapshot_id", "Id of the snapshot in force.", snapshot.id if snapshot else None)
        yield single("snapshot_age_seconds", "Time since it was applied.", snapshot.age_seconds if snapshot else None)
        yield single("requests_waiting", "Tracked requests not released yet.", now.waiting)
        yield single("requests_tracked", "Requests the admission policy knows.", now.tracked)
        yield single("holds", "Requests held now.", now.holds)
        yield single("held_bytes", "Bodies of the requests held now.", now.held_bytes)
        yield single("open_streams", "ext_proc streams open now.", now.open_streams)
        programs = GaugeMetricFamily("thunderagent_programs", "Programs by state.", labels=("status", "lifecycle"))
        for status in Status:
            for lifecycle in Lifecycle:
                programs.add_metric((status, lifecycle), now.programs.get((status, lifecycle), 0))
        yield programs
        yield from _workers(now)
        bytes_per_token = GaugeMetricFamily(
            "thunderagent_bytes_per_token", "Prompt bytes per token, as learned from usage.", labels=("model",)
        )
        for model, value in self._capped(now.bytes_per_token):
            bytes_per_token.add_metric((model,), value)
        yield bytes_per_token

    def _capped(self, by_model: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Some models by themselves, the mean of all others as one."""
        self._models &= by_model.keys()
        fit = (model for model in by_model if len(model) <= MODEL_CHARACTERS_MAX and model != OTHER)
        new = (model for model in fit if model not in self._models)
        self._models.update(islice(new, MODELS_MAX - len(self._models)))
        others = []
        for model, value in by_model.items():
            if model in self._models:
                yield model, value
            else:
                others.append(value)
        if others:
            yield OTHER, sum(others) / len(others)


def _workers(now: Gauges) -> Iterator[Metric]:
    labels = ("worker", "rank")
    live = GaugeMetricFamily("thunderagent_worker_live", "1 if the rank takes requests.", labels=labels)
    known = GaugeMetricFamily("thunderagent_worker_capacity_known", "1 if its capacity is known.", labels=labels)
    capacity = GaugeMetricFamily(
        "thunderagent_worker_capacity_tokens", "Tokens its KV cache holds; no series while unknown.", labels=labels
    )
    used = GaugeMetricFamily("thunderagent_worker_used_tokens", "Tokens charged to it.", labels=labels)
    role = GaugeMetricFamily(
        "thunderagent_worker_role", "Always 1: what the rank does, prefill, decode or both.", labels=(*labels, "role")
    )
    for worker in now.workers:
        values = (worker.worker, str(worker.rank))
        live.add_metric(values, worker.live)
        known.add_metric(values, worker.capacity_tokens is not None)
        if worker.capacity_tokens is not None:
            capacity.add_metric(values, worker.capacity_tokens)
        used.add_metric(values, worker.used_tokens)
        role.add_metric((*values, worker.role), 1)
    yield from (live, known, capacity, used, role)
