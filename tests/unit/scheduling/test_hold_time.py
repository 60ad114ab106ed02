"""The hold time follows a growing queue slowly and a shrinking one at once."""

from __future__ import annotations

import pytest

from thunderagent_epp.scheduling.hold_time import HoldTime


def test_a_new_queue_is_held_for_little_and_one_that_lasts_for_all_of_it() -> None:
    hold = HoldTime()
    hold.observe(30, 0)
    assert hold.seconds == 0
    hold.observe(30, 60)
    assert hold.seconds == pytest.approx(30 * 0.632, abs=0.01)
    hold.observe(30, 600)
    assert hold.seconds == pytest.approx(30, abs=0.01)


def test_a_queue_that_shrinks_is_held_for_less_at_once() -> None:
    hold = HoldTime()
    hold.observe(30, 0)
    hold.observe(30, 600)
    hold.observe(5, 600)
    assert hold.seconds == 5


def test_a_queue_of_a_moment_leaves_no_trace() -> None:
    hold = HoldTime()
    hold.observe(30, 10)
    hold.observe(0, 10)
    hold.observe(30, 20)
    assert hold.seconds == 0
