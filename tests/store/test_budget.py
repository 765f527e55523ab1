"""Promise 4: a budget in bytes is kept, with its index, policy and staging, whatever the table's size."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore import optim
from tierstore.errors import BudgetError
from tierstore.system import sizes
from tierstore.system.sizes import parse_size


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
