import pytest
from prometheus_client import generate_latest

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import Mark, Pause, Release, Resume
from thunderagent_epp.telemetry.metrics import HoldClass, Metrics, Outcome
from thunderagent_epp.telemetry.status import Gauges, Readiness, SnapshotStatus, WorkerStatus, worker_statuses

A0 = WorkerRank("a", 0)
A1 = WorkerRank("a", 1)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"thunderagent_{name}", labels)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_two_processes_do_not_share_counts(metrics: Metrics) -> None:
    other = Metrics()
    metrics.request("/v1/messages", Outcome.COMPLETED)
    assert value(metrics, "requests_total", path="/v1/messages", outcome="completed") == 1
    assert value(other, "requests_total", path="/v1/messages", outcome="completed") == 0


def test_a_path_that_is_no_inference_path_is_counted_as_other(metrics: Metrics) -> None:
    metrics.request("/v1/models", Outcome.COMPLETED)
    metrics.request('/"\n}', Outcome.COMPLETED)
    assert value(metrics, "requests_total", path="other", outcome="completed") == 2
    assert b"/v1/models" not in generate_latest(metrics.registry)


def test_refusals_are_counted_by_code(metrics: Metrics) -> None:
    metrics.refusal("hold_timeout")
    metrics.refusal("hold_timeout")
    assert value(metrics, "refusals_total", code="hold_timeout") == 2


def test_holds_are_observed_by_class(metrics: Metrics) -> None:
    metrics.hold(0.2, HoldClass.PAUSED)
    assert value(metrics, "hold_duration_seconds_sum", **{"class": "paused"}) == 0.2
    assert value(metrics, "hold_duration_seconds_bucket", **{"class": "paused", "le": "0.25"}) == 1
    assert value(metrics, "hold_duration_seconds_bucket", **{"class": "paused", "le": "0.1"}) == 0
    assert value(metrics, "hold_duration_seconds_count", **{"class": "new"}) == 0


def test_processing_time_is_observed(metrics: Metrics) -> None:
    metrics.processing(0.0002)
    assert value(metrics, "processing_duration_seconds_bucket", le="0.00025") == 1
    assert value(metrics, "processing_duration_seconds_sum") == 0.0002


def test_the_series_of_a_vanished_worker_are_dropped(metrics: Metrics) -> None:
    metrics.pick(A0)
    metrics.pick(A1)
    metrics.pick(A1)
    metrics.keep_workers([A1])
    assert value(metrics, "picks_total", worker="a", rank="0") is None
    assert value(metrics, "picks_total", worker="a", rank="1") == 2


def test_a_worker_that_comes_back_is_counted_from_zero(metrics: Metrics) -> None:
    metrics.pick(A0)
    metrics.keep_workers([])
    metrics.pick(A0)
    assert value(metrics, "picks_total", worker="a", rank="0") == 1


def test_decisions_are_counted_by_what_they_do(metrics: Metrics) -> None:
    metrics.decided(
        [
            Resume("s1", A0, forced=False),
            Release("r1", A0),
            Resume("s2", A0, forced=True),
            Pause("s3", A0),
            Pause("s4", A0),
            Mark("s5", A0),
        ]
    )
    assert value(metrics, "resumes_total", forced="false") == 1
    assert value(metrics, "resumes_total", forced="true") == 1
    assert value(metrics, "pauses_total") == 2
    assert value(metrics, "marks_total") == 1


def test_answers_without_usage_are_counted(metrics: Metrics) -> None:
    metrics.missing_usage()
    assert value(metrics, "answers_without_usage_total") == 1


def test_a_refused_policy_file_is_counted_and_stays_visible_until_one_is_applied(metrics: Metrics) -> None:
    metrics.policy_file_reload(applied=False)
    assert value(metrics, "policy_file_reloads_total", result="refused") == 1
    assert value(metrics, "policy_file_last_reload_applied") == 0
    metrics.policy_file_reload(applied=True)
    assert value(metrics, "policy_file_last_reload_applied") == 1


