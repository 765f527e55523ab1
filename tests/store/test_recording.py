"""Recording what a store looks up, by every path, against a log of what was asked for. Promise 4: a budget in bytes is
kept, with its index, policy and staging, whatever the table's size. What notebooks show."""

import gc
import itertools
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tierstore
from tests.recordings import Batch, Feature, check, random_batch
from tierstore import optim
from tierstore.cache.full import FullCache
from tierstore.errors import BudgetError, DiskFullError
from tierstore.store import recording
from tierstore.store.recording import require_recordable
from tierstore.store.table import OF_MODULES
from tierstore.system import sizes
from tierstore.system.sizes import parse_size
from tierstore.trace import read_trace

ROWS = {"a": 9000, "b": 50, "c": 300}
DIMS = {"a": 4, "b": 4, "c": 8}
INDEXES = {"a": 0, "b": 1, "c": 2}
TIERS: dict[str, dict[str, Any]] = {
    "in memory": {"ddr": "4MiB"},
    "leased": {"ddr": "480KiB"},
    "with hbm": {"ddr": "4MiB", "hbm": "1MiB"},
}


def open_store(folder: Path, **settings: Any) -> tierstore.Store:
    store = tierstore.open(folder, threads=2, **({"ddr": "4MiB"} | settings))
    for name, rows in ROWS.items():
        features = (name, f"{name}.again") if name == "b" else (name,)
        store.create_table(
            tierstore.TableConfig(
                name=name, num_embeddings=rows, embedding_dim=DIMS[name], feature_names=features,
                optimizer=tierstore.optim.SGD(lr=0.1),
            )
        )  # fmt: skip
    return store


@pytest.fixture
def store(store_dir: Path) -> Iterator[tierstore.Store]:
    with open_store(store_dir) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lookups.npz"


def steps(count: int, samples: int = 20, seed: int = 0) -> list[Batch]:
    generator = np.random.default_rng(seed)
    features = ["a", "b", "b", "c"]
    found = []
    for _ in range(count):
        parts = [random_batch(generator, {name: ROWS[name]}, samples).features[0] for name in features]
        found.append(Batch(samples, parts))
    return found


def jagged(batch: Batch, dtype: torch.dtype = torch.int64) -> tierstore.KeyedJaggedTensor:
    """The features in another order than the collection's, with one that it does not know."""
    order = [3, 0, 2, 1]
    parts = [batch.features[place] for place in order] + [Feature("?", [5], [1] + [0] * (batch.samples - 1))]
    names = [["a", "b", "b.again", "c"][place] for place in order] + ["unknown"]
    ids = [row for part in parts for row in part.ids]
    lengths = [length for part in parts for length in part.lengths]
    return tierstore.KeyedJaggedTensor(names, torch.tensor(ids, dtype=dtype), lengths=torch.tensor(lengths))


