"""Curves: against a list that is searched, a store's own counters, generated ids and samples; Zipf's law by formula."""

import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from bench.workload import ids_of
from tests.packed import random_trace
from tests.plan.hosts import run as run_command
from tierstore.layout import KEY_ROW_BITS
from tierstore.plan import Accesses, once_a_batch
from tierstore.plan.curves import by_table, curve, distances, frequency_curve, lru_curve, popularity
from tierstore.plan.planning import plain
from tierstore.plan.traces import numbered, read_accesses, zipf_bins
from tierstore.trace import write_trace


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

    def run(*words: object) -> Any:
        assert run_command("curve", path, *words, "--json", tmp_path / "out", "--force") == 0
        return json.loads((tmp_path / "out").read_text())

    accesses = read_accesses(path)
    sizes = sorted([10, 100, round(len(np.unique(accesses.keys)) / 10)])
    made = {policy: {"all": curve(accesses, policy, sizes=sizes)} for policy in ("lru", "lfu")}
    assert run("--policy", "lru,lfu", "--sizes", "10,100,10%") == plain(made)
    said = capsys.readouterr().out
    assert f"{path}: {len(accesses.keys):,} lookups of 2 tables\n" in said
    assert all(f"{each['all'].hit_rate(100):.4f}" in said for each in made.values())
    assert run("--by-table", "--policy", "lfu") == {"lfu": plain(by_table(accesses, "lfu"))}
    assert "lfu item" in capsys.readouterr().out
    ahead, plainly = (curve(once_a_batch(accesses), "lfu", prefetch_depth=depth) for depth in (2, 0))
    assert run("--once-a-batch", "--policy", "lfu", "--prefetch-depth", 2) == {"lfu": {"all": plain(ahead)}}
    assert plain(ahead) != plain(plainly)
    for words, reason in (
        (["--policy", "lru,belady"], r"policy='belady': there are lru, lfu"),
        (["--sizes", "10,ten"], r"--sizes ten: write rows, or a share"),
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
