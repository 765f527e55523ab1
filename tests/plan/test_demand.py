"""Traces, their curves and demand: against counting by hand, a store's own counters, generated ids; Zipf's law."""

import contextlib
import json
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from bench.workload import ids_of
from tests.plan.hosts import make_setup
from tests.plan.hosts import run as run_command
from tests.recordings import random_trace
from tierstore.layout import KEY_ROW_BITS
from tierstore.plan import Accesses, TableShape, accesses_of, of_tables, once_a_batch
from tierstore.plan.curves import curve, distances, frequency_curve, lru_curve, popularity
from tierstore.plan.demand import Demand, pool_rows
from tierstore.plan.planning import plain
from tierstore.plan.traces import describe, draw_zipf, generate, numbered, read_accesses, scattered, zipf_bins
from tierstore.plan.workload import Workload
from tierstore.trace import TableTrace, Trace, write_trace
from tierstore.trace.recorded import Recorded, is_sampled

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
    assert [[table.name for table in pool.tables] for pool in found.pools] == [["a", "c"], ["b"]]
    layouts = [WORKLOAD.layout(table) for table in WORKLOAD.tables[:2]]
    assert pool_rows(make_setup(WORKLOAD, hosts=2), found) == tuple(zip(layouts, (300, 150), strict=True))
    for pool, lookups in zip(found.pools, (5.0, 1.0), strict=True):
        own = replace(trace, tables={table.name: trace.tables[table.name] for table in pool.tables})
        batches = [list(dict.fromkeys(each)) for each in batches_of(own, [*range(0, SAMPLES, BATCH), SAMPLES])]
        assert pool.lookups == lookups * BATCH, "the last batch, of ten samples, is no measure"
        assert pool.unique == np.mean([len(batch) for batch in batches[:-1]])
        keys = np.concatenate(batches)
        known = curve(Accesses(keys, np.arange(len(keys) + 1), ("all",)), "lru")
        assert [pool.curve.hit_rate(size) for size in sizes] == [known.hit_rate(size) for size in sizes]


@pytest.mark.parametrize("rate", [0.2, 0.005])
def test_batches_of_which_a_recording_has_no_row_count(rate: float) -> None:
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
    layouts = [served.layout(table) for table in served.tables[:2]]
    assert pool_rows(make_setup(served, hosts=2), found) == tuple(zip(layouts, (600, 300), strict=True))
    for changes, said in (
        ({"batch_samples": 51}, r"batches of 50 samples, the workload has 51"),
        ({"tables": WORKLOAD.tables[:2]}, "other tables"),
    ):
        with pytest.raises(ValueError, match=said):
            pool_rows(make_setup(replace(WORKLOAD, **changes)), found)


def test_what_a_trace_may_not_be(trace: Trace) -> None:
    accesses = accesses_of(trace)
    small = replace(WORKLOAD, tables=(replace(WORKLOAD.tables[0], num_embeddings=300), *WORKLOAD.tables[1:]))
    for workload, wrong, reason in (
        (WORKLOAD, accesses._replace(keys=accesses.keys[:0], starts=np.zeros(2, np.int64)), "no access"),
        (WORKLOAD, accesses._replace(tables=("a", "b", "z")), "table 'z', the workload has not; its tables are a, b"),
        (small, accesses, r"has row 3\d\d of table 'a', which has 300 rows"),
    ):
        with pytest.raises(ValueError, match=reason):
            Demand.from_accesses(workload, wrong)


def small_trace(seed: int, samples: int = 10) -> Trace:
    return replace(random_trace({"a": 5, "b": 5}, seed, samples), batch_samples=4, sampling_rate=0.5)


def batches_of(trace: Trace, bounds: list[int]) -> list[list[int]]:
    return [
        [
            index << 40 | int(row)
            for sample in range(first, stop)
            for index, table in enumerate(trace.tables.values())
            for row in table.ids[table.offsets[sample] : table.offsets[sample + 1]]
        ]
        for first, stop in pairwise(bounds)
    ]


def test_accesses_go_sample_by_sample_in_batches() -> None:
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
        assert [found.keys[slice(*each)].tolist() for each in pairwise(found.starts)] == batches_of(trace, bounds)
        assert (found.tables, found.sampling_rate) == (("a", "b"), 0.5)


