"""The cache of pooled rows against plain dictionaries, its budget against what Python really takes."""

import tracemalloc
from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tierstore.cache.pooled import ENTRY_OVERHEAD_BYTES, PooledCache

COLUMNS = 3


def jagged(bags: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([value for bag in bags for value in bag], np.int64)
    return values, np.cumsum([0, *map(len, bags)]).astype(np.int64)


def rows_for(positions: np.ndarray, seed: int) -> np.ndarray:
    """Any bits: NaNs, infinities and denormals too."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (len(positions), COLUMNS), np.uint32)
    return bits.view(np.float32)


BAGS = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6)


@given(
    batches=st.lists(st.tuples(BAGS, st.integers(0, 1), st.booleans(), st.integers(0, 15)), max_size=12),
    num_entries=st.integers(1, 5),
    min_ids=st.integers(1, 3),
)
def test_finds_what_an_ordered_dict_finds(
    batches: list[tuple[list[list[int]], int, bool, int]], num_entries: int, min_ids: int
) -> None:
    budget_bytes = num_entries * (ENTRY_OVERHEAD_BYTES + 4 * COLUMNS + 40)
    cache = PooledCache(budget_bytes, COLUMNS, min_ids=min_ids)
    kept: OrderedDict[tuple, tuple[int, bytes]] = OrderedDict()
    num_hits = num_misses = 0
    for seed, (bags, table, is_weighted, clears) in enumerate(batches):
        if not clears:
            cache.clear()
            kept.clear()
        values, offsets = jagged(bags)
        weights = (values % 2).astype(np.float32) if is_weighted else None
        names = [(table, is_weighted, tuple(bag)) for bag in bags]
        expected = [name in kept for name in names]
        split = cache.split(values, offsets, table=table, weights=weights)
        assert split.hits.tolist() == [at for at, hit in enumerate(expected) if hit]
        assert split.misses.tolist() == [at for at, hit in enumerate(expected) if not hit]
        for at, row in zip(split.hits, split.rows, strict=True):
            assert row.tobytes() == kept[names[at]][1]
            kept.move_to_end(names[at])
        num_hits += len(split.hits)
        num_misses += sum(len(bags[at]) >= min_ids for at in split.misses)
        rows = rows_for(split.misses, seed)
        cache.add(split.keys, rows)
        for at, row in zip(split.misses, rows, strict=True):
            if len(bags[at]) < min_ids:
                continue
            size = 8 + len(bags[at]) * (12 if is_weighted else 8) + 4 * COLUMNS + ENTRY_OVERHEAD_BYTES
            if size > budget_bytes:
                continue
            kept.pop(names[at], None)
            while sum(each for each, _ in kept.values()) + size > budget_bytes:
                kept.popitem(last=False)
            kept[names[at]] = size, row.tobytes()
        assert len(cache) == len(kept)
        assert cache.size_bytes == sum(size for size, _ in kept.values()) <= budget_bytes
    assert (cache.hits, cache.misses) == (num_hits, num_misses)


def test_pooled_rows_come_back_to_the_bit_and_are_copies() -> None:
    cache = PooledCache(100_000, COLUMNS, min_ids=1)
    values, offsets = jagged([[1, 2], [2, 1], [1, 2, 3]])
    missed = cache.split(values, offsets)
    rows = rows_for(missed.misses, 1)
    kept = rows.tobytes()
    cache.add(missed.keys, rows)
    rows[:] = 0
    found = cache.split(values, offsets)
    assert found.rows.tobytes() == kept
    assert not found.rows.flags.writeable


def test_weights_are_not_taken_for_ids() -> None:
    cache = PooledCache(100_000, COLUMNS, min_ids=1)
    two = np.array([5, 6], np.int64)
    weights = np.array([7, 0], np.float32)
    as_ids = np.concatenate([two, weights.view(np.int64)])
    missed = cache.split(two, np.array([0, 2]), weights=weights)
    cache.add(missed.keys, rows_for(missed.misses, 1))
    assert not len(cache.split(as_ids, np.array([0, 3])).hits)
    assert not len(cache.split(two, np.array([0, 2])).hits)
    assert not len(cache.split(two, np.array([0, 2]), weights=weights + 1).hits)
    assert len(cache.split(two, np.array([0, 2]), weights=weights).hits) == 1


def test_the_bag_used_least_recently_leaves_first() -> None:
    cache = PooledCache(2 * (8 + 16 + 4 * COLUMNS + ENTRY_OVERHEAD_BYTES), COLUMNS, min_ids=1)

    def use(*bag: int) -> bool:
        split = cache.split(np.array(bag), np.array([0, len(bag)]))
        cache.add(split.keys, rows_for(split.misses, bag[0]))
        return bool(len(split.hits))

    found = [use(1, 2), use(3, 4), use(1, 2), use(5, 6), use(1, 2), use(3, 4)]
    assert found == [False, False, True, False, True, False]


def test_tables_are_told_apart() -> None:
    cache = PooledCache(100_000, COLUMNS, min_ids=1)
    values, offsets = jagged([[1, 2]])
    missed = cache.split(values, offsets, table=1)
    cache.add(missed.keys, rows_for(missed.misses, 1))
    assert [len(cache.split(values, offsets, table=table).hits) for table in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(("num_ids", "columns"), [(2, 8), (20, 16), (100, 128)])
def test_python_takes_no_more_than_the_budget(num_ids: int, columns: int) -> None:
    budget_bytes = 8_000_000
    num_bags = 200
    generator = np.random.default_rng(0)
    offsets = np.arange(num_bags + 1) * num_ids
    rows = np.ones((num_bags, columns), np.float32)
    tracemalloc.start()
    try:
        cache = PooledCache(budget_bytes, columns, min_ids=1)
        most_bytes = num_added = 0
        while num_added * (8 * num_ids + 4 * columns + ENTRY_OVERHEAD_BYTES) < 1.3 * budget_bytes:
            split = cache.split(generator.integers(0, 1 << 40, num_ids * num_bags), offsets)
            cache.add(split.keys, rows)
            num_added += num_bags
            del split
            most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(cache) < num_added, "it is full"
    assert 0.7 * budget_bytes < most_bytes < 1.05 * budget_bytes + 100_000


def test_what_does_not_fit_at_all_is_not_kept() -> None:
    cache = PooledCache(ENTRY_OVERHEAD_BYTES, COLUMNS, min_ids=1)
    values, offsets = jagged([[1, 2]])
    split = cache.split(values, offsets)
    cache.add(split.keys, rows_for(split.misses, 0))
    assert len(cache) == cache.size_bytes == 0
