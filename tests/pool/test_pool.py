"""A pool over a cold tier that is slow, or fails: nobody sees a row that is not there yet, and nothing is lost."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.pool.support import CAPACITY, keys, make_pool, read, write
from tests.tiers import TroubledTier
from tierstore.cache.full import FullCache
from tierstore.io.base import MemoryColdTier
from tierstore.pool.pool import Pool

LAST = 100 + CAPACITY - 1


@pytest.fixture
def cold() -> TroubledTier:
    return TroubledTier(MemoryColdTier())


@pytest.fixture(params=["lru", "lfu", "tinylfu"])
def made(cold: TroubledTier, request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = make_pool(cold, request.param)
    yield made
    made.cache.check_integrity()
    assert made.pins.num_pinned == 0


def leave_alone(made: Pool, row: int, value: float) -> None:
    """Have a row on disk, and others in memory that are used more."""
    write(made.tier, [row], value)
    made.flush()
    for other in np.repeat(np.arange(100, LAST + 1), 2).tolist():
        read(made.tier, [other])


def test_a_row_that_is_being_read_is_waited_for(made: Pool, cold: TroubledTier) -> None:
    leave_alone(made, 7, 5.0)
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(30)

    cold.before_read = wait
    seen: list[float] = []
    readers = [threading.Thread(target=lambda: seen.extend(read(made.tier, [7]))) for _ in range(3)]
    readers[0].start()
    assert reached.wait(30)
    for reader in readers[1:]:
        reader.start()
    assert read(made.tier, [LAST]) == [1.0], "a cached row is not kept waiting by the device"
    weights, state = (np.empty((1, words), np.uint64) for words in (made.layout.weight_words, made.layout.state_words))
    made.host.take(keys([LAST]), weights, state)
    assert weights.view(np.float32)[0, 0] == 1.0
    assert not seen
    go_on.set()
    for reader in readers:
        reader.join(30)
    assert seen == [5.0] * 3


@pytest.mark.parametrize("budget", [{"ddr": "1MiB"}, {"ddr": "32MiB"}, {"hbm": "256KiB"}], ids=str)
def test_a_read_counts_repeated_ids_once_at_every_budget(store_dir: Path, budget: dict[str, Any]) -> None:
    with tierstore.open(store_dir, **{"threads": 1, "ddr": "1MiB"} | budget) as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=100_000, embedding_dim=4))
        assert isinstance(table.pool.cache, FullCache) == (budget.get("ddr") == "32MiB")
        for reads in (1, 2, 3):
            table.read(torch.tensor([7] * 100))
            stats = store.stats()
            tier = stats.hbm if "hbm" in budget else stats.ddr
            assert (tier.lookups, tier.unique, tier.hits, tier.misses) == (100 * reads, reads, reads - 1, 1)
