"""The block cache: what is shared, what is kept, what is lost first."""

from hypothesis import given
from hypothesis import strategies as st

from thunderagent_sim.kv_cache import BlockTable, KVCache


def filled(cache: KVCache[str], keys: str) -> BlockTable[str]:
    """A table whose blocks are all full, one per letter."""
    table = cache.allocate(keys, len(keys))
    assert table is not None
    cache.commit(table, keys, len(keys))
    return table


def test_a_released_context_is_found_again():
    cache: KVCache[str] = KVCache(8)
    cache.release(filled(cache, "abc"))
    assert (cache.used, cache.free, cache.cached) == (0, 8, 3)
    table = cache.allocate("abcd", 4)
    assert table is not None
    assert table.reused == 3
    assert (cache.used, cache.free) == (4, 4)


def test_two_tables_share_their_common_prefix():
    cache: KVCache[str] = KVCache(8)
    filled(cache, "abc")
    table = cache.allocate("abxy", 4)
    assert table is not None
    assert table.reused == 2
    assert cache.used == 5


def test_a_shared_block_stays_until_its_last_holder_releases_it():
    cache: KVCache[str] = KVCache(3)
    first, second = filled(cache, "abc"), filled(cache, "abc")
    cache.release(first)
    assert cache.free == 0
    cache.release(second)
    assert cache.free == 3


def test_a_block_is_not_found_before_it_is_committed():
    cache: KVCache[str] = KVCache(8)
    table = cache.allocate("abc", 3)
    assert table is not None
    assert cache.cached_prefix("abc") == 0
    cache.commit(table, "abc", 2)
    assert cache.cached_prefix("abc") == 2


def test_content_computed_twice_is_kept_once():
    cache: KVCache[str] = KVCache(4)
    first, second = cache.allocate("ab", 2), cache.allocate("ab", 2)
    assert first is not None
    assert second is not None
    cache.commit(first, "ab", 2)
    cache.commit(second, "ab", 2)
    assert cache.used == 4
    cache.release(second)
    cache.release(first)
    assert (cache.free, cache.cached) == (4, 2)


def test_the_end_of_a_context_is_evicted_before_its_start():
    cache: KVCache[str] = KVCache(4)
    cache.release(filled(cache, "abcd"))
    filled(cache, "xy")
    assert cache.cached_prefix("abcd") == 2


def test_the_least_recently_released_context_is_evicted_first():
    cache: KVCache[str] = KVCache(4)
    cache.release(filled(cache, "ab"))
    cache.release(filled(cache, "cd"))
    filled(cache, "xy")
    assert cache.cached_prefix("ab") == 0
    assert cache.cached_prefix("cd") == 2


def test_reuse_makes_a_context_recent():
    cache: KVCache[str] = KVCache(4)
    cache.release(filled(cache, "ab"))
    cache.release(filled(cache, "cd"))
    cache.release(filled(cache, "ab"))
    filled(cache, "xy")
    assert cache.cached_prefix("ab") == 2
    assert cache.cached_prefix("cd") == 0


def test_empty_blocks_are_taken_before_anything_is_evicted():
    cache: KVCache[str] = KVCache(4)
    cache.release(filled(cache, "ab"))
    filled(cache, "xy")
    assert cache.cached_prefix("ab") == 2


def test_an_allocation_that_does_not_fit_changes_nothing():
    cache: KVCache[str] = KVCache(4)
    cache.release(filled(cache, "ab"))
    filled(cache, "xy")
    # Two of the three blocks are cached, but they are also the only free ones.
    assert cache.allocate("abc", 3) is None
    assert (cache.used, cache.free) == (2, 2)
    assert cache.cached_prefix("ab") == 2


def test_a_table_grows_only_into_free_blocks():
    cache: KVCache[str] = KVCache(4)
    table = filled(cache, "ab")
    assert cache.grow(table, 4)
    assert not cache.grow(table, 5)
    assert len(table.blocks) == 4
    assert cache.grow(table, 3), "a table that has enough already needs nothing"


@given(
    total=st.integers(1, 12),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["open", "grow", "release"]), st.text("ab", min_size=1, max_size=6), st.integers(0, 7)
        ),
        max_size=40,
    ),
)
def test_every_block_is_either_free_or_in_a_table(total, steps):
    cache: KVCache[str] = KVCache(total)
    tables: list[BlockTable[str]] = []
    for step, text, number in steps:
        keys = [text[: end + 1] for end in range(len(text))]
        if step == "open":
            table = cache.allocate(keys, len(keys) + number)
            if table is not None:
                cache.commit(table, keys, min(number, len(keys)))
                tables.append(table)
        elif tables and step == "grow":
            cache.grow(tables[number % len(tables)], number)
        elif tables:
            cache.release(tables.pop(number % len(tables)))
        named = {key for table in tables for key in table.blocks if key is not None}
        private = sum(key is None for table in tables for key in table.blocks)
        assert cache.used == len(named) + private
        assert 0 <= cache.free <= total
    for table in tables:
        cache.release(table)
    assert cache.free == total
