"""A pool over a cold tier that is slow, or fails: nobody sees a row that is not there yet, and nothing is lost. Leases
leave room for others, and whoever waits for room goes on."""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tierstore
from tests.pool.support import CACHED, CAPACITY, OVERFLOW, keys, make_hot, make_pool, read, write
from tierstore.cache.full import FullCache
from tierstore.errors import BudgetError, ClosedError
from tierstore.hbm import pool as hbm_pool
from tierstore.hbm.cache import group
from tierstore.io.base import ColdTier, MemoryColdTier
from tierstore.pool import leases
from tierstore.pool.pool import Pool


class TroubledTier:
    """Passes everything on, after whatever ``before_read`` or ``before_write`` does: sleep, wait, raise."""

    def __init__(self, tier: ColdTier) -> None:
        self._tier = tier
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def read(self, *arguments: Any) -> None:
        self.before_read()
        self._tier.read(*arguments)

    def write(self, *arguments: Any, epoch: int) -> None:
        self.before_write()
        self._tier.write(*arguments, epoch=epoch)


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


class Rows(NamedTuple):
    room: int
    tier: Any
    acquire: Callable[[Iterable[int]], Any]
    hold: Callable[[Any], bool]
    close: Callable[[], None]
    budget: str


@pytest.fixture(params=["lru", "lfu", "tinylfu", "device"])
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    cold = TroubledTier(MemoryColdTier())
    if request.param == "device":
        hot = make_hot(cold)
        yield Rows(
            CACHED + OVERFLOW, hot, lambda some: hot.acquire(group(torch.from_numpy(keys(some))), 1), hot.hold,
            hot.close, "hbm=",
        )  # fmt: skip
        hot.check_integrity()
        assert hot.num_leased == 0
    else:
        made = make_pool(cold, request.param)
        yield Rows(
            CAPACITY, made.tier, lambda some: made.leases.leading(keys(some)), made.pins.hold, made.close, "ddr="
        )
        made.cache.check_integrity()
        assert (made.pins.num_pinned, made.pins.num_held) == (0, 0)


def test_held_leases_leave_room_for_others_and_give_it_back(rows: Rows) -> None:
    held, size = list[Any](), rows.room // 8
    while True:
        lease = rows.acquire(range(size * len(held), size * len(held) + size))
        if not rows.hold(lease):
            assert not lease.held
            lease.release()
            break
        held.append(lease)
    assert size * len(held) == 0.75 * rows.room
    assert read(rows.tier, range(300, 500)) == [1.0] * 200
    for lease in held:
        lease.release()
        lease.release()
    lease = rows.acquire(range(rows.room * 3 // 4))
    assert rows.hold(lease)
    lease.release()


def test_waiting_for_room_ends_in_an_error(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hbm_pool, leases):
        monkeypatch.setattr(module, "PIN_WAIT_SECONDS", 0.05)
    lease = rows.acquire(range(rows.room))
    with pytest.raises(BudgetError, match=f"open the store with a larger {rows.budget}"):
        read(rows.tier, [900])
    assert read(rows.tier, range(rows.room)) == [1.0] * rows.room
    lease.release()
    assert read(rows.tier, [900]) == [1.0]


@pytest.mark.parametrize("end", ["release", "drop", "close"])
def test_whoever_waits_for_room_goes_on(rows: Rows, end: str) -> None:
    lease, got = rows.acquire(range(rows.room)), list[Any]()

    def wait() -> None:
        try:
            got.append(read(rows.tier, [900, 901]))
        except ClosedError as error:
            got.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    if end != "drop":
        (lease.release if end == "release" else rows.close)()
    del lease
    thread.join(30)
    assert got == [ClosedError if end == "close" else [1.0, 1.0]]
