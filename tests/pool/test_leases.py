"""Leases of rows in host and in device memory: they leave room for others, and whoever waits for room goes on."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.pool.support import CACHED, CAPACITY, OVERFLOW, keys, make_hot, make_pool, read
from tests.tiers import TroubledTier
from tierstore.errors import BudgetError, ClosedError
from tierstore.hbm import pool as hbm_pool
from tierstore.hbm.cache import group
from tierstore.io.base import MemoryColdTier
from tierstore.pool import leases


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
