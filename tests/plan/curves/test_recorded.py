"""Curves of recordings that hold a share of the rows, beside those of recordings that hold all."""

from pathlib import Path

import numpy as np
import pytest

from bench.data import criteo_batches
from bench.planning.recorded import recorded_accesses, recorded_errors
from bench.workload import ids_of
from tierstore.plan.curves import by_table, curve


@pytest.mark.parametrize("seed", range(3))
def test_each_lookup_is_as_near_as_once_a_batch(seed: int) -> None:
    """Half of the lookups are of popular rows that are not in the sample."""
    ids = ids_of(np.random.default_rng(seed), 50_000, 400_000, 1.05)
    (error,) = recorded_errors(list(ids.reshape(-1, 2000)), [0.05])
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
    (error,) = recorded_errors(criteo_batches(criteo_path, 2048), [0.01])
    assert error.sampled_rows == 2042
    assert error.lookups < 2.5
    assert error.uncounted > 3 * error.lookups