def test_batches_that_a_recording_does_not_list() -> None:
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


TRACE = random_trace({"item": 300, "user": 40}, seed=5)
DRAWS, DRAWN_SAMPLES = 200_000, 5000
SHAPES = {"whole": (100, 3, 1.2), "half": (1 << 40, 2.5, 0.0), "rare": (7, 0.1, 1.05), "none": (7, 0.0, 1.05)}
"""Rows, ids a sample, and exponent."""
DRAWN = Workload(
    name="w",
    tables=tuple(
        TableShape(name=name, num_embeddings=rows, embedding_dim=4, pooling_factor=ids, exponent=exponent)
        for name, (rows, ids, exponent) in SHAPES.items()
    ),
    batch_samples=64,
)


@pytest.mark.parametrize("exponent", [0, 1, 1.05, 6.5])
def test_each_rank_has_its_chance(exponent: float) -> None:
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


def test_pooling_factors_are_means_of_whole_numbers_and_seeds_draw_other_samples_of_the_same_popularity() -> None:
    one, same, other = (generate(DRAWN, samples=DRAWN_SAMPLES, seed=seed).tables for seed in (-1, -1, 2))
    for name, table in one.items():
        mean, lengths = SHAPES[name][1], np.diff(table.offsets)
        low, share = int(mean), mean % 1
        assert set(lengths.tolist()) == ({low, low + 1} if share else {low})
        assert abs((lengths - low).mean() - share) <= 4 * (share * (1 - share) / DRAWN_SAMPLES) ** 0.5
        assert all(map(np.array_equal, table, same[name]))
    assert not np.array_equal(one["whole"].ids, other["whole"].ids)
    assert np.bincount(one["whole"].ids).argmax() == np.bincount(other["whole"].ids).argmax()
    with pytest.raises(ValueError, match="samples=0 must be in"):
        generate(DRAWN, samples=0, seed=0)


def test_each_table_is_counted() -> None:
    """Of 150 rows the two that are used most are three and two times."""
    ids = {"item": [0, 0, 0, 1], "\x1b[31muser": [*range(150), 7, 7, 8]}
    tables = {name: TableTrace(np.array(own), np.array([0, len(own)])) for name, own in ids.items()}
    lines = describe(Trace(tables=tables, batch_samples=1)).splitlines()
    assert lines[0] == "157 accesses of 152 rows; tables: 2, batches: 1, samples: 1"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if line}
    assert rows["item"] == ["4", "2", "4", "75.0", "%", "50.0", "%"]
    assert rows["all"] == ["157", "152", "157", "3.8", "%", "98.0", "%"]
    assert not any("\x1b" in line for line in lines)
    sampled = describe(replace(TRACE, sampling_rate=0.1, all_lookups=(1_234_567_890, 400))).splitlines()
    assert sampled[1].endswith(", and 1,234,568,290 accesses")
    assert max(map(len, sampled)) <= 100


def random_accesses(seed: int, num: int = 4000) -> Accesses:
    rng = np.random.default_rng(seed)
    second = rng.random(num) < 0.3
    keys = np.where(second, 2 << KEY_ROW_BITS | rng.integers(0, 20, num), rng.zipf(1.2, num) % 1000)
    return Accesses(keys.astype(np.int64), np.arange(num + 1), ("a", "b", "c"))


def searched(keys: list[int]) -> dict[int, int]:
    """Accesses by distance; a row's first access has none."""
    counts: Counter[int] = Counter()
    stack: list[int] = []
    for key in keys:
        if key in stack:
            counts[stack.index(key)] += 1
            stack.remove(key)
        stack.insert(0, key)
    return dict(counts)


@pytest.mark.kernel
@given(keys=st.lists(st.integers(0, 90), max_size=400), skip=st.integers(0, 400), shift=st.integers(0, 40))
def test_distances_of_any_accesses_behind_any_that_are_skipped(keys: list[int], skip: int, shift: int) -> None:
    before = Counter(searched(keys[:skip]))
    histogram = distances(numbered(np.array(keys, np.int64) << shift), skip=min(skip, len(keys)))
    found = {distance: int(histogram[distance]) for distance in np.flatnonzero(histogram).tolist()}
    assert found == {key: n - before[key] for key, n in searched(keys).items() if n > before[key]}


