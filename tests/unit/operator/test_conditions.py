from __future__ import annotations

from typing import Any

import pytest

from thunderagent_epp.feed.wire import Applied
from thunderagent_epp.scheduling.capacity import Role, Worker, WorkerRank
from thunderagent_operator.conditions import Findings, changed, is_bad, policy_status, timestamp
from thunderagent_operator.discovery import Overlap
from thunderagent_operator.feed import Picker
from thunderagent_operator.status import Condition, PublishedSnapshot

NOON = 1_767_268_800.0
SNAPSHOT = PublishedSnapshot(id=42, contentHash="abc", publishedAt="2026-01-01T12:00:00Z")


def worker(name: str, tokens: int | None = 1000, *, live: bool = True, role: Role = Role.BOTH) -> Worker:
    return Worker(WorkerRank(name), "10.0.0.1:8000", tokens, live=live, role=role)


def picker(identity: str, *, current: bool = True, refusal: str | None = None) -> Picker:
    return Picker(identity, "0.1.0", "ipv4:10.0.0.9:1", Applied(42, "abc"), current, refusal, None)


def conditions(**found: Any) -> dict[str, Condition]:
    status = policy_status(Findings(generation=3, **found), (), NOON)
    return {condition.type: condition for condition in status.conditions}


A, B, DEAD, NEW = worker("a"), worker("b"), worker("dead", live=False), worker("new", None)

