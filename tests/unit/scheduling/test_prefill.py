"""Where prefills run: where the program's last one ran, else where the fewest prompt tokens are in prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.prefill import PrefillPool
from thunderagent_epp.scheduling.topology import decode_pool, prefill_pool

A, B, C, D = (WorkerRank(name) for name in "abcd")


def pool(*workers: WorkerRank, incarnation: str = "") -> CapacitySnapshot:
    return CapacitySnapshot(tuple(Worker(worker, incarnation=incarnation) for worker in workers))


@pytest.fixture
def prefill() -> PrefillPool:
    prefill = PrefillPool()
    prefill.snapshot(pool(A, B))
    return prefill


def test_a_prefill_goes_where_the_fewest_prompt_tokens_are_in_prefill(prefill: PrefillPool) -> None:
    prefill.started("r1", None, A, 100)
    prefill.started("r2", None, B, 99)
    assert prefill.pick(None, D) == B
    prefill.started("r3", None, B, 1)
    assert prefill.pick(None, D) == A


def test_a_prefill_that_is_over_counts_no_more(prefill: PrefillPool) -> None:
    prefill.started("r1", "s", A, 100)
    assert prefill.prompt_tokens(A) == 100
    prefill.over("r1")
    prefill.over("r1")
    assert prefill.prompt_tokens(A) == 0
    assert prefill.pick(None, D) == A


def test_a_session_returns_to_its_last_prefill_worker_whatever_the_load(prefill: PrefillPool) -> None:
    prefill.started("r1", "s", A, 100)
    assert prefill.pick("s", D) == A
    assert prefill.pick("other", D) == B


@pytest.mark.parametrize(
    "after",
    [pool(B), CapacitySnapshot((Worker(A, live=False), Worker(B))), pool(A, B, incarnation="restarted")],
    ids=["gone", "not live", "restarted"],
)
def test_a_session_whose_prefill_worker_is_no_more_goes_by_load(prefill: PrefillPool, after: CapacitySnapshot) -> None:
    prefill.started("r1", "s", A, 100)
    prefill.snapshot(after)
    assert prefill.pick("s", D) == B


def test_a_session_that_had_its_last_turn_is_forgotten(prefill: PrefillPool) -> None:
    prefill.started("r1", "s", A, 100)
    prefill.forget("s")
    prefill.forget("s")
    assert prefill.pick("s", D) == B


def test_no_more_sessions_are_remembered_than_the_bound() -> None:
    prefill = PrefillPool(sessions_max=2)
    prefill.snapshot(pool(A, B))
    for number, session in enumerate(["s1", "s2", "s1", "s3"]):
        prefill.started(f"r{number}", session, B, 100)
    assert [prefill.pick(session, D) for session in ("s1", "s2", "s3")] == [B, A, B]


def test_the_ledgers_wish_comes_before_the_last_worker(prefill: PrefillPool) -> None:
    prefill.started("r1", "s", A, 100)
    assert prefill.pick("s", D, target=B) == B


def test_only_workers_of_the_subset_are_picked(prefill: PrefillPool) -> None:
    prefill.started("r1", "s", A, 100)
    assert prefill.pick("s", D, subset={B, D}) == B
    assert prefill.pick(None, D, subset={D}) is None


def test_an_empty_pool_picks_nothing() -> None:
    prefill = PrefillPool()
    assert prefill.pick("s", D) is None
    prefill.snapshot(CapacitySnapshot((Worker(A, live=False),)))
    assert prefill.pick("s", D) is None


def test_a_decode_worker_that_prefills_too_does_its_own_unless_another_has_less_to_do() -> None:
    prefill = PrefillPool()
    prefill.snapshot(pool(A, D))
    assert prefill.pick(None, D) == D
    prefill.started("r1", None, D, 10)
    assert prefill.pick(None, D) == A


def test_a_worker_of_both_roles_is_in_both_pools() -> None:
    roles = {A: Role.PREFILL, B: Role.BOTH, C: Role.DECODE}
    capacity = CapacitySnapshot(tuple(Worker(worker, role=role) for worker, role in roles.items()))
    assert [worker.id for worker in prefill_pool(capacity).workers] == [A, B]
    assert [worker.id for worker in decode_pool(capacity).workers] == [B, C]
    unknown = replace(capacity, liveness_known=False)
    assert not prefill_pool(unknown).liveness_known