@pytest.mark.parametrize(
    ("policy", "about", "depth"),
    [("lru", 80, 0), ("lfu", 80, 0), ("lru", 900, 2), ("lfu", 900, 2), ("tinylfu", 300, 0), ("tinylfu", 900, 2)],
)
def test_a_store_misses_as_its_curve_says(policy: Any, about: int, depth: int) -> None:
    """Each lookup waits until the batches behind it are in. No id is twice in a batch: TinyLFU's window shrinks by the
    number of ids, which a trace of distinct rows has lost, so it is left out below the largest batch's rows."""
    generator = np.random.default_rng(4)
    batches = [generator.permutation(np.unique(generator.zipf(1.2, n) % 5000)) for n in generator.integers(1, 200, 60)]
    starts, left = np.cumsum([0, *map(len, batches)]), iter(range(len(batches), 0, -1))
    accesses = once_a_batch(Accesses(np.concatenate(batches), starts, ("all",)))
    rows = 2 * int(max(ids.max() for ids in batches)) + 2
    table = tierstore.TableConfig(name="t0", num_embeddings=rows, embedding_dim=4, optimizer=tierstore.optim.SGD(lr=1))
    jagged = [
        tierstore.KeyedJaggedTensor(["t0"], torch.from_numpy(ids), lengths=torch.tensor([len(ids)])) for ids in batches
    ]
    with tierstore.open(cold="memory", ddr=410_000 + 80 * about, policy=policy, threads=1) as store:
        pins = store.create_table(table).pool.pins
        module = tierstore.TieredEmbeddingBagCollection(store)
        with torch.no_grad(), contextlib.closing(tierstore.prefetch(jagged, module, depth=depth)) as ahead:
            for batch in ahead:
                expected = min(1 + depth, next(left))
                while depth and pins.num_held < expected:
                    time.sleep(0.001)
                module(batch)
        found = store.stats().ddr
    assert found.unique == len(accesses.keys)
    made = curve(accesses, policy, sizes=[found.capacity_rows], prefetch_depth=depth)
    assert found.misses == round(float(made.miss_ratios[0]) * made.num_accesses)


@pytest.mark.parametrize(("policy", "skip"), [("lru", 1700), ("lfu", 1), ("tinylfu", 3999)])
def test_skipped_batches_fill_the_cache_and_do_not_count(policy: str, skip: int) -> None:
    accesses, sizes = random_accesses(3), [1, 10, 100, 500]
    before = accesses._replace(keys=accesses.keys[:skip], starts=accesses.starts[: skip + 1])
    made = [curve(each, policy, sizes=sizes) for each in (before, accesses)]
    made.append(curve(accesses, policy, sizes=sizes, skip=skip))
    first, whole, rest = (each.miss_ratios * each.num_accesses for each in made)
    np.testing.assert_allclose(first + rest, whole, rtol=1e-12)


def test_accesses_that_are_a_sample_give_the_curve_of_all() -> None:
    keys = np.random.default_rng(7).integers(0, 400, 20_000)
    whole = Accesses(keys, np.arange(20_001), ("a",))
    made, all_of_it = curve(whole._replace(sampling_rate=0.5), "lru", sizes=[2, 200, 400, 800]), curve(whole, "lru")
    assert (made.num_accesses, made.num_rows, made.sampling_rate) == (40_000, 800, 0.5)
    # 0.25 rows more than half of the size: half a row for the newest, of which half is in its share.
    between = [0.75 * all_of_it.miss_ratio(size) + 0.25 * all_of_it.miss_ratio(size + 1) for size in (1, 100, 200)]
    np.testing.assert_allclose(made.miss_ratios, [*between, 400 / 20_000], rtol=1e-12)
    assert made.warning.endswith("record every row")
    assert not all_of_it.warning


def test_lookups_of_all_rows_say_what_misses_are_a_share_of() -> None:
    half, sizes = random_accesses(11)._replace(sampling_rate=0.5), [1, 40, 400, 2000]
    for policy, counts in (("lru", (4500, 0, 2500)), ("tinylfu", (6000, 0, 4000))):
        made = curve(half._replace(all_lookups=counts), policy, sizes=sizes)
        assert made.num_accesses == sum(counts)
        expected = np.minimum(curve(half, policy, sizes=sizes).miss_ratios * 8000 / sum(counts), 1)
        np.testing.assert_allclose(made.miss_ratios, expected, rtol=1e-12)


