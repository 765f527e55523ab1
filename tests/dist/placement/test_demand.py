"""What a step asks of tables, against sets of rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dist.placement.support import table, trace_of
from tierstore.dist.placement import demand_of
from tierstore.dist.placement.costs import shares_of
from tierstore.trace import TableTrace, Trace


@given(ranks=st.integers(1, 4), rows=st.sampled_from([3, 64, 1000]), seed=st.integers(0, 99))
def test_a_trace_is_counted_by_rank(ranks: int, rows: int, seed: int) -> None:
    samples, batches, a = 8 * ranks, 3, table("a", rows)
    trace = trace_of([a], samples=samples, batches=batches, seed=seed)
    own = trace.tables["a"].ids.reshape(batches, ranks, -1)
    found = demand_of(trace, [a], ranks)
    ids, distinct, all_rows, hot_ids, hot_rows = found.tables["a"]
    assert found.samples == 8
    assert ids == own.shape[-1]
    of_ranks = [set(ids.tolist()) for batch in own for ids in batch]
    assert distinct == pytest.approx(sum(map(len, of_ranks)) / len(of_ranks))
    assert all_rows == pytest.approx(sum(len(set(batch.ravel().tolist())) for batch in own) / batches)
    in_ranges = np.bincount([row * 64 // rows for rank in of_ranks for row in rank], minlength=64)
    assert shares_of(hot_rows, 64) == pytest.approx(in_ranges / in_ranges.sum())
    assert shares_of(hot_ids, 2)[0] == pytest.approx((own * 64 // rows < 32).mean())
    assert shares_of(hot_ids, 7).sum() == pytest.approx(1)


def test_a_sample_of_the_rows_stands_for_all() -> None:
    keys = np.array([1, 2, 2, 5])
    sampled = Trace(
        tables={"a": TableTrace(keys, np.array([0, 4]))}, batch_samples=4, batch_starts=np.array([0, 4]),
        sampling_rate=0.5, all_lookups=(20,), all_batches=2,
    )  # fmt: skip
    assert demand_of(sampled, [table("a", 100)], 2).tables["a"][:3] == (5, 2, 3)
    few = demand_of(replace(sampled, sampling_rate=0.01), [table("a", 100)], 2).tables["a"]
    assert few.rows == few.ids, "no more rows than ids"


def test_tables_are_those_of_the_trace() -> None:
    a, b = table("a", 100), table("b", 100)
    assert list(demand_of(trace_of([a]), [a, b], 2).tables) == list(demand_of(trace_of([a, b]), [a], 2).tables) == ["a"]
    with pytest.raises(ValueError, match="table 'a' has 5 rows"):
        demand_of(trace_of([a]), [table("a", 5)], 2)