CASES: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "a good policy": ({}, "Accepted", "True", "Accepted", "The policy is in force."),
    "a bad one": (
        {"problem": ("InvalidSpec", "spec.topology: must be …")},
        "Accepted",
        "False",
        "InvalidSpec",
        "spec.topology: must be …",
    ),
    "pods that another selects too": (
        {"overlaps": (Overlap("llm/other", 2, "a"),)},
        "Accepted",
        "True",
        "OverlappingWorkers",
        "Other policies select some of the same pods: llm/other (2, such as a).",
    ),
    "a bad policy that overlaps": (
        {"problem": ("InvalidSpec", "bad"), "overlaps": (Overlap("llm/other", 2, "a"),)},
        "Accepted",
        "False",
        "InvalidSpec",
        "bad",
    ),
    "an annotation nobody can read": (
        {"notes": ["pod a: annotation x: 'y' is no port"]},
        "Accepted",
        "True",
        "Accepted",
        "The policy is in force. pod a: annotation x: 'y' is no port",
    ),
    "no pod": ({}, "WorkersReady", "False", "NoWorkers", "No running pod is selected."),
    "no spec that selects any": (
        {"problem": ("InvalidSpec", "bad")},
        "WorkersReady",
        "Unknown",
        "NotAccepted",
        "No spec is in force that could select pods.",
    ),
    "no pod, and a bad edit": (
        {"problem": ("InvalidSpec", "bad"), "snapshot": SNAPSHOT},
        "WorkersReady",
        "False",
        "NoWorkers",
        "No running pod is selected.",
    ),
    "prefill alone": (
        {"workers": [worker("p", role=Role.PREFILL), worker("d", live=False, role=Role.DECODE)]},
        "WorkersReady",
        "False",
        "NoDecodeWorkers",
        "None of 1 live worker ranks decodes; every request is refused with no_endpoints.",
    ),
    "prefill and decode": (
        {"workers": [worker("p", role=Role.PREFILL), worker("d", role=Role.DECODE)]},
        "WorkersReady",
        "True",
        "WorkersLive",
        "2 of 2 worker ranks are live.",
    ),
    "no live one": (
        {"workers": [DEAD]},
        "WorkersReady",
        "False",
        "NoLiveWorkers",
        "None of 1 worker ranks is live.",
    ),
    "one of two is live": (
        {"workers": [A, DEAD]},
        "WorkersReady",
        "True",
        "WorkersLive",
        "1 of 2 worker ranks are live.",
    ),
    "nobody to know the capacity of": (
        {"workers": [DEAD]},
        "CapacityKnown",
        "Unknown",
        "NoLiveWorkers",
        "There is no live worker to know the capacity of.",
    ),
    "every capacity is known": (
        {"workers": [A, B, DEAD]},
        "CapacityKnown",
        "True",
        "CapacityKnown",
        "The capacity of all 2 live worker ranks is known.",
    ),
    "one has not told": (
        {"workers": [A, NEW]},
        "CapacityKnown",
        "False",
        "CapacityUnknown",
        "The capacity of 1 of 2 live worker ranks is unknown: new/0.",
    ),
    "one cannot tell": (
        {"workers": [A, NEW], "trouble": {NEW: "connection refused"}},
        "CapacityKnown",
        "False",
        "CapacityUnknown",
        "The capacity of 1 of 2 live worker ranks is unknown: new/0 (connection refused).",
    ),
    "one can tell no longer": (
        {"workers": [A, B], "trouble": {B: "HTTP 500"}},
        "CapacityKnown",
        "True",
        "ProbesFailing",
        "Probes fail, the capacity last told stays in force: b/0 (HTTP 500).",
    ),
    "many have not told": (
        {"workers": [worker(name, None) for name in "edcba"]},
        "CapacityKnown",
        "False",
        "CapacityUnknown",
        "The capacity of 5 of 5 live worker ranks is unknown: a/0, b/0, c/0 and 2 more.",
    ),
    "nothing published": ({}, "Programmed", "False", "NoSnapshot", "No snapshot has been published yet."),
    "nobody follows": (
        {"snapshot": SNAPSHOT},
        "Programmed",
        "Unknown",
        "NoPickers",
        "No endpoint picker follows this policy.",
    ),
    "everybody has it": (
        {"snapshot": SNAPSHOT, "pickers": [picker("epp-0"), picker("epp-1")]},
        "Programmed",
        "True",
        "Programmed",
        "All 2 connected pickers have the snapshot in force.",
    ),
    "one lags": (
        {"snapshot": SNAPSHOT, "pickers": [picker("epp-0"), picker("epp-1", current=False)]},
        "Programmed",
        "False",
        "PickersBehind",
        "The snapshot is not yet applied by epp-1.",
    ),
    "one refuses": (
        {"snapshot": SNAPSHOT, "pickers": [picker("epp-0", current=False, refusal="not newer"), picker("epp-1")]},
        "Programmed",
        "False",
        "SnapshotRefused",
        "The snapshot is refused by epp-0: not newer.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_finding_is_one_sentence(case: str) -> None:
    found, kind, status, reason, message = CASES[case]
    condition = conditions(**found)[kind]
    assert (condition.status, condition.reason, condition.message) == (status, reason, message)


def test_every_condition_is_there_from_the_first_time_on() -> None:
    found = conditions()
    assert list(found) == ["Accepted", "WorkersReady", "CapacityKnown", "Programmed"]
    assert {condition.observed_generation for condition in found.values()} == {3}
    assert {condition.last_transition_time for condition in found.values()} == {"2026-01-01T12:00:00Z"}


def test_the_counts_are_of_ranks_and_the_capacity_of_live_ones() -> None:
    found = Findings(
        generation=3,
        workers=[A, B, DEAD, NEW],
        snapshot=SNAPSHOT,
        pickers=[picker("epp-0"), picker("epp-1", current=False)],
    )
    status = policy_status(found, (), NOON).to_json()
    del status["conditions"]
    assert status == {
        "observedGeneration": 3,
        "workers": {"total": 4, "live": 3, "capacityKnown": 2, "summary": "3/4"},
        "capacityTokens": 2000,
        "snapshot": {"id": 42, "contentHash": "abc", "publishedAt": "2026-01-01T12:00:00Z"},
        "pickers": {"connected": 2, "current": 1},
    }


def test_a_transition_time_is_kept_while_the_status_is_the_same() -> None:
    first = policy_status(Findings(generation=1, workers=[A]), (), NOON).conditions
    later = policy_status(Findings(generation=2, workers=[A, DEAD]), first, NOON + 60).conditions
    ready = {condition.type: condition for condition in later}["WorkersReady"]
    assert ready.message == "1 of 2 worker ranks are live."
    assert ready.last_transition_time == "2026-01-01T12:00:00Z"
    lost = policy_status(Findings(generation=2, workers=[DEAD]), later, NOON + 120).conditions
    assert {one.type: one.last_transition_time for one in lost} == {
        "Accepted": "2026-01-01T12:00:00Z",
        "WorkersReady": "2026-01-01T12:02:00Z",
        "CapacityKnown": "2026-01-01T12:02:00Z",
        "Programmed": "2026-01-01T12:00:00Z",
    }
    assert [condition.type for condition in changed(later, lost)] == ["WorkersReady", "CapacityKnown"]


def test_conditions_nobody_had_before_have_all_changed() -> None:
    after = policy_status(Findings(generation=1), (), NOON).conditions
    assert changed((), after) == after


def test_a_condition_is_bad_when_it_is_false() -> None:
    found = conditions(workers=[DEAD])
    assert [kind for kind, condition in found.items() if is_bad(condition)] == ["WorkersReady", "Programmed"]


def test_a_message_is_never_longer_than_a_status_should_be() -> None:
    found = conditions(problem=("InvalidSpec", "x" * 5000))
    assert found["Accepted"].message == "x" * 1000


def test_a_timestamp_is_as_the_api_writes_it() -> None:
    assert timestamp(NOON + 0.9) == "2026-01-01T12:00:00Z"
