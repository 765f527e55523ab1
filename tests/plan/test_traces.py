"""Traces: draws by Zipf's law against the exact chances of each rank; what is in one, counted in plain Python."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.packed import random_trace
from tierstore.plan import TableShape, Workload
from tierstore.plan.traces import describe, draw_zipf, generate, scattered
from tierstore.trace import TableTrace, Trace

TRACE = random_trace({"item": 300, "user": 40}, seed=5)
DRAWS, SAMPLES = 200_000, 5000
SHAPES = {"whole": (100, 3, 1.2), "half": (1 << 40, 2.5, 0.0), "rare": (7, 0.1, 1.05), "none": (7, 0.0, 1.05)}
"""Rows, ids a sample, and exponent."""
WORKLOAD = Workload(
    name="w",
    tables=tuple(
        TableShape(name=name, num_embeddings=rows, embedding_dim=4, pooling_factor=ids, exponent=exponent)
        for name, (rows, ids, exponent) in SHAPES.items()
    ),
    batch_samples=64,
)


@pytest.mark.parametrize("exponent", [0, 1, 1.05, 6.5])
def test_each_rank_has_its_chance(exponent: float) -> None:
    """Within five standard deviations of its count."""
    for rows in (2, 1000):
        weights = np.arange(1, rows + 1) ** -float(exponent)
        expected = DRAWS * weights / weights.sum()
        ids = draw_zipf(rows, exponent, DRAWS, seed=1)
        ranks = np.argsort(scattered(np.arange(rows), rows, 0))[ids]
        off = np.bincount(ranks, minlength=rows) - expected
        assert (np.abs(off) <= 5 * np.sqrt(expected) + 5).all()
        assert np.array_equal(ids, draw_zipf(rows, exponent, DRAWS, seed=1))


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 70])
def test_no_two_rows_meet_and_neighbours_do_not_stay_neighbours(seed: int) -> None:
    for rows in (*range(1, 40), 255, 256, 257):
        assert sorted(scattered(np.arange(rows), rows, seed).tolist()) == list(range(rows))
    found = scattered(np.arange(40_000), 3_000_000, 9)
    assert np.abs(np.bincount(found * 50 // 3_000_000, minlength=50) - 800).max() <= 5 * 800**0.5
    assert (np.abs(np.diff(found)) < 3000).mean() < 0.01


def test_pooling_factors_are_means_of_whole_numbers() -> None:
    for name, table in generate(WORKLOAD, samples=SAMPLES, seed=0).tables.items():
        mean, lengths = SHAPES[name][1], np.diff(table.offsets)
        low, share = int(mean), mean % 1
        assert set(lengths.tolist()) == ({low, low + 1} if share else {low})
        assert abs((lengths - low).mean() - share) <= 4 * (share * (1 - share) / SAMPLES) ** 0.5


def test_seeds_give_other_samples_of_the_same_popularity() -> None:
    one, same, other = (generate(WORKLOAD, samples=SAMPLES, seed=seed).tables for seed in (-1, -1, 2))
    for name in one:
        assert np.array_equal(one[name].ids, same[name].ids)
        assert np.array_equal(one[name].offsets, same[name].offsets)
    assert not np.array_equal(one["whole"].ids, other["whole"].ids)
    assert np.bincount(one["whole"].ids).argmax() == np.bincount(other["whole"].ids).argmax()
    with pytest.raises(ValueError, match="samples=0 must be in"):
        generate(WORKLOAD, samples=0, seed=0)


def test_each_table_is_counted() -> None:
    found = describe(TRACE)
    for table, name in zip(found.tables, TRACE.tables, strict=True):
        uses = Counter(TRACE.tables[name].ids.tolist())
        top = sum(count for _, count in uses.most_common(math.ceil(len(uses) / 100)))
        assert (table.name, table.rows, table.accesses) == (name, len(uses), uses.total())
        assert (table.top_share, table.ids_a_sample) == (top / uses.total(), uses.total() / TRACE.num_samples)
        assert table.used_once == sum(count == 1 for count in uses.values())
    assert found.total.all_accesses == TRACE.num_lookups
    assert (found.batches, found.samples) == (math.ceil(TRACE.num_samples / TRACE.batch_samples), TRACE.num_samples)


def test_text() -> None:
    ids = {"item": [0, 0, 0, 1], "\x1b[31muser": [0]}
    tables = {name: TableTrace(np.array(own), np.array([0, len(own)])) for name, own in ids.items()}
    lines = describe(Trace(tables=tables, batch_samples=1)).text().splitlines()
    assert lines[0] == "5 accesses of 3 rows; tables: 2, batches: 1, samples: 1"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if line}
    assert rows["item"] == ["4", "2", "4", "75.0", "%", "50.0", "%"]
    assert rows["all"] == ["5", "3", "5", "60.0", "%", "66.7", "%"]
    assert not any("\x1b" in line for line in lines)


def test_a_sample_that_says_how_much_was_looked_up_in_all() -> None:
    sampled = replace(TRACE, sampling_rate=0.1, all_lookups=(1_234_567_890, 400))
    found = describe(sampled)
    assert [each.all_accesses for each in (*found.tables, found.total)] == [1_234_567_890, 400, 1_234_568_290]
    assert found.total.accesses == sampled.num_lookups
    lines = found.text().splitlines()
    assert lines[1].endswith(", and 1,234,568,290 accesses")
    assert max(map(len, lines)) <= 100
    assert describe(replace(sampled, all_lookups=None)).total.all_accesses is None
