from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_sim.fleet.cache import PrefixCache


def counts(cache: PrefixCache) -> tuple[int, int, int]:
    return cache.pinned, cache.cached, cache.empty


def keep(cache: PrefixCache, session: str, tokens: int, shared: int = 0) -> None:
    """A turn of ``tokens`` runs and ends."""
    lease = cache.lease(session, shared, tokens)
    assert lease is not None
    cache.release(lease, tokens, tokens)


def test_a_running_turn_pins_whole_blocks():
    cache = PrefixCache(20, 10)
    cache.lease("a", 0, 95)
    assert counts(cache) == (10, 0, 10)


def test_a_finished_turn_leaves_its_full_blocks_and_gives_the_last_one_back():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 95)
    assert counts(cache) == (0, 9, 11)


def test_the_next_turn_of_a_session_finds_the_context_of_the_last():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 95)
    assert cache.hit_tokens("a", shared_tokens=95, tokens=120) == 90
    lease = cache.lease("a", 95, 120)
    assert lease is not None
    assert lease.depth == 9
    assert counts(cache) == (12, 0, 8)


def test_another_session_finds_nothing():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 95)
    assert cache.hit_tokens("b", 95, 120) == 0


def test_only_what_is_shared_is_found():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 95)
    assert cache.hit_tokens("a", shared_tokens=47, tokens=120) == 40


def test_at_least_one_token_of_a_prompt_is_computed():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 90)
    assert cache.hit_tokens("a", shared_tokens=90, tokens=90) == 80


def test_the_context_let_go_first_is_evicted_first_and_from_its_end():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 90)
    keep(cache, "b", 90)
    cache.lease("c", 0, 50)
    assert cache.cached_tokens("a") == 60
    assert cache.cached_tokens("b") == 90
    assert counts(cache) == (5, 15, 0)


def test_a_context_used_again_is_evicted_after_one_that_was_not():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 90)
    keep(cache, "b", 90)
    keep(cache, "a", 95, shared=90)
    cache.lease("c", 0, 50)
    assert cache.cached_tokens("a") == 90
    assert cache.cached_tokens("b") == 60


def test_what_a_running_turn_found_is_not_evicted():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 90)
    keep(cache, "b", 90)
    cache.lease("a", 90, 100)
    cache.lease("c", 0, 100)
    assert cache.cached_tokens("a") == 90
    assert cache.cached_tokens("b") == 0
    assert counts(cache) == (20, 0, 0)


def test_a_turn_that_does_not_fit_beside_the_running_ones_gets_nothing():
    cache = PrefixCache(20, 10)
    cache.lease("a", 0, 150)
    assert cache.lease("b", 0, 60) is None
    assert counts(cache) == (15, 0, 5)


def test_what_a_turn_finds_counts_as_part_of_what_it_needs():
    cache = PrefixCache(20, 10)
    keep(cache, "a", 100)
    cache.lease("b", 0, 100)
    assert cache.lease("a", 100, 110) is None
    assert cache.lease("a", 100, 100) is not None


def test_a_turn_can_find_what_one_that_still_runs_has_computed():
    cache = PrefixCache(30, 10)
    first = cache.lease("a", 0, 100)
    assert first is not None
    assert cache.hit_tokens("a", 100, 120) == 0
    cache.publish(first, 100)
    assert cache.hit_tokens("a", 100, 120) == 100
    second = cache.lease("a", 100, 120)
    assert second is not None
    assert counts(cache) == (12, 0, 18)
    cache.release(first, 100, 100)
    assert counts(cache) == (12, 0, 18)


def test_the_end_of_an_overlapping_turn_takes_room_but_is_never_found():
    cache = PrefixCache(30, 10)
    main = cache.lease("a", 0, 100)
    assert main is not None
    cache.publish(main, 100)
    side = cache.lease("a", 100, 140)
    assert side is not None
    cache.release(side, 140, 140, seen_again=False)
    assert cache.extend(1)
    cache.release(main, 110, 110)
    assert cache.hit_tokens("a", 150, 200) == 110
    assert counts(cache) == (0, 15, 15)


def test_the_end_of_an_overlapping_turn_is_evicted_in_its_turn():
    cache = PrefixCache(30, 10)
    side = cache.lease("a", 0, 140)
    assert side is not None
    cache.release(side, 140, 140, seen_again=False)
    keep(cache, "b", 150)
    cache.lease("c", 0, 100)
    assert counts(cache) == (10, 20, 0)
    assert cache.cached_tokens("b") == 150


def test_a_context_that_goes_another_way_keeps_only_what_is_before_it():
    cache = PrefixCache(30, 10)
    keep(cache, "a", 200)
    cache.cut("a", 85)
    assert cache.cached_tokens("a") == 80
    assert counts(cache) == (0, 20, 10)


def test_decoding_takes_blocks_until_there_are_no_more():
    cache = PrefixCache(20, 10)
    keep(cache, "b", 50)
    cache.lease("a", 0, 150)
    assert cache.extend(3)
    assert counts(cache) == (18, 2, 0)
    assert not cache.extend(3)
    assert counts(cache) == (18, 2, 0)


def test_a_cache_of_no_blocks_is_refused():
    with pytest.raises(ValueError, match="a cache needs blocks"):
        PrefixCache(0, 16)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "publish", "grow", "end", "cut"]),
            st.integers(0, 3),
            st.integers(1, 120),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_blocks_are_pinned_cached_or_empty_and_nothing_else(operations):
    cache = PrefixCache(25, 10)
    running: list[list] = []
    contexts = [0] * 4
    for operation, which, tokens, seen_again in operations:
        session = f"s{which}"
        if operation == "begin" and not any(one[0] == session for one in running):
            size = contexts[which] + tokens
            lease = cache.lease(session, contexts[which], size)
            if lease is not None:
                running.append([session, lease, size])
        elif operation == "cut" and not any(one[0] == session for one in running):
            contexts[which] = min(contexts[which], tokens)
            cache.cut(session, tokens)
        elif running and operation == "publish":
            one = running[which % len(running)]
            cache.publish(one[1], one[2])
        elif running and operation == "grow":
            one = running[which % len(running)]
            if cache.extend(-(-(one[2] + tokens) // 10) - -(-one[2] // 10)):
                one[2] += tokens
        elif running and operation == "end":
            session, lease, size = running.pop(which % len(running))
            cache.release(lease, size, size, seen_again=seen_again)
            if seen_again:
                contexts[int(session[1:])] = size
        assert cache.pinned == sum(-(-size // 10) for _, _, size in running)
        assert cache.cached >= 0
        assert cache.empty >= 0
    for _, lease, size in running:
        cache.release(lease, size, size)
    assert cache.pinned == 0
    assert cache.cached + cache.empty == 25
