"""Blocks that a cache has written, counted against a loop over sets and dicts."""

import numpy as np
import pytest

from tierstore.plan.accesses import Accesses, once_a_batch
from tierstore.plan.rewrites import Rewrites, rewrites_of
from tierstore.rows import KEY_ROW_BITS

pytestmark = pytest.mark.kernel

ROWS_PER_BLOCK = 15


def batches_of(*batches: list[int], rate: float = 1.0) -> Accesses:
    """Keys, as they are."""
    keys = np.array([key for batch in batches for key in batch], np.int64)
    starts = np.append(0, np.cumsum([len(batch) for batch in batches]))
    return once_a_batch(Accesses(keys, starts, ("a", "b"), rate))


def of_second_table(row: int) -> int:
    return row | 1 << KEY_ROW_BITS


def slow_share(accesses: Accesses, capacity: int) -> float | None:
    cached: dict[int, bool] = {}
    written = left = 0
    for batch in range(accesses.num_batches):
        if batch == accesses.num_batches // 2:
            if len(cached) < capacity:
                return None
            written = left = 0
        keys = accesses.keys[accesses.starts[batch] : accesses.starts[batch + 1]].tolist()
        used: set[int] = set()
        for key in keys:
            used.add(key)
            if key not in cached and len(cached) == capacity:
                oldest = next(iter(cached))
                block = oldest >> KEY_ROW_BITS, oldest % (1 << KEY_ROW_BITS) // ROWS_PER_BLOCK
                left += 1
                if cached.pop(oldest) or oldest in used:
                    written += 1
                    for other in cached:
                        if (other >> KEY_ROW_BITS, other % (1 << KEY_ROW_BITS) // ROWS_PER_BLOCK) == block:
                            cached[other] = False
            cached[key] = cached.pop(key, False)
        for key in keys:
            if key in cached:
                cached[key] = True
    return written / left if left else None


def drawn_batches(seed: int, *, num_batches: int = 40, batch: int = 60) -> Accesses:
    generator = np.random.default_rng(seed)
    rows = generator.zipf(1.3, (num_batches, batch)) % 700
    tables = generator.integers(0, 2, (num_batches, batch))
    return batches_of(*(rows | tables << KEY_ROW_BITS).tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 2, 8, 32, 64, 128, 256])
def test_as_many_as_a_loop_counts(seed: int, capacity: int) -> None:
    accesses = drawn_batches(seed)
    expected = slow_share(accesses, capacity)
    assert expected is not None
    assert Rewrites(accesses).share(capacity, ROWS_PER_BLOCK) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("capacity", [1, 8, 30, 64, 200])
def test_every_row_that_leaves_has_its_block_written_where_none_has_neighbours(capacity: int) -> None:
    """Also where the cache does not hold a batch: its rows leave before they change, and are brought back to."""
    assert Rewrites(drawn_batches(0)).share(capacity, 1) == 1


def test_rows_that_come_and_go_together_are_written_once() -> None:
    near = [[*range(first, first + ROWS_PER_BLOCK)] for first in range(0, 40 * ROWS_PER_BLOCK, ROWS_PER_BLOCK)]
    apart = [[row * ROWS_PER_BLOCK for row in batch] for batch in near]
    tables = [[key for row in batch[:7] for key in (row, of_second_table(row))] for batch in near]
    for batches, blocks_a_batch in ((near, 1), (apart, ROWS_PER_BLOCK), (tables, 2)):
        share = Rewrites(batches_of(*batches)).share(64, ROWS_PER_BLOCK)
        assert share == pytest.approx(blocks_a_batch / len(batches[0]), rel=0.02)


def test_between_sizes_on_a_line_and_beyond_them_as_at_the_largest() -> None:
    accesses = drawn_batches(5)
    found = Rewrites(accesses)
    small, large = found.share(64, ROWS_PER_BLOCK), found.share(91, ROWS_PER_BLOCK)
    assert small is not None
    assert large is not None
    assert small > found.share(75, ROWS_PER_BLOCK) > large  # type: ignore[operator]
    sizes = [round(2 ** (step / 2)) for step in range(22)]
    largest = [share for share in (slow_share(accesses, size) for size in sizes) if share is not None][-1]
    assert found.share(1e9, ROWS_PER_BLOCK) == pytest.approx(largest)
    assert found.share(0, ROWS_PER_BLOCK) == slow_share(accesses, 1)


def test_rows_that_fit_leave_nothing_to_count() -> None:
    assert Rewrites(batches_of([1], [1], [1])).share(4, ROWS_PER_BLOCK) is None


def test_a_cache_that_fills_late_is_taken_for_a_smaller_one() -> None:
    """Of 40 batches of rows of their own the last leave a cache of 512, which the first half does not fill."""
    found = Rewrites(batches_of(*([*range(first, first + 15)] for first in range(0, 600 * 15, 15 * 15))))
    assert found.share(512, ROWS_PER_BLOCK) == found.share(256, ROWS_PER_BLOCK) is not None


def test_a_sample_does_not_tell() -> None:
    assert rewrites_of(batches_of([1, 2], rate=0.5)) is None
    assert rewrites_of(batches_of([])) is None
    assert rewrites_of(batches_of([1])) is not None
