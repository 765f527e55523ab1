"""The order of rows: a permutation of those looked up, frequent ones first, companions together."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.offline.packing import Accesses, order_by_co_access, table_accesses
from tierstore.trace import TableTrace, Trace

Int64s = NDArray[np.int64]


def bags(generator: np.random.Generator, samples: int, most: int, rows: int) -> Accesses:
    lengths = generator.integers(0, most + 1, samples)
    keys = (generator.random(lengths.sum()) ** 2 * rows).astype(np.int64) * 7 + (1 << 40)
    return Accesses(keys, np.concatenate([[0], np.cumsum(lengths)]))


def blocks_read(order: Int64s, samples: Int64s, rows_per_block: int) -> int:
    place = {key: position // rows_per_block for position, key in enumerate(order.tolist())}
    return sum(len({place[key] for key in sample}) for sample in samples.tolist())


def by_frequency(accesses: Accesses) -> Int64s:
    """Most frequent first, ties by first access: Counter keeps the order, and most_common is stable."""
    return np.array([key for key, _ in Counter(accesses.keys.tolist()).most_common()])


@pytest.mark.kernel
@pytest.mark.parametrize("rows_per_block", [1, 3, 15, 1000])
def test_by_co_access_each_row_has_one_place(rows_per_block: int) -> None:
    accesses = bags(np.random.default_rng(1), 200, 50, 300)
    order = order_by_co_access(accesses, rows_per_block)
    assert sorted(order.tolist()) == sorted(set(accesses.keys.tolist()))


@pytest.mark.kernel
def test_rows_looked_up_alone_lie_by_frequency() -> None:
    keys = bags(np.random.default_rng(2), 200, 5, 40).keys
    alone = Accesses(keys, np.arange(len(keys) + 1))
    assert np.array_equal(order_by_co_access(alone, 4), by_frequency(alone))


def test_companions_share_blocks() -> None:
    """Rows of groups that come up together: later samples read fewer blocks than by frequency."""
    generator = np.random.default_rng(3)
    row_of = generator.permutation(100 * 15)
    samples = row_of[generator.integers(0, 100, (4000, 1)) * 15 + generator.integers(0, 15, (4000, 8))]
    before, after = samples[:3000], samples[3000:]
    accesses = Accesses(before.ravel(), np.arange(0, before.size + 1, 8))
    read = [blocks_read(order, after, 15) for order in (by_frequency(accesses), order_by_co_access(accesses, 15))]
    assert read[1] < read[0] / 2
    assert read[1] >= len(after)


def test_the_lookups_of_some_tables_sample_by_sample() -> None:
    tables = {"a": [[1, 2], [], [3]], "b": [[7], [8, 9], []], "c": [[5], [5], [5]]}
    trace = Trace(
        tables={
            name: TableTrace(np.concatenate(rows).astype(np.int64), np.cumsum([0, *map(len, rows)]))
            for name, rows in tables.items()
        },
        batch_samples=2,
    )
    found = table_accesses(trace, {"a": 0, "b": 4, "nosuch": 9})
    assert found.starts.tolist() == [0, 3, 5, 6]
    far = 4 << 40
    assert found.keys.tolist() == [1, 2, far + 7, far + 8, far + 9, 3]
    assert not len(order_by_co_access(table_accesses(trace, {}), 15))