def test_gauges_are_asked_for_at_each_scrape_and_not_before(metrics: Metrics) -> None:
    asked = 0

    def gauges() -> Gauges:
        nonlocal asked
        asked += 1
        return Gauges(readiness=Readiness.OK, snapshot=SnapshotStatus(id=7, age_seconds=1.5), waiting=asked)

    metrics.watch(gauges)
    assert asked == 0
    assert value(metrics, "requests_waiting") == 1
    assert value(metrics, "requests_waiting") == 2
    assert value(metrics, "snapshot_id") == 7
    assert value(metrics, "snapshot_age_seconds") == 1.5
    assert value(metrics, "ready") == 1


def test_without_a_snapshot_there_is_no_snapshot_series_and_the_picker_is_not_ready(metrics: Metrics) -> None:
    metrics.watch(Gauges)
    assert value(metrics, "snapshot_id") is None
    assert value(metrics, "snapshot_age_seconds") is None
    assert value(metrics, "ready") == 0


def test_programs_are_counted_by_status_and_lifecycle_and_absent_pairs_are_zero(metrics: Metrics) -> None:
    metrics.watch(lambda: Gauges(programs={("acting", "paused"): 3}))
    assert value(metrics, "programs", status="acting", lifecycle="paused") == 3
    assert value(metrics, "programs", status="reasoning", lifecycle="active") == 0


def test_unknown_capacity_is_no_series_rather_than_zero(metrics: Metrics) -> None:
    known = WorkerStatus("a", 0, "10.0.0.1:8000", Role.BOTH, True, 1000, 280)
    unknown = WorkerStatus("b", 0, "10.0.0.2:8000", Role.BOTH, False, None, 0)
    metrics.watch(lambda: Gauges(workers=[known, unknown]))
    assert value(metrics, "worker_capacity_tokens", worker="a", rank="0") == 1000
    assert value(metrics, "worker_used_tokens", worker="a", rank="0") == 280
    assert value(metrics, "worker_live", worker="a", rank="0") == 1
    assert value(metrics, "worker_capacity_tokens", worker="b", rank="0") is None
    assert value(metrics, "worker_capacity_known", worker="b", rank="0") == 0
    assert value(metrics, "worker_live", worker="b", rank="0") == 0


def test_models_beyond_the_cap_share_one_series(metrics: Metrics) -> None:
    by_model = {f"m{i}": 4.0 for i in range(50)} | {"late": 2.0, "later": 3.0}
    metrics.watch(lambda: Gauges(bytes_per_token=by_model))
    assert value(metrics, "bytes_per_token", model="m49") == 4.0
    assert value(metrics, "bytes_per_token", model="late") is None
    assert value(metrics, "bytes_per_token", model="other") == 2.5


def test_a_model_name_of_any_length_or_called_other_shares_the_common_series(metrics: Metrics) -> None:
    metrics.watch(lambda: Gauges(bytes_per_token={"x" * 129: 2.0, "other": 4.0}))
    assert value(metrics, "bytes_per_token", model="x" * 129) is None
    assert value(metrics, "bytes_per_token", model="other") == 3.0


def test_worker_statuses_follow_the_snapshot_and_its_liveness() -> None:
    capacity = CapacitySnapshot(
        (
            Worker(A1, endpoint="10.0.0.1:8001", live=False),
            Worker(A0, endpoint="10.0.0.1:8000", capacity_tokens=1000),
        )
    )
    assert worker_statuses(capacity, {A0: 280, A1: 0}.__getitem__) == (
        WorkerStatus("a", 0, "10.0.0.1:8000", Role.BOTH, True, 1000, 280),
        WorkerStatus("a", 1, "10.0.0.1:8001", Role.BOTH, False, None, 0),
    )


def test_where_liveness_is_not_known_every_worker_counts_as_live() -> None:
    capacity = CapacitySnapshot((Worker(A0, live=False),), liveness_known=False)
    assert worker_statuses(capacity, lambda _: 0)[0].live is True
