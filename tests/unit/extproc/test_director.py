"""The director: one request in, one placement out, now or after a hold; what ends a request leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.admission import Admission
from thunderagent_epp.extproc.director import Director
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics
from thunderagent_epp.telemetry.status import Readiness

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
PATH = "/v1/chat/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def director(clock: Clock, metrics: Metrics) -> Director:
    director = Director(metrics, max_held_bytes=1000, clock=clock)
    director.apply(snapshot(1, a=1000, b=1000))
    return director


def snapshot(number: int, *, parameters: dict[str, Any] | None = None, **capacities: int | None) -> Snapshot:
    endpoints = {"a": A, "b": B}
    workers = tuple(
        Worker(WorkerRank(name), endpoint=endpoints[name], capacity_tokens=capacity)
        for name, capacity in capacities.items()
    )
    policy = AdmissionPolicy.from_parameters({"buffer_per_program": 0} | (parameters or {}))
    return Snapshot(number, CapacitySnapshot(workers), policy)


def turn(director: Director, session: str | None, tokens: int, **given: Any) -> Admission:
    """Admit a turn whose prompt is ``tokens`` at the four bytes a token that nothing was learned about."""
    request = InferenceRequest(PATH, True, session=session, prompt_bytes=4 * tokens, final=given.pop("final", False))
    return director.admit(request, subset=given.pop("subset", None), body_bytes=given.pop("body_bytes", 10))


def complete(admission: Admission, usage: str = '{"usage":{"prompt_tokens":100,"completion_tokens":50}}') -> None:
    reader = AnswerReader("application/json")
    reader.feed(usage.encode())
    reader.finish()
    admission.responding(None)
    admission.ended(True, reader, Cause.ANSWERED)


def endpoint(admission: Admission) -> str | None:
    return None if admission.placement is None else admission.placement.endpoint


def used(director: Director) -> dict[str, int]:
    return dict(director.status().state.used)


async def test_a_session_stays_on_its_worker(director: Director) -> None:
    first = turn(director, "s", 100)
    assert endpoint(first) == A
    complete(first)
    other = turn(director, "other", 10)
    assert endpoint(other) == B
    complete(other)
    assert endpoint(turn(director, "s", 160)) == A


async def test_the_context_after_a_turn_is_what_usage_says(director: Director) -> None:
    complete(turn(director, "s", 100))
    assert used(director) == {"a/0": 150}


async def test_bytes_per_token_are_learned_from_usage(director: Director) -> None:
    complete(turn(director, "s", 100), '{"usage":{"prompt_tokens":50,"completion_tokens":0}}')
    # 400 bytes were 50 tokens: 8.0, a fifth of the way from 4.0
    assert director.gauges().bytes_per_token == {"": 4.8}


async def test_a_request_without_session_goes_by_load_and_is_not_tracked(director: Director) -> None:
    assert endpoint(turn(director, None, 5000)) == A
    assert endpoint(turn(director, None, 5000)) == B
    assert director.gauges().tracked == 0


async def test_a_second_turn_waits_for_the_first(director: Director) -> None:
    first, second = turn(director, "s", 100), turn(director, "s", 200)
    assert second.placement is None
    complete(first)
    assert (await second.released()).endpoint == A
    complete(second)


async def test_a_hold_that_is_cancelled_leaves_the_program_as_it_was(director: Director) -> None:
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    waiting = asyncio.ensure_future(held.released())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    held.ended(False, None, Cause.RESET)
    complete(first)
    assert used(director) == {"a/0": 150}
    assert (director.gauges().holds, director.gauges().held_bytes, director.gauges().tracked) == (0, 0, 0)


async def test_a_release_between_a_client_leaving_and_the_server_saying_so_is_rolled_back(director: Director) -> None:
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    waiting = asyncio.ensure_future(held.released())
    await asyncio.sleep(0)
    waiting.cancel()
    complete(first)
    held.ended(False, None, Cause.RESET)
    await asyncio.gather(waiting, return_exceptions=True)
    assert used(director) == {"a/0": 150}
    assert director.gauges().tracked == 0


async def test_a_turn_that_does_not_fit_is_held_until_a_tick_finds_room(director: Director, metrics: Metrics) -> None:
    big = turn(director, "big", 900)
    wide = turn(director, "wide", 900)
    held = turn(director, "held", 500)
    assert held.placement is None
    director.tick()
    assert held.placement is None
    wide.ended(False, None, Cause.CLOSED)
    director.tick()
    assert (await held.released()).endpoint == B
    assert metrics.registry.get_sample_value("thunderagent_resumes_total", {"forced": "false"}) == 1
    assert metrics.registry.get_sample_value("thunderagent_hold_duration_seconds_count", {"class": "new"}) == 1
    for admission in (big, held):
        complete(admission)


async def test_what_was_really_served_has_the_place(director: Director) -> None:
    admission = turn(director, "s", 100)
    admission.responding(B)
    assert used(director) == {"b/0": 100}


async def test_progress_is_charged_at_once(director: Director) -> None:
    admission = turn(director, "s", 100)
    admission.progress(20)
    assert used(director) == {"a/0": 120}


async def test_an_answer_other_than_2xx_rolls_back(director: Director) -> None:
    admission = turn(director, "s", 100)
    admission.responding(None)
    admission.ended(False, None, Cause.UPSTREAM_STATUS)
    assert used(director) == {}
    assert director.status().state.programs == {}


async def test_a_completed_answer_that_was_not_seen_counts_as_it_was_last_known(director: Director) -> None:
    admission = turn(director, "s", 100)
    admission.progress(20)
    admission.ended(True, None, Cause.ANSWERED)
    assert used(director) == {"a/0": 120}


async def test_a_subset_overrules_the_place_and_the_load(director: Director) -> None:
    complete(turn(director, "s", 100))
    assert endpoint(turn(director, "s", 100, subset=Subset.of([B]))) == B
    assert used(director) == {"b/0": 100}


@pytest.mark.parametrize("entries", [[], ["10.9.9.9"]])
async def test_nothing_in_the_subset_is_refused_with_nothing_changed(director: Director, entries: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        turn(director, "s", 100, subset=Subset.of(entries))
    assert refused.value.code is Refusal.NO_ENDPOINTS
    assert director.status().state.programs == {}


async def test_a_held_request_whose_workers_vanish_is_refused_and_rolled_back(director: Director) -> None:
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    director.apply(snapshot(2))
    complete(first)
    with pytest.raises(Refused) as refused:
        await held.released()
    held.ended(False, None, Cause.REFUSED)
    assert refused.value.code is Refusal.NO_ENDPOINTS
    assert director.gauges().tracked == 0


async def test_no_snapshot_and_draining_are_refused(director: Director, metrics: Metrics) -> None:
    with pytest.raises(Refused) as refused:
        turn(Director(Metrics()), "s", 1)
    assert refused.value.code is Refusal.NO_SNAPSHOT
    director.drain()
    assert director.readiness is Readiness.DRAINING
    with pytest.raises(Refused) as refused:
        turn(director, "s", 1)
    assert refused.value.code is Refusal.DRAINING


async def test_a_drain_refuses_holds_and_rolls_them_back(director: Director) -> None:
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    director.drain()
    with pytest.raises(Refused) as refused:
        await held.released()
    held.ended(False, None, Cause.REFUSED)
    assert refused.value.code is Refusal.DRAINING
    complete(first)
    assert used(director) == {"a/0": 150}


async def test_limits_of_the_policy_are_refused_with_their_code(director: Director) -> None:
    director.apply(snapshot(2, a=1000, parameters={"max_tracked_requests": 1}))
    turn(director, "s", 1)
    with pytest.raises(Refused) as refused:
        turn(director, "t", 1)
    assert refused.value.code is Refusal.REQUEST_LIMIT


async def test_bodies_over_the_limit_are_not_held(director: Director) -> None:
    first = turn(director, "s", 100, body_bytes=5000)
    held = turn(director, "s", 100, body_bytes=600)
    with pytest.raises(Refused) as refused:
        turn(director, "s", 100, body_bytes=500)
    assert refused.value.code is Refusal.HOLD_LIMIT
    assert director.gauges().held_bytes == 600
    assert director.gauges().tracked == 2
    complete(first)
    assert director.gauges().held_bytes == 0
    complete(held)


async def test_a_hold_longer_than_the_policy_allows_is_refused(director: Director) -> None:
    parameters = {"max_hold_seconds": 0.001, "scheduler_interval_seconds": 7}
    director.apply(snapshot(2, a=1000, parameters=parameters))
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    with pytest.raises(Refused) as refused:
        await held.released()
    held.ended(False, None, Cause.REFUSED)
    assert (refused.value.code, refused.value.retry_after_seconds) == (Refusal.HOLD_TIMEOUT, 7)
    complete(first)
    assert used(director) == {"a/0": 150}


async def test_a_limit_set_while_requests_are_held_holds_for_them_too(director: Director, clock: Clock) -> None:
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    clock.now = 30.0
    director.apply(snapshot(2, a=1000, b=1000, parameters={"max_hold_seconds": 29.0}))
    with pytest.raises(Refused) as refused:
        await held.released()
    held.ended(False, None, Cause.REFUSED)
    assert refused.value.code is Refusal.HOLD_TIMEOUT
    complete(first)


async def test_disabling_admission_releases_every_hold(director: Director) -> None:
    first = turn(director, "s", 100)
    held = turn(director, "s", 200)
    director.apply(snapshot(2, a=1000, b=1000, parameters={"policy": "Disabled"}))
    assert (await held.released()).endpoint == B
    for admission in (first, held):
        complete(admission)
    assert endpoint(turn(director, "s", 100)) == A
    assert director.gauges().tracked == 0


async def test_enabling_admission_again_knows_nothing_of_what_still_runs(director: Director) -> None:
    running = turn(director, "s", 100)
    director.apply(snapshot(2, a=1000, b=1000, parameters={"policy": "Disabled"}))
    director.apply(snapshot(3, a=1000, b=1000))
    complete(running)
    assert used(director) == {}


async def test_an_edited_policy_charges_every_program_anew(director: Director) -> None:
    complete(turn(director, "s", 100))
    director.apply(snapshot(2, a=1000, b=1000, parameters={"buffer_per_program": 7, "acting_token_weight": 0.5}))
    assert used(director) == {"a/0": 82}


async def test_a_worker_of_another_address_is_where_requests_go(director: Director) -> None:
    complete(turn(director, "s", 100))
    moved = Worker(WorkerRank("a"), endpoint="10.0.0.3:8000", capacity_tokens=1000, incarnation="2")
    director.apply(Snapshot(2, CapacitySnapshot((moved,)), AdmissionPolicy()))
    assert endpoint(turn(director, "s", 100)) == "10.0.0.3:8000"


async def test_the_loop_ticks_at_the_interval_of_the_policy(director: Director) -> None:
    parameters = {"scheduler_interval_seconds": 0.001}
    big = turn(director, "big", 900)
    wide = turn(director, "wide", 900)
    held = turn(director, "held", 500)
    ticking = asyncio.ensure_future(director.run())
    wide.ended(False, None, Cause.CLOSED)
    director.apply(snapshot(2, a=1000, b=1000, parameters=parameters))
    assert (await held.released()).endpoint == B
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    assert endpoint(big) == A
