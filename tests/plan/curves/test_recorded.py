"""Curves of recordings that hold a share of the rows, beside those of recordings that hold all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bench.data import criteo_batches
from bench.workload import ids_of
from tierstore.layout import KEY_ROW_BITS
from tierstore.plan import Accesses, accesses_of, once_a_batch
from tierstore.plan.curves import by_table, curve
from tierstore.trace.recorded import Recorded
from tierstore.trace.sampling import is_sampled


class RecordedError(NamedTuple):
    """Mean error of LRU curves in points of the hit rate, over 20 sizes from 0.1 % of the rows to all, if that is ten
    sampled rows.

    Attributes:
        lookups: each lookup an access. uncounted: the same, if it is not known how many there were of all rows.
        once_a_batch: each row once a batch.
    """

    sampled_rows: int
    lookups: float
    uncounted: float
    once_a_batch: float


def recorded_accesses(batches: Sequence[Any], rate: float) -> Accesses:
    """What a recording holds of batches of keys, with the tables t0, t1, ... that these are of."""
    num_tables = 1 + max(int(keys.max() >> KEY_ROW_BITS) for keys in batches)
    recorded = Recorded([f"t{table}" for table in range(num_tables)], rate=rate, max_bytes=1 << 40)
    for keys in batches:
        found = keys if rate == 1 else keys[is_sampled(keys, rate)]
        counts = np.bincount(keys >> KEY_ROW_BITS, minlength=num_tables)
        recorded.add(found, np.zeros(len(found), np.int32), 1, recorded.last, counts)
    return accesses_of(recorded.contents().trace())


def recorded_error(batches: Sequence[Any], rate: float) -> RecordedError:
    whole, sampled = recorded_accesses(batches, 1.0), recorded_accesses(batches, rate)
    return RecordedError(
        sampled_rows=len(np.unique(sampled.keys)),
        lookups=points_off(sampled, whole),
        uncounted=points_off(sampled._replace(all_lookups=None), whole),
        once_a_batch=points_off(once_a_batch(sampled), once_a_batch(whole)),
    )


def points_off(sampled: Accesses, whole: Accesses) -> float:
    num_rows = len(np.unique(whole.keys))
    smallest = max(0.001 * num_rows, 10 / sampled.sampling_rate)
    sizes = np.unique(np.rint(np.geomspace(smallest, num_rows, 20)).astype(np.int64))
    exact, estimate = curve(whole, "lru", sizes=sizes), curve(sampled, "lru", sizes=sizes)
    return float(100 * np.abs(estimate.miss_ratios - exact.miss_ratios).mean())


@pytest.mark.parametrize("seed", range(3))
def test_each_lookup_is_as_near_as_once_a_batch(seed: int) -> None:
    """Half of the lookups are of popular rows that are not in the sample."""
    ids = ids_of(np.random.default_rng(seed), 50_000, 400_000, 1.05)
    error = recorded_error(list(ids.reshape(-1, 2000)), 0.05)
    assert error.lookups < 2
    assert error.lookups < error.once_a_batch
    assert error.uncounted > 10 * error.lookups


def test_first_uses_are_all_that_a_cache_of_all_rows_misses() -> None:
    """By table too: one has few rows, of which a popular one is in the sample."""
    generator = np.random.default_rng(3)
    keys = np.where(
        generator.random(100_000) < 0.3,
        1 << 40 | generator.integers(0, 100, 100_000),
        ids_of(generator, 40_000, 100_000, 1.0),
    )
    batches = list(keys.reshape(-1, 1000))
    whole, sampled = recorded_accesses(batches, 1.0), recorded_accesses(batches, 0.1)
    num_rows = len(np.unique(keys))
    for found in (curve(sampled, "lru"), curve(sampled, "tinylfu")):
        assert found.num_accesses == 100_000
        assert found.miss_ratio(2 * num_rows) == pytest.approx(num_rows / 100_000, rel=0.05)
    for name, exact in by_table(whole, "lru").items():
        assert by_table(sampled, "lru")[name].num_accesses == exact.num_accesses


def test_each_of_criteos_lookups(criteo_path: Path) -> None:
    error = recorded_error(criteo_batches(criteo_path, 2048), 0.01)
    assert error.sampled_rows == 2042
    assert error.lookups < 2.5
    assert error.uncounted > 3 * error.lookups
