"""What a lookup counts, in the statistics and in the order of eviction: each distinct row once, wherever rows lie."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore.cache import FullCache

MANY = 100_000
"""Rows that do not all fit the smaller budget: there they may be evicted."""


def open_store(path: Path, **changes: Any) -> tierstore.Store:
    store = tierstore.open(path, **{"threads": 1, "ddr": "1MiB", **changes})
    store.create_table(tierstore.TableConfig(name="t", num_embeddings=MANY, embedding_dim=4))
    return store


@pytest.mark.parametrize("budget", [{"ddr": "1MiB"}, {"ddr": "32MiB"}, {"hbm": "256KiB"}], ids=str)
def test_a_read_counts_repeated_ids_once_at_every_budget(store_dir: Path, budget: dict[str, Any]) -> None:
    with open_store(store_dir, **budget) as store:
        assert (not isinstance(store["t"].pool.cache, FullCache)) == (budget.get("ddr") != "32MiB")
        for reads in (1, 2, 3):
            store["t"].read(torch.tensor([7] * 100))
            stats = store.stats()
            tier = stats.hbm if "hbm" in budget else stats.ddr
            assert (tier.lookups, tier.unique, tier.hits, tier.misses) == (100 * reads, reads, reads - 1, 1)


@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu", "reference-lfu", "reference-tinylfu"])
def test_reads_of_rows_in_memory_order_them_as_reads_that_bring_them_in(store_dir: Path, policy: str) -> None:
    """A row read a hundred times at once is as near eviction as one read once."""
    orders = []
    for repeats in (1, 100):
        with open_store(store_dir / f"{policy}-{repeats}", policy=policy) as store:
            for row in (1, 2, 3, 4):
                store["t"].read(torch.tensor([row]))
            store["t"].read(torch.tensor([1] * repeats + [2]))
            store["t"].read(torch.tensor([3, 4]))
            store["t"].read(torch.tensor([3, 4]))
            cache = store["t"].pool.cache
            orders.append((cache.keys_of(cache.resident_slots()) & (2**40 - 1)).tolist())
            counts = cache.counters()
            assert (counts.hits, counts.misses) == (6, 4)
            cache.check_integrity()
    assert orders[0] == orders[1]
    assert set(orders[0]) == {1, 2, 3, 4}
