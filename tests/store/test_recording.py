"""Recording what a store looks up, by every path, against a log of what was asked for."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tierstore
from tests.recordings import Batch, Feature, check, random_batch
from tierstore.cache.full import FullCache
from tierstore.errors import DiskFullError
from tierstore.store import recording
from tierstore.store.recording import require_recordable
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