def bags(feature: Feature, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = np.append(0, np.cumsum(feature.lengths))
    return torch.tensor(feature.ids, dtype=dtype), torch.from_numpy(offsets)


@pytest.mark.parametrize(("dtype", "rate", "depth"), [(torch.int64, 0.2, 0), (torch.int32, 1.0, 3)])
@pytest.mark.parametrize("tiers", TIERS)
def test_a_collection_in_training(store_dir, path, tiers, dtype, rate, depth):
    """Batches once each, in the order of the steps; what is prefetched and never used is not recorded."""
    log = steps(9)
    with open_store(store_dir, **TIERS[tiers]) as store:
        pool = store["a"].pool
        assert isinstance(pool.cache, FullCache) == (tiers != "leased")
        assert pool.tier.on_device == (tiers == "with hbm")
        collection = tierstore.TieredEmbeddingBagCollection(store)
        pipeline = tierstore.prefetch([jagged(batch, dtype) for batch in log], collection, depth=depth)
        with store.record(path, rate=rate):
            for features in itertools.islice(pipeline, 5):
                collection(features).values().sum().backward()
            pipeline.close()
            with torch.no_grad():
                collection(jagged(log[5], dtype))
        collection(jagged(log[0]))
    check(read_trace(path), log[:6], INDEXES)


LOOKS: dict[str, Callable[[tierstore.Store, Feature], Any]] = {
    "pooled": lambda store, bag: store[bag.table].pooled(*bags(bag)),
    "pooled, int32": lambda store, bag: store[bag.table].pooled(*bags(bag, torch.int32)),
    "maximum": lambda store, bag: store[bag.table].pooled(*bags(bag), mode="max"),
    "by weights": lambda store, bag: store[bag.table].pooled(
        *bags(bag), mode="sum", per_sample_weights=torch.ones(len(bag.ids))
    ),
    "module": lambda store, bag: tierstore.TieredEmbeddingBag(store[bag.table], include_last_offset=True)(*bags(bag)),
}


@pytest.mark.parametrize("tiers", TIERS)
def test_bags_of_one_table(store_dir, tmp_path, tiers):
    log = [Batch(batch.samples, [feature]) for batch in steps(3) for feature in batch.features]
    with open_store(store_dir, **TIERS[tiers]) as store:
        for (name, look), rate in itertools.product(LOOKS.items(), (1.0, 0.3)):
            with store.record(tmp_path / f"{name} {rate}.npz", rate=rate):
                for batch in log:
                    look(store, batch.features[0])
    for name, rate in itertools.product(LOOKS, (1.0, 0.3)):
        check(read_trace(tmp_path / f"{name} {rate}.npz"), log, INDEXES)


def test_a_long_run_keeps_to_its_bytes(store, path):
    log = steps(60, samples=64)
    collection = tierstore.TieredEmbeddingBagCollection(store)
    with store.record(path, rate=1.0, max_bytes="64KiB") as recorder:
        for batch in log:
            collection(jagged(batch))
    trace = read_trace(path)
    assert trace.sampling_rate == recorder.rate < 1
    check(trace, log, INDEXES)
    # The names of the arrays and their headers are beside what is bounded.
    assert path.stat().st_size <= (64 << 10) + 8 * 512


def test_a_file_in_use(store, tmp_path):
    with store.record(tmp_path / "y.npz") as first, pytest.raises(ValueError, match=r"recorded to .*y\.npz; stop that"):
        store.record(tmp_path / "z.npz")
    assert not first.path.exists(), "nothing was looked up: who failed before a first step may begin again"
    assert require_recordable(tmp_path / "x.npz", "1MiB") == 1 << 20


def test_the_file_is_written_now_and_then(store, path, monkeypatch, caplog):
    """Also after it could not be written for a while."""
    monkeypatch.setattr(recording, "_WRITE_SECONDS", 0.005)
    write, full = recording.write_trace, threading.Event()

    def write_or_fail(*given: Any, **settings: Any) -> None:
        if full.is_set():
            raise DiskFullError("no room left")
        write(*given, **settings)

    def wait_until(is_so: Callable[[], bool]) -> None:
        limit = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < limit
            time.sleep(0.005)

    monkeypatch.setattr(recording, "write_trace", write_or_fail)
    with store.record(path, rate=1.0):
        store["a"].read(torch.tensor([1]))
        wait_until(lambda: read_trace(path).num_lookups == 1)
        full.set()
        store["a"].read(torch.tensor([2]))
        wait_until(lambda: bool(caplog.records))
        assert read_trace(path).num_lookups == 1
        full.clear()
        wait_until(lambda: read_trace(path).num_lookups == 2)
    assert [each.getMessage() for each in caplog.records] == ["the recording goes on, and is not on disk: no room left"]


def test_an_unwritten_recording_is_not_lost(store_dir, path, monkeypatch):
    with open_store(store_dir) as store:
        recorder = store.record(path, rate=1.0)
        store["a"].read(torch.tensor([1]))

        monkeypatch.setattr(recording, "write_trace", Mock(side_effect=DiskFullError("no room left")))
        with pytest.raises(DiskFullError):
            store.close()
    assert store.recorder is None
    assert read_trace(path).num_lookups == 0
    monkeypatch.undo()
    tierstore.open(store_dir, ddr="1MiB").close()
    recorder.stop()
    assert read_trace(path).num_lookups == 1


@pytest.mark.parametrize(
    ("policy", "ddr", "layout"),
    [
        ("lru", "500KiB", {"embedding_dim": 64, "optimizer": optim.RowWiseAdagrad()}),
        ("lfu", "16MiB", {"embedding_dim": 3, "dtype": "float16"}),
        ("tinylfu", "500KiB", {"embedding_dim": 16, "optimizer": optim.Adam()}),
    ],
    ids=str,
)
def test_a_store_allocates_within_its_budget(store_dir: Path, policy: str, ddr: str, layout: dict[str, Any]) -> None:
    """numpy reports every array to tracemalloc, so an array that no accounting knows of is found too."""
    budget, rows = parse_size(ddr, name="ddr"), 400_000
    with tierstore.open(store_dir, ddr=ddr, policy=policy, threads=1) as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=rows, **layout))
        collection = tierstore.TieredEmbeddingBagCollection(store)
        lengths, generator = torch.ones(500, dtype=torch.int64), torch.Generator().manual_seed(0)
        batches = [
            tierstore.KeyedJaggedTensor(["t"], torch.randint(rows, (500,), generator=generator), lengths=lengths)
            for _ in range(4)
        ]

        def train() -> None:
            for features in tierstore.prefetch(batches, collection, depth=2):
                collection(features).values().sum().backward()

        train()  # compiles kernels, outside the measurement
        store.create_table(tierstore.TableConfig(name="other", num_embeddings=1, **layout))  # drops the caches
        gc.collect()
        tracemalloc.start()
        try:
            train()
            gc.collect()
            allocated = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert store.stats().ddr.bytes <= budget
        assert allocated <= budget
        assert table.pool.cache.capacity > 64


