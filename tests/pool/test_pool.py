"""A pool over a cold tier that is slow, or fails: nobody sees a row that is not there yet, and nothing is lost."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.tiers import TroubledTier
from tierstore import init, optim
from tierstore.cache.ddr import DdrCache
from tierstore.cache.full import FullCache
from tierstore.config import TableConfig
from tierstore.errors import BudgetError, ChecksumError, ClosedError, DiskFullError
from tierstore.io.base import MemoryColdTier
from tierstore.kernels.threads import Workers
from tierstore.pool import leases
from tierstore.pool.leases import Lease
from tierstore.pool.pool import Pool

CAPACITY, ROWS, DIM = 64, 1000, 4
CONFIG = TableConfig(
    name="t", num_embeddings=ROWS, embedding_dim=DIM, init=init.Constant(1.0), optimizer=optim.SGD(lr=1.0)
)


def make_pool(tier: Any, policy: str = "lru") -> Pool:
    layout = CONFIG.layout(4096)
    tier.add_table(0, layout, ROWS)
    rows = DdrCache(CAPACITY, policy=policy, weight_words=layout.weight_words, state_words=layout.state_words)
    made = Pool(layout, rows, tier, Workers(1), transaction_bytes=1 << 16, outbox_rows=8, epoch=1, readonly=False)
    made.leases.add_table(0, CONFIG)
    return made


def keys(*rows: int) -> Any:
    return np.array(rows, np.int64)


def read(made: Pool, *rows: int) -> Any:
    return made.tier.read(keys(*rows)).numpy()[:, 0]


def take(made: Pool, *rows: int) -> Any:
    weights, state = (
        np.empty((len(rows), words), np.uint64) for words in (made.layout.weight_words, made.layout.state_words)
    )
    made.host.take(keys(*rows), weights, state)
    return weights.view(np.float32)[:, 0]


def write(made: Pool, value: float, *rows: int) -> None:
    made.tier.write(keys(*rows), torch.full((len(rows), DIM), value))


@pytest.fixture
def tier() -> TroubledTier:
    return TroubledTier(MemoryColdTier())


@pytest.fixture(params=["lru", "lfu", "tinylfu"])
def made(tier: TroubledTier, request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = make_pool(tier, request.param)
    yield made
    made.cache.check_integrity()
    assert made.pins.num_pinned == 0


def test_a_row_that_is_being_read_is_waited_for(made: Pool, tier: TroubledTier) -> None:
    write(made, 5.0, 7)
    made.flush()
    for row in np.repeat(np.arange(100, 100 + CAPACITY), 2).tolist():  # twice: used more than the row to evict
        read(made, row)
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(30)

    tier.before_read = wait
    seen: list[float] = []
    readers = [threading.Thread(target=lambda: seen.append(float(read(made, 7)[0]))) for _ in range(3)]
    readers[0].start()
    assert reached.wait(30)
    for reader in readers[1:]:
        reader.start()
    for use in (read, take):  # a cached row is not kept waiting by the device
        assert use(made, 100 + CAPACITY - 1)[0] == 1.0
    assert not seen
    go_on.set()
    for reader in readers:
        reader.join(30)
    assert seen == [5.0] * 3


def test_a_full_disk_loses_no_row(made: Pool, tier: TroubledTier) -> None:
    def refuse() -> None:
        raise DiskFullError("no room")

    write(made, 2.0, *range(CAPACITY))
    tier.before_write = refuse
    for _ in range(2):
        with pytest.raises(DiskFullError, match="no room"):
            read(made, 500)
        with pytest.raises(DiskFullError, match="no room"):
            made.flush()
        assert made.cache.num_dirty == CAPACITY
    assert (read(made, *range(CAPACITY)) == 2.0).all()
    tier.before_write = lambda: None
    assert read(made, 500)[0] == 1.0
    assert (read(made, *range(CAPACITY)) == 2.0).all()


def test_a_failed_read_leaves_no_row_behind(made: Pool, tier: TroubledTier) -> None:
    def refuse() -> None:
        raise ChecksumError("row 3 is damaged")

    write(made, 2.0, 3)
    made.flush()
    for row in np.repeat(np.arange(100, 100 + CAPACITY), 2).tolist():  # twice: used more than the row to evict
        read(made, row)
    tier.before_read = refuse
    for _ in range(3):
        with pytest.raises(ChecksumError, match="row 3 is damaged"):
            read(made, 100 + CAPACITY - 1, 3)
    tier.before_read = lambda: None
    assert read(made, 3)[0] == 2.0


def test_held_leases_leave_room_for_others_and_give_it_back(made: Pool) -> None:
    for _ in range(2):
        leases: list[Lease] = []
        while True:
            first = len(leases) * 8
            lease = made.leases.leading(keys(*range(first, first + 8)))
            if not made.pins.hold(lease):
                lease.release()
                break
            leases.append(lease)
        assert not made.pins.has_room(8)
        assert sum(len(lease.slots) for lease in leases) == 0.75 * CAPACITY
        assert (read(made, *range(500, 700)) == 1.0).all()
        for lease in leases:
            lease.release()
            lease.release()
        assert made.pins.has_room(8)
        assert made.pins.num_held == 0


@pytest.mark.parametrize("end", ["release", "close"])
def test_whoever_waits_for_pins_goes_on(made: Pool, end: str) -> None:
    lease = made.leases.leading(keys(*range(CAPACITY)))
    seen: list[Any] = []

    def wait() -> None:
        try:
            seen.append(read(made, 900)[0])
        except ClosedError as error:
            seen.append(type(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    (lease.release if end == "release" else made.close)()
    waiter.join(30)
    assert seen == [1.0 if end == "release" else ClosedError]
    lease.release()


def test_waiting_for_pins_ends_in_an_error(made: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "PIN_WAIT_SECONDS", 0.1)
    lease = made.leases.leading(keys(*range(CAPACITY)))
    with pytest.raises(BudgetError, match="open the store with a larger ddr="):
        read(made, 900)
    lease.release()


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


@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu"])
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