def test_the_command_writes_the_curves_that_were_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.npz"
    write_trace(random_trace({"item": 300, "user": 50}, seed=1, samples=400), path)
    accesses, out = once_a_batch(read_accesses(path)), tmp_path / "out"
    for depth in (0, 2):
        assert (
            run_command("curve", path, "--policy", "lru,lfu", "--prefetch-depth", depth, "--json", out, "--force") == 0
        )
        made = {policy: curve(accesses, policy, prefetch_depth=depth) for policy in ("lru", "lfu")}
        assert json.loads(out.read_text()) == plain(made)
    said = capsys.readouterr().out
    assert f"{path}: {len(accesses.keys):,} distinct rows of batches of 2 tables\n" in said
    assert all(f"{each.hit_rate(int(each.sizes[-1])):.4f}" in said for each in made.values())
    for words, reason in (
        (["--policy", "lru,belady"], r"policy='belady' is not one of auto, lru, lfu"),
        (["--prefetch-depth=-1"], "prefetch_depth=-1"),
    ):
        with pytest.raises(ValueError, match=reason):
            run_command("curve", path, *words, "--json", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_what_cannot_be_is_said() -> None:
    wrong: list[dict[str, Any]] = [{"sizes": [0, 3]}, {"sizes": []}, {"sizes": [1.5]}, {"skip": 4000}]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            curve(random_accesses(9), "lru", **options)
    with pytest.raises(ValueError, match="there is no access"):
        curve(random_accesses(9, 0), "lru")


BATCHES = 250


@pytest.mark.parametrize("exponent", [0.0, 0.999999, 1.0, 2.0])
def test_bins_are_all_rows_with_the_shares_of_the_law(exponent: float) -> None:
    for rows in (1, 256, 257, 20_000):
        counts, shares = zipf_bins(rows, exponent)
        weights = np.arange(1, rows + 1) ** -exponent
        assert counts.sum() == rows
        exact = pytest.approx(weights / weights.sum(), rel=0.01 * max(exponent, 1e-9) + 1e-9)
        assert np.repeat(shares, counts.astype(int)) == exact


@pytest.mark.parametrize(("rows", "exponent", "lookups"), [(2000, 0.6, 300), (1000, 0.0, 200), (20_000, 1.2, 1000)])
def test_lru_is_that_of_generated_ids(rows: int, exponent: float, lookups: int) -> None:
    ids = ids_of(np.random.default_rng(7), rows, BATCHES * lookups, exponent)
    accesses = once_a_batch(Accesses(ids, np.arange(BATCHES + 1) * lookups, ("all",)))
    found = popularity([(rows, exponent, float(lookups))])
    sizes = [int(share * found.unique) for share in (0.3, 0.6, 0.8, 1.0, 1.15, 1.3, 2.0, 3.0)]
    known, formula = curve(accesses, "lru", sizes=sizes, skip=BATCHES // 2), lru_curve(found)
    for size in known.sizes.tolist():
        assert formula.hit_rate(size) == pytest.approx(known.hit_rate(size), abs=0.008), size


def test_as_many_rows_as_there_can_be_and_few() -> None:
    found = popularity([(1 << 40, 1.05, 1e6)] * 30)
    assert len(found.rows) < 2000
    assert found.rows.sum() == pytest.approx(30 * 2**40)
    assert 0 < found.unique < 30e6
    for made in (lru_curve(found), frequency_curve(found)):
        assert (np.diff(made.miss_ratios) <= 0).all()
        assert made.sizes[-1] == 30 << 40
        assert made.hit_rate(1e9) > made.hit_rate(1e6) > 0
    alone = popularity([(1, 1.05, 10.0)])
    assert alone.unique == 1
    assert lru_curve(alone).hit_rate(1) == pytest.approx(1)
    assert frequency_curve(alone).hit_rate(1) == 1
    assert popularity([(1, 1.05, 0.25)]).unique == 0.25
    nobody = popularity([(100, 1.05, 0.0)])
    assert nobody.unique == lru_curve(nobody).miss_ratio(1) == 0