def test_the_budget_is_used_and_divided_by_what_layouts_would_take(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="8MiB") as store:
        for name, dim in (("narrow", 8), ("wide", 64)):
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=10**6, embedding_dim=dim))
        narrow, wide = (store[name].pool.cache for name in ("narrow", "wide"))
        assert narrow is not wide
        assert 0.9 * 2**23 < store.stats().ddr.bytes <= 2**23
        assert abs(narrow.capacity - wide.capacity) <= 0.01 * wide.capacity


def test_nothing_grows_with_the_table_but_the_map(store_dir: Path) -> None:
    held = []
    for number, rows in enumerate((10**5, 10**9)):
        with tierstore.open(store_dir / str(number), ddr="1MiB") as store:
            table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=rows, embedding_dim=16))
            table.read(torch.arange(0, rows, rows // 100))
            stats = store.stats()
            held.append((stats.ddr.bytes, stats.ddr.capacity_rows))
            assert stats.ssd.bytes < rows * 4 + 2**20
    assert held[0] == held[1]


@pytest.mark.parametrize("tier", ["ddr", "hbm"])  # hbm, of the CPU, is host memory too
def test_more_memory_than_there_is_is_refused_before_any_is_taken(store_dir: Path, monkeypatch: Any, tier: str) -> None:
    monkeypatch.setattr(sizes, "machine_memory_bytes", lambda: 100 * 2**20)
    for size in ("1GiB", 2**30, "101%"):
        budgets: dict[str, Any] = {"ddr": "4MiB", tier: size}
        with pytest.raises(BudgetError, match=rf"{tier}={size!r} would take .* has 100\.0 MiB; give less"):
            tierstore.open(store_dir, **budgets)
    assert not store_dir.exists()
    with tierstore.open(store_dir, **{"ddr": "4MiB", tier: "100% of tables"}) as store:
        large = store.create_table(tierstore.TableConfig(name="large", num_embeddings=10**6, embedding_dim=64))
        with pytest.raises(BudgetError, match=rf"{tier}='100% of tables' would take .* has 100\.0 MiB; give less"):
            large.read(torch.arange(10))


def test_page_cache_is_told_apart_from_the_budget(store_dir: Path) -> None:
    """A reader of 8 MiB of rows within 2 MiB: what it looked at is resident, but no part of what the budget covers."""
    rows = torch.arange(30_000)
    with tierstore.open(store_dir, ddr="2MiB") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=len(rows), embedding_dim=64))
        store["t"].write(rows, torch.rand(len(rows), 64))
        store.commit()
    with tierstore.open(store_dir, mode="r", ddr="2MiB") as store:
        before = store.stats().ssd.page_cache_bytes
        store["t"].read(rows)
        stats = store.stats()
    assert stats.ssd.page_cache_bytes - before >= len(rows) * 64 * 4
    assert stats.ddr.bytes <= 2 << 20


def test_versions_in_memory_that_are_dropped_take_no_memory() -> None:
    rows, every = 2000, torch.arange(2000)
    with tierstore.open(cold="memory", keep=3, ddr="1MiB", threads=1) as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=rows, embedding_dim=16))
        for step in range(6):
            table.write(every, torch.full((rows, 16), float(step)))
            store.commit()
            assert store.verify().bytes <= (min(step + 1, 3) + 1) * rows * table.pool.layout.row_bytes
        assert store.versions == (4, 5, 6)
        assert store.find_newer() is None


def test_stores_and_what_they_give_are_shown_as_tables_and_names_are_those_of_users() -> None:
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="<a&b>", num_embeddings=2000, embedding_dim=2))
        table.read(torch.arange(3))
        shown = store, store.stats(), tierstore.KeyedTensor(["user"], [4], torch.ones(3, 4))
        cells = [" ".join(re.findall("<t[dh]>(.*?)</t[dh]>", each._repr_html_())) for each in shown]
        assert cells[0] == "table rows columns dtype optimizer &lt;a&amp;b&gt; 2,000 2 float32 sgd"
        assert cells[1].split() == repr(shown[1]).split() == str(shown[1]).split()
        assert cells[2] == "feature user columns 4 samples 3"
        assert {"commit", "create_table", "tables", "versions", "_repr_html_"} < {*dir(store)}
        assert {"config", "ids", "read", "write"} < {*dir(table)}
        assert not {*dir(store), *dir(table)} & OF_MODULES
        assert {*object.__dir__(store), *object.__dir__(table)} > OF_MODULES, "all that are hidden are there"


@pytest.mark.parametrize("depth", [0, 2, "auto"])
def test_a_pass_has_the_length_of_its_source(depth: int) -> None:
    batches = [torch.arange(6).reshape(2, 3)] * 5
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        config = tierstore.TableConfig(name="item", num_embeddings=9, embedding_dim=2)
        known, unknown = (
            tierstore.prefetch(each, tierstore.TieredEmbeddingBag(store.create_table(config)), depth=depth)
            for each in (batches, iter(batches))
        )
        assert (len(known), bool(known), bool(unknown), len([*known])) == (5, True, True, 5)
        with pytest.raises(TypeError, match="has no len"):
            len(unknown)
