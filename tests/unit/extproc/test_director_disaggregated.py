"""The director over prefill and decode workers: the hold comes before both legs, and each has its own account."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderagent_epp.extproc.actions import Cause
from thunderagent_epp.extproc.admission import Admission
from thunderagent_epp.extproc.director import Director
from thunderagent_epp.extproc.errors import Refusal, Refused
from thunderagent_epp.extproc.subset import Subset
from thunderagent_epp.extproc.turn import Placement
from thunderagent_epp.requests.answer import AnswerReader
from thunderagent_epp.requests.inference import InferenceRequest
from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool
from thunderagent_epp.snapshot import Snapshot
from thunderagent_epp.telemetry.metrics import Metrics

ENDPOINTS = {"p": "10.0.1.1:8000", "q": "10.0.1.2:8000", "d": "10.0.2.1:8000", "e": "10.0.2.2:8000"}
ROLES = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
DECODE_D, DECODE_E = ENDPOINTS["d"], ENDPOINTS["e"]
PREFILLER = "x-prefiller-host-port"


def snapshot(
    *,
    number: int = 1,
    retention: RetentionPool = RetentionPool.DECODE,
    handoff: Handoff = Handoff.LLM_D,
    aggregated: bool = False,
    parameters: dict[str, Any] | None = None,
    roles: dict[str, Role] | None = None,
    **capacities: int | None,
) -> Snapshot:
    workers = tuple(
        Worker(WorkerRank(name), ENDPOINTS[name], capacity, role=(roles or ROLES)[name])
        for name, capacity in capacities.items()
    )
    policy = AdmissionPolicy.from_parameters({"buffer_per_program": 0} | (parameters or {}))
    terms = None if aggregated else Disaggregation(retention, handoff)
    return Snapshot(number, CapacitySnapshot(workers), policy, disaggregation=terms)


def director_of(of: Snapshot) -> Director:
    director = Director(Metrics(), clock=lambda: 0.0)
    director.apply(of)
    return director


def turn(director: Director, session: str | None, tokens: int, **given: Any) -> Admission:
    request = InferenceRequest(
        "/v1/chat/completions", given.pop("inference", True), session=session, prompt_bytes=4 * tokens, **given
    )
    return director.admit(request, subset=None, body_bytes=10)


def complete(admission: Admission, prompt: int, completion: int) -> None:
    reader = AnswerReader("application/json")
    reader.feed(f'{{"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}}}'.encode())
    reader.finish()
    admission.responding(None)
    admission.ended(True, reader, Cause.ANSWERED)


def to(admission: Admission) -> tuple[str, str | None] | None:
    """Decode endpoint, and prefill endpoint if one is named."""
    placement = admission.placement
    return None if placement is None else (placement.endpoint, placement.set_headers.get(PREFILLER))


def used(director: Director) -> dict[str, int]:
    return dict(director.status().state.used)


async def test_a_turn_goes_to_a_decode_worker_that_is_told_of_a_prefill_worker() -> None:
    director = director_of(snapshot(p=1000, d=1000))
    assert to(turn(director, "s", 100)) == (DECODE_D, ENDPOINTS["p"])
    assert used(director) == {"d/0": 100}


async def test_a_program_returns_to_both_its_workers() -> None:
    director = director_of(snapshot(p=1000, q=1000, d=1000, e=1000))
    first = turn(director, "s", 100)
    assert to(first) == (DECODE_D, ENDPOINTS["p"])
    complete(first, 100, 50)
    busy = [turn(director, None, 400) for _ in range(2)]
    assert [to(each) for each in busy] == [(DECODE_D, ENDPOINTS["p"]), (DECODE_E, ENDPOINTS["q"])]
    assert to(turn(director, "s", 200)) == (DECODE_D, ENDPOINTS["p"])


async def test_prompts_in_prefill_are_spread_and_counted_until_the_answer_begins() -> None:
    director = director_of(snapshot(p=1000, q=1000, d=10_000))
    first, second = turn(director, None, 100), turn(director, None, 50)
    assert [to(first), to(second)] == [(DECODE_D, ENDPOINTS["p"]), (DECODE_D, ENDPOINTS["q"])]
    assert to(turn(director, None, 10)) == (DECODE_D, ENDPOINTS["q"])
    first.responding(DECODE_D)
    assert to(turn(director, None, 10)) == (DECODE_D, ENDPOINTS["p"])


async def test_a_request_that_ends_before_its_answer_leaves_no_prefill_load() -> None:
    director = director_of(snapshot(p=1000, q=1000, d=10_000))
    turn(director, None, 100).ended(False, None, Cause.RESET)
    assert to(turn(director, None, 10)) == (DECODE_D, ENDPOINTS["p"])


@pytest.mark.parametrize("retention", RetentionPool)
async def test_without_a_live_prefill_worker_the_decode_worker_does_both(retention: RetentionPool) -> None:
    director = director_of(snapshot(retention=retention, d=1000))
    assert to(turn(director, "s", 100)) == (DECODE_D, None)


async def test_a_prefill_worker_that_died_is_named_no_more() -> None:
    director = director_of(snapshot(p=1000, q=1000, d=1000))
    first = turn(director, "s", 100)
    assert to(first) == (DECODE_D, ENDPOINTS["p"])
    complete(first, 100, 1)
    director.apply(snapshot(number=2, q=1000, d=1000))
    assert to(turn(director, "s", 110)) == (DECODE_D, ENDPOINTS["q"])


async def test_only_decode_workers_take_requests() -> None:
    director = director_of(snapshot(p=1000))
    with pytest.raises(Refused) as refused:
        turn(director, "s", 100)
    assert refused.value.code is Refusal.NO_ENDPOINTS


async def test_what_is_no_inference_has_no_prefill() -> None:
    director = director_of(snapshot(p=1000, d=1000, handoff=Handoff.DYNAMO))
    assert turn(director, None, 0, inference=False).placement == Placement(DECODE_D)


async def test_the_subset_bounds_both_legs() -> None:
    director = director_of(snapshot(p=1000, q=1000, d=1000, e=1000))
    request = InferenceRequest("/v1/chat/completions", True, session="s", prompt_bytes=40)
    subset = Subset.of([DECODE_E, ENDPOINTS["q"]])
    assert to(director.admit(request, subset=subset, body_bytes=1)) == (DECODE_E, ENDPOINTS["q"])
    assert to(director.admit(InferenceRequest("/", True), subset=Subset.of([DECODE_E]), body_bytes=1)) == (
        DECODE_E,
        None,
    )


async def test_dynamo_is_told_both_workers_by_their_instances() -> None:
    placement = turn(director_of(snapshot(p=1000, d=1000, handoff=Handoff.DYNAMO)), "s", 100).placement
    assert placement is not None
    assert placement.set_headers["x-dynamo-routing-mode"] == "disaggregated"
    assert {"x-dynamo-worker-instance-id", "x-dynamo-prefill-instance-id"} <= placement.set_headers.keys()


@pytest.mark.parametrize("retention", RetentionPool)
async def test_a_held_turn_touches_neither_leg(retention: RetentionPool) -> None:
    director = director_of(snapshot(retention=retention, p=1000, d=1000))
    first = turn(director, "s", 700)
    held = turn(director, "t", 700)
    assert held.placement is None
    prefills = director._prefill._pool.prompt_tokens(WorkerRank("p"))
    assert prefills == 700
    complete(first, 700, 10)
    held.ended(False, None, Cause.RESET)
    assert director._prefill._pool.prompt_tokens(WorkerRank("p")) == 0
    assert director.gauges().tracked == 0


async def test_the_prefill_pools_capacity_holds_where_programs_are_retained_there() -> None:
    director = director_of(snapshot(retention=RetentionPool.PREFILL, p=1000, d=100_000))
    first = turn(director, "s", 600)
    complete(first, 600, 50)
    assert used(director) == {"p/0": 650}
    held = turn(director, "t", 600)
    assert held.placement is None
    final = turn(director, "s", 700, final=True)
    assert to(final) == (DECODE_D, ENDPOINTS["p"])
    complete(final, 700, 1)
    director.tick()
    assert to(held) == (DECODE_D, ENDPOINTS["p"])


async def test_running_turns_alone_fill_a_decode_worker_where_programs_are_retained_in_prefill() -> None:
    director = director_of(snapshot(retention=RetentionPool.PREFILL, p=100_000, d=1000))
    first = turn(director, "s", 600)
    held = turn(director, "t", 600)
    assert held.placement is None
    complete(first, 600, 50)
    director.tick()
    assert to(held) == (DECODE_D, ENDPOINTS["p"])
    assert used(director) == {"d/0": 600, "p/0": 1250}


@pytest.mark.parametrize("tight", ["p", "d"])
async def test_the_tighter_pool_holds_where_programs_are_retained_in_both(tight: str) -> None:
    director = director_of(snapshot(retention=RetentionPool.BOTH, **({"p": 100_000, "d": 100_000} | {tight: 1000})))
    complete(turn(director, "s", 600), 600, 50)
    assert used(director) == {"d/0": 650, "p/0": 650}
    assert turn(director, "t", 600).placement is None


async def test_other_ledgers_let_what_is_held_go_and_start_anew() -> None:
    director = director_of(snapshot(p=1000, d=1000))
    first = turn(director, "s", 700)
    held = turn(director, "t", 700)
    director.apply(snapshot(number=2, retention=RetentionPool.BOTH, p=1000, d=1000))
    assert to(held) == (DECODE_D, ENDPOINTS["p"])
    complete(first, 700, 10)
    complete(held, 700, 10)
    assert used(director) == {}
    complete(turn(director, "s", 710), 710, 10)
    assert used(director) == {"d/0": 720, "p/0": 720}


async def test_aggregated_workers_become_a_decode_pool_without_losing_programs() -> None:
    director = director_of(snapshot(aggregated=True, d=1000))
    complete(turn(director, "s", 100), 100, 10)
    director.apply(snapshot(number=2, d=1000, p=1000))
    assert used(director) == {"d/0": 110}
    assert to(turn(director, "s", 120)) == (DECODE_D, ENDPOINTS["p"])


async def test_with_admission_disabled_prefills_are_still_placed() -> None:
    director = director_of(snapshot(parameters={"policy": "Disabled"}, retention=RetentionPool.BOTH, p=10, d=10))
    assert to(turn(director, "s", 100)) == (DECODE_D, ENDPOINTS["p"])


async def test_roles_terms_and_prefills_are_shown() -> None:
    director = director_of(snapshot(p=1000, d=1000))
    metrics = director._metrics
    metrics.watch(director.gauges)
    turn(director, "s", 100)
    status = director.status()
    assert [(worker.worker, worker.role) for worker in status.workers] == [("d", "decode"), ("p", "prefill")]
    assert status.policy is not None
    assert (status.policy["topology"], status.policy["retention_pool"], status.policy["handoff"]) == (
        "Disaggregated",
        "Decode",
        "LlmD",
    )
    sample = metrics.registry.get_sample_value
    assert sample("thunderagent_worker_role", {"worker": "p", "rank": "0", "role": "prefill"}) == 1
    assert sample("thunderagent_prefills_total", {"worker": "p", "rank": "0"}) == 1
    assert sample("thunderagent_picks_total", {"worker": "d", "rank": "0"}) == 1
    director.apply(snapshot(number=2, d=1000))
    assert sample("thunderagent_prefills_total", {"worker": "p", "rank": "0"}) is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["turn", "complete", "abort", "tick"]), st.integers(0, 5), st.integers(1, 9)), max_size=50
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, capacity=st.integers(400, 2000))
async def test_without_prefill_workers_everything_is_as_aggregated(
    steps: list[tuple[str, int, int]], capacity: int
) -> None:
    """Invariant: a decode pool that retains, without a prefill pool, decides and charges as aggregated workers do."""
    pair = [director_of(snapshot(aggregated=aggregated, d=capacity, e=capacity)) for aggregated in (True, False)]
    running: list[tuple[Admission, Admission]] = []
    for kind, which, size in steps:
        if kind == "turn":
            session = f"s{which}" if which else None
            one, other = (turn(director, session, size * 50) for director in pair)
            running.append((one, other))
        elif kind == "tick":
            for director in pair:
                director.tick()
        elif running:
            both = running.pop(which % len(running))
            for each in both:
                if kind == "complete" and each.placement is not None:
                    complete(each, size * 50, size)
                else:
                    each.ended(False, None, Cause.RESET)
        assert [one.placement for one, _ in running] == [other.placement for _, other in running]
        assert pair[0].status().state == pair[1].status().state
