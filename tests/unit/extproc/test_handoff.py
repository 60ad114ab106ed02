"""The headers that name a prefill worker to its decode worker."""

from __future__ import annotations

import pytest

from thunderagent_epp.extproc.handoff import handoff_headers, instance_id, siphash13
from thunderagent_epp.scheduling.capacity import Worker, WorkerRank
from thunderagent_epp.scheduling.topology import Handoff

DECODE = Worker(WorkerRank("vllm-decode-0", 1), "10.0.0.1:8001")
PREFILL = Worker(WorkerRank("a", 3), "[fd00::1]:8003")


def test_an_llm_d_sidecar_is_told_the_prefill_workers_address() -> None:
    assert handoff_headers(Handoff.LLM_D, DECODE, PREFILL) == {"x-prefiller-host-port": "[fd00::1]:8003"}


def test_an_llm_d_sidecar_without_a_prefill_worker_is_told_nothing() -> None:
    assert handoff_headers(Handoff.LLM_D, DECODE, None) == {}


def test_dynamo_is_told_instances_and_ranks() -> None:
    assert handoff_headers(Handoff.DYNAMO, DECODE, PREFILL) == {
        "x-dynamo-worker-instance-id": "6080257717914508",
        "x-dynamo-dp-rank": "1",
        "x-dynamo-prefill-instance-id": "7688582637611507",
        "x-dynamo-prefill-dp-rank": "3",
        "x-dynamo-routing-mode": "disaggregated",
    }


def test_dynamo_without_a_prefill_worker_is_told_to_do_both() -> None:
    assert handoff_headers(Handoff.DYNAMO, DECODE, None) == {
        "x-dynamo-worker-instance-id": "6080257717914508",
        "x-dynamo-dp-rank": "1",
        "x-dynamo-routing-mode": "aggregated",
    }


@pytest.mark.parametrize(("name", "number"), [("vllm-decode-0", 6080257717914508), ("a", 7688582637611507)])
def test_an_instance_id_is_dynamos_hash_of_the_pods_name(name: str, number: int) -> None:
    assert instance_id(name) == number


@pytest.mark.parametrize(
    ("length", "number"),
    [
        (1, 0x68A914128E01E473),
        (7, 0x2F098AB0C751325A),
        (8, 0xEAD411E67EBE2EEA),
        (9, 0x75927F9D95124362),
        (15, 0xF30EB725BB91C9EA),
        (16, 0x8972188433A5C5B7),
    ],
)
def test_the_hash_is_siphash_1_3_with_zero_keys(length: int, number: int) -> None:
    """The numbers are CPython's own ``hash(bytes(range(length)))`` with ``PYTHONHASHSEED=0``."""
    assert siphash13(bytes(range(length))) == number
