from __future__ import annotations

from typing import Any

import pytest

from support.feeds import capacity
from thunderagent_epp.feed.wire import Applied
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.topology import Disaggregation
from thunderagent_operator.snapshot_book import Absent, Published, Reason, SnapshotBook


class Book(SnapshotBook):
    """A book that began at 1000 seconds, with one policy in it unless said otherwise."""

    def __init__(self) -> None:
        super().__init__(now=1000.0)

    def put(self, *workers: str, policy: str = "llm/coder", now: float = 1000.0, **changes: Any) -> Published:
        content = {
            "capacity": capacity(*workers),
            "admission": AdmissionPolicy(),
            "requests": RequestPolicy(),
        } | changes
        return self.publish(policy, now, **content)

    def id(self, policy: str = "llm/coder") -> int:
        standing = self.standing(policy)
        assert isinstance(standing, Published)
        assert standing.message.snapshot.id == standing.snapshot.id
        return standing.snapshot.id


def test_ids_begin_at_the_milliseconds_of_the_wall_clock() -> None:
    book = Book()
    assert book.put("a").snapshot.id == 1_000_000
    assert book.put("a", policy="llm/other").snapshot.id == 1_000_000


def test_an_id_grows_by_one_for_each_change_of_content() -> None:
    book = Book()
    assert [book.put(*workers).snapshot.id for workers in (["a"], ["a", "b"], ["a"])] == [1000000, 1000001, 1000002]


def test_the_same_content_keeps_its_id_and_its_time() -> None:
    book = Book()
    first = book.put("a", "b", now=1000.0)
    assert book.put("b", "a", now=2000.0) is first
    assert first.published_at == 1000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"admission": AdmissionPolicy(policy="Disabled")},
        {"requests": RequestPolicy(session_headers=())},
        {"disaggregation": Disaggregation()},
        {"capacity": capacity("a", tokens=1001)},
    ],
)
def test_every_part_of_a_content_counts(changes: dict[str, Any]) -> None:
    book = Book()
    before = book.put("a")
    after = book.put("a", now=1001.0, **changes)
    assert after.snapshot.id == 1_000_001
    assert after.published_at == 1001.0
    assert after.content_hash != before.content_hash


def test_the_hash_of_a_content_is_the_same_in_every_operator() -> None:
    later = SnapshotBook(now=5000.0)
    again = later.publish("llm/coder", 5000.0, capacity("a"), AdmissionPolicy(), RequestPolicy())
    assert again.content_hash == Book().put("a").content_hash


def test_a_policy_nobody_has_heard_of_is_not_found() -> None:
    assert Book().standing("llm/coder") == Absent(Reason.NOT_FOUND)


def test_a_policy_that_is_gone_is_deleted_and_comes_back_with_greater_ids() -> None:
    book = Book()
    book.put("a")
    book.put("b")
    book.delete("llm/coder")
    assert book.standing("llm/coder") == Absent(Reason.DELETED)
    assert book.put("a").snapshot.id == 1_000_002


def test_a_policy_that_never_was_cannot_be_deleted() -> None:
    book = Book()
    book.delete("llm/coder")
    assert book.standing("llm/coder") == Absent(Reason.NOT_FOUND)


def test_a_policy_never_accepted_says_why_until_it_is() -> None:
    book = Book()
    book.withhold("llm/coder", "spec.workers: is required")
    assert book.standing("llm/coder") == Absent(Reason.NOT_ACCEPTED, "spec.workers: is required")
    book.put("a")
    assert book.id() == 1_000_000
    book.delete("llm/coder")
    book.withhold("llm/coder", "spec.workers: is required")
    assert book.standing("llm/coder") == Absent(Reason.NOT_ACCEPTED, "spec.workers: is required")
    book.delete("llm/coder")
    assert book.standing("llm/coder") == Absent(Reason.DELETED)
    assert book.put("b").snapshot.id == 1_000_001


def test_a_bad_edit_leaves_the_last_good_snapshot_in_force() -> None:
    book = Book()
    published = book.put("a")
    book.withhold("llm/coder", "spec.workers: is required")
    assert book.standing("llm/coder") is published


def test_a_content_a_picker_knows_by_its_id_is_not_lifted() -> None:
    book = Book()
    published = book.put("a")
    assert not book.lift("llm/coder", published.applied, now=1001.0)
    assert not book.lift("llm/coder", Applied(999_999, "older"), now=1001.0)
    assert book.id() == 1_000_000


@pytest.mark.parametrize(("claimed", "lifted"), [(1_000_000, 1_000_001), (5_000_000, 5_000_001)])
def test_an_id_is_lifted_above_what_a_picker_has_from_elsewhere(claimed: int, lifted: int) -> None:
    book = Book()
    before = book.put("a")
    assert book.lift("llm/coder", Applied(claimed, "from another operator"), now=1001.0)
    assert book.id() == lifted
    after = book.standing("llm/coder")
    assert isinstance(after, Published)
    assert (after.content_hash, after.published_at) == (before.content_hash, 1001.0)
    assert before.message.snapshot.id == 1_000_000
    assert book.put("b").snapshot.id == lifted + 1


def test_a_claim_that_would_use_up_the_ids_lifts_nothing() -> None:
    book = Book()
    book.put("a")
    assert not book.lift("llm/coder", Applied(2**63 - 1, "x"), now=1001.0)
    assert book.id() == 1_000_000


def test_nothing_is_lifted_where_nothing_stands() -> None:
    assert not Book().lift("llm/coder", Applied(1, "x"), now=1001.0)


def test_a_new_content_is_above_what_its_pickers_have() -> None:
    assert Book().put("a", above=7_000_000).snapshot.id == 7_000_001


def test_starting_over_lifts_every_id_to_that_moment() -> None:
    book = Book()
    book.put("a")
    book.put("a", policy="llm/other", above=9_000_000)
    book.start_over(now=2000.0)
    assert (book.id(), book.id("llm/other")) == (2_000_000, 9_000_001)
    assert book.put("a", policy="llm/third").snapshot.id == 2_000_000


def test_starting_over_with_a_clock_set_back_lowers_nothing() -> None:
    book = Book()
    book.put("a")
    book.start_over(now=500.0)
    assert book.id() == 1_000_000
    assert book.put("a", policy="llm/other").snapshot.id == 1_000_000
