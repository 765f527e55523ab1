"""The demand of a trace, and its accesses, against counting by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.packed import random_trace
from tierstore.plan import Accesses, TableShape, accesses_of, of_tables, once_a_batch
from tierstore.plan.curves import curve
from tierstore.plan.demand import Demand
from tierstore.plan.traces import generate
from tierstore.plan.workload import Workload
from tierstore.trace import Trace
from tierstore.trace.recorded import Recorded
from tierstore.trace.sampling import is_sampled

BATCH, SAMPLES = 50, 1010
WORKLOAD = Workload(
    name="w",
    tables=(
        TableShape(name="a", num_embeddings=400, embedding_dim=16, pooling_factor=2.0, exponent=1.1),
        TableShape(name="b", num_embeddings=300, embedding_dim=32, pooling_factor=1.0, exponent=0.7),
        TableShape(name="c", num_embeddings=200, embedding_dim=16, pooling_factor=3.0, exponent=0.0),
    ),
    batch_samples=BATCH,
    optimizer="rowwise_adagrad",
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(WORKLOAD, samples=SAMPLES, seed=5)


def test_tables_of_a_layout_are_one_pool_whose_batches_are_counted(trace: Trace) -> None:
    """A curve is of each row once a batch."""
    found, sizes = Demand.from_accesses(WORKLOAD, accesses_of(trace), "lru"), [1, 10, 60, 150, 250]
    assert [pool.tables for pool in found.pools] == [("a", "c"), ("b",)]
    for pool, rows, lookups in zip(found.pools, (600, 300), (5.0, 1.0), strict=True):
        own = replace(trace, tables={name: trace.tables[name] for name in pool.tables})
        batches = [list(dict.fromkeys(each)) for each in batches_of(own, [*range(0, SAMPLES, BATCH), SAMPLES])]
        assert pool.num_rows == rows
        assert pool.layout == WORKLOAD.layout(WORKLOAD.tables[0 if rows == 600 else 1])
        assert pool.lookups == lookups * BATCH, "the last batch, of ten samples, is no measure"
        assert pool.unique == np.mean([len(batch) for batch in batches[:-1]])
        keys = np.concatenate(batches)
        known = curve(Accesses(keys, np.arange(len(keys) + 1), ("all",)), "lru")
        assert [pool.curve.hit_rate(size) for size in sizes] == [known.hit_rate(size) for size in sizes]


@pytest.mark.parametrize("rate", [0.2, 0.005])
def test_batches_of_which_a_recording_has_no_row_count(rate: float) -> None:
    """At the lowest rate it has a row of a tenth of its batches."""
    table = TableShape(name="a", num_embeddings=100_000, embedding_dim=16, exponent=0.0)
    workload = Workload(name="w", tables=(table,), batch_samples=20)
    recorded, generator = Recorded(["a"], rate=rate, max_bytes=1 << 24), np.random.default_rng(1)
    for _ in range(20_000):
        keys = generator.integers(0, table.num_embeddings, 20)
        recorded.add(keys[is_sampled(keys, rate)], None, 20, recorded.last, np.array([20]))
    accesses = accesses_of(recorded.trace())
    assert accesses.all_batches == 20_000
    (pool,) = Demand.from_accesses(workload, accesses).pools
    assert pool.lookups == pytest.approx(20, rel=0.005)
    assert pool.unique == pytest.approx(20, rel=0.05)
    assert pool.unique <= pool.lookups


def test_other_rows_of_the_same_tables(trace: Trace) -> None:
    found = Demand.from_accesses(WORKLOAD, accesses_of(trace), "lru")
    served = replace(WORKLOAD, optimizer="none", dtype="int8")
    other = found.laid_out(served)
    assert [pool.layout for pool in other.pools] == [served.layout(served.tables[0]), served.layout(served.tables[1])]
    assert [pool.curve for pool in other.pools] == [pool.curve for pool in found.pools]
    with pytest.raises(ValueError, match=r"batches of 50 samples, the workload has 51"):
        found.laid_out(replace(WORKLOAD, batch_samples=51))
    with pytest.raises(ValueError, match="other tables"):
        found.laid_out(replace(WORKLOAD, tables=WORKLOAD.tables[:2]))


def test_what_a_trace_may_not_be(trace: Trace) -> None:
    accesses = accesses_of(trace)
    small = replace(WORKLOAD, tables=(replace(WORKLOAD.tables[0], num_embeddings=300), *WORKLOAD.tables[1:]))
    for workload, wrong, reason in (
        (WORKLOAD, accesses._replace(keys=accesses.keys[:0], starts=np.zeros(2, np.int64)), "no access"),
        (
            WORKLOAD,
            accesses._replace(tables=("a", "b", "z")),
            "table 'z', the workload has not; its tables are a, b, c",
        ),
        (small, accesses, r"has row 3\d\d of table 'a', which has 300 rows"),
    ):
        with pytest.raises(ValueError, match=reason):
            Demand.from_accesses(workload, wrong)


# Accesses, against loops over lists


def small_trace(seed: int, samples: int = 10) -> Trace:
    """In batches of four samples."""
    return replace(random_trace({"a": 5, "b": 5}, seed, samples), batch_samples=4, sampling_rate=0.5)


def batches_of(trace: Trace, bounds: list[int]) -> list[list[int]]:
    """Between these samples."""
    return [
        [
            index << 40 | int(row)
            for sample in range(first, stop)
            for index, table in enumerate(trace.tables.values())
            for row in table.ids[table.offsets[sample] : table.offsets[sample + 1]]
        ]
        for first, stop in pairwise(bounds)
    ]


def listed(keys: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    return [keys[begin:end].tolist() for begin, end in pairwise(starts)]


def test_accesses_go_sample_by_sample_in_batches() -> None:
    """Of one size, or as a recording has them, of which an entry is a sample or a batch."""
    for samples, starts, bounds in (
        (0, None, [0]),
        (1, None, [0, 1]),
        (4, None, [0, 4]),
        (10, None, [0, 4, 8, 10]),
        (10, np.array([0, 3, 3, 8, 10]), [0, 3, 3, 8, 10]),
        (10, np.arange(11) * 7, list(range(11))),
    ):
        trace = replace(small_trace(samples, samples), batch_starts=starts)
        found = accesses_of(trace)
        assert listed(found.keys, found.starts) == batches_of(trace, bounds)
        assert (found.tables, found.sampling_rate) == (("a", "b"), 0.5)


def test_batches_that_a_recording_does_not_list() -> None:
    """As it counted them, else by its samples."""
    trace = replace(small_trace(5), batch_starts=np.arange(11) * 7)
    for size, guessed in ((7, 0), (5, 4)):
        assert accesses_of(replace(trace, batch_samples=size)).unlisted == guessed
        assert accesses_of(replace(trace, batch_samples=size, all_batches=13)).unlisted == 3
    assert accesses_of(replace(small_trace(5), all_batches=13)).all_batches == 13


def test_lookups_of_all_rows_go_with_their_tables() -> None:
    accesses = accesses_of(replace(small_trace(6), all_lookups=(300, 200)))
    assert accesses.all_lookups == (300, 200)
    assert of_tables(accesses, [0]).all_lookups == (300, 0)
    assert of_tables(accesses, [1]).all_lookups == (0, 200)
    assert once_a_batch(accesses).all_lookups is None
    assert of_tables(once_a_batch(accesses), 1).all_lookups is None
