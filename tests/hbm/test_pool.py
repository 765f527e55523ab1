"""The HBM tier over a pool that is slow, or fails: what goes up and down, what is pinned, and that nothing is lost."""

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.hbm.counting import counting
from tests.tiers import TroubledTier
from tierstore import init, optim
from tierstore.cache.ddr import DdrCache
from tierstore.config import TableConfig
from tierstore.errors import BudgetError, ChecksumError, ClosedError
from tierstore.hbm import pool as hbm_pool
from tierstore.hbm.base import DeviceLease
from tierstore.hbm.cache import HbmCache, HbmSize, group
from tierstore.hbm.pool import HbmPool
from tierstore.hbm.streams import Sender, Streams
from tierstore.io.base import MemoryColdTier
from tierstore.kernels.threads import Workers
from tierstore.pool.pool import Pool

CACHED, OVERFLOW, STAGED, BELOW, ROWS, DIM = 32, 8, 4, 64, 600, 3
"""One set, so that more than 32 rows at once overflow; and three columns, so that rows have padding."""
ROOM = CACHED + OVERFLOW
CONFIG = TableConfig(
    name="t", num_embeddings=ROWS, embedding_dim=DIM, init=init.Constant(1.0), optimizer=optim.RowWiseAdagrad()
)


def nothing() -> None:
    pass


class Below:
    """Passes on to a pool in host memory, after ``before``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.host = self
        self.layout = pool.layout
        self.before_take: Callable[[], None] = nothing
        self.before_put: Callable[[], None] = nothing

    def take(self, keys: Any, weights: Any, state: Any) -> None:
        self.before_take()
        self._pool.host.take(keys, weights, state)

    def put(self, keys: Any, weights: Any, state: Any) -> None:
        self.before_put()
        self._pool.host.put(keys, weights, state)


@pytest.fixture
def cold() -> TroubledTier:
    return TroubledTier(MemoryColdTier())


@pytest.fixture
def below(cold: TroubledTier) -> Below:
    layout = CONFIG.layout(4096)
    cold.add_table(0, layout, ROWS)
    rows = DdrCache(BELOW, policy="lru", weight_words=layout.weight_words, state_words=layout.state_words)
    pool = Pool(layout, rows, cold, Workers(1), transaction_bytes=1 << 16, outbox_rows=8, epoch=1, readonly=False)
    pool.leases.add_table(0, CONFIG)
    return Below(pool)


def make(below: Any, policy: Any = "lru") -> HbmPool:
    size = HbmSize(cached_rows=CACHED, overflow_rows=OVERFLOW, staging_rows=STAGED)
    return HbmPool(below, size, Sender(Streams(), torch.device("cpu")), policy)


@pytest.fixture
def hot(below: Below) -> Iterator[HbmPool]:
    made = make(below)
    yield made
    made.check_integrity()
    assert made.num_leased == 0


def keys(rows: Any) -> Any:
    return np.array(list(rows), np.int64)


def read(hot: HbmPool, rows: Any) -> list[float]:
    found = hot.read(keys(rows))
    assert torch.equal(found, found[:, :1].expand(-1, DIM))
    return found[:, 0].tolist()


def write(hot: HbmPool, rows: Any, value: float) -> None:
    hot.write(keys(rows), torch.full((len(keys(rows)), DIM), value))


def acquire(hot: HbmPool, rows: Any) -> DeviceLease:
    lease = hot.acquire(group(torch.from_numpy(keys(rows))), len(keys(rows)))
    assert lease is not None
    return lease


def change(lease: DeviceLease) -> None:
    """As an update does."""
    with lease.in_use(changes=True):
        pass
    lease.release()


def forget(hot: HbmPool) -> None:
    with hot.emptied():
        pass


# Trouble below


class Trouble:
    """Raises on calls from number ``first`` (0 is the next) on."""

    def __init__(self, first: int, error: BaseException) -> None:
        self._left, self._error = first, error
        self.raised = False

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.raised = True
            raise self._error


@pytest.mark.parametrize("name", ["plan", "commit", "release"])
@pytest.mark.parametrize("action", ["read", "write", "flush", "forget"])
def test_ctrl_c_waits_until_the_state_is_whole(
    hot: HbmPool, monkeypatch: pytest.MonkeyPatch, name: str, action: str
) -> None:
    write(hot, range(ROOM), 2.0)
    real, calls = getattr(HbmCache, name), []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        done = real(*arguments, **named)
        calls.append(name)
        os.kill(os.getpid(), signal.SIGINT)
        return done

    def run() -> None:
        if action in ("read", "write"):
            hot.read(keys(range(100, 130))) if action == "read" else write(hot, range(100, 130), 3.0)
        elif action == "flush":
            hot.flush()
        else:
            forget(hot)

    lease = acquire(hot, range(3))
    change(lease)
    monkeypatch.setattr(HbmCache, name, interrupted)
    try:
        run()
    except KeyboardInterrupt:
        assert calls
    monkeypatch.undo()
    hot.check_integrity()
    assert hot.num_leased == 0
    assert read(hot, range(ROOM)) == [2.0] * ROOM
    assert read(hot, range(100, 130)) == [3.0 if action == "write" else 1.0] * 30


# Leases


def test_held_leases_leave_room_for_others(hot: HbmPool) -> None:
    leases = []
    while True:
        lease = acquire(hot, range(5 * len(leases), 5 * len(leases) + 5))
        if not hot.hold(lease):
            assert not lease.held
            lease.release()
            break
        leases.append(lease)
    assert 5 * len(leases) == 0.75 * ROOM
    assert read(hot, range(300, 350)) == [1.0] * 50
    for lease in leases:
        lease.release()
    lease = acquire(hot, range(30))
    assert hot.hold(lease)
    lease.release()


def test_waiting_for_room_ends_in_an_error(hot: HbmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm_pool, "PIN_WAIT_SECONDS", 0.1)
    lease = acquire(hot, range(ROOM))
    for action in (lambda: read(hot, [300]), lambda: write(hot, [300], 2.0)):
        with pytest.raises(BudgetError, match="open the store with a larger hbm="):
            action()
    assert read(hot, range(ROOM)) == [1.0] * ROOM
    lease.release()
    assert read(hot, [300]) == [1.0]


def waiting(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that has not come back from ``action`` after a while, and what it will have got."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(action())
        except Exception as error:
            got.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.15)
    assert thread.is_alive()
    return thread, got


@pytest.mark.parametrize("end", ["release", "drop", "close"])
def test_whoever_waits_goes_on(hot: HbmPool, end: str) -> None:
    lease = acquire(hot, range(ROOM))
    thread, got = waiting(lambda: read(hot, [300, 301]))
    if end == "release":
        lease.release()
    elif end == "close":
        hot.close()
    del lease
    thread.join(30)
    assert got == [ClosedError if end == "close" else [1.0, 1.0]]


# At random


class Chaos:
    """Random work on a pool, some of which fails, beside a model of plain numbers."""

    def __init__(self, hot: HbmPool, below: Below, cold: TroubledTier, seed: int) -> None:
        self.hot, self.below, self.cold = hot, below, cold
        self.random = random.Random(seed)
        self.shown = dict.fromkeys(range(ROWS), 1.0)
        self.leases: list[DeviceLease] = []
        self.values = itertools.count(2)
        self.failures = 0

    def rows(self) -> list[int]:
        count = self.random.choice([1, 5, 20, 60])
        return [int(self.random.random() ** 2 * ROWS) for _ in range(count)]

    def step(self) -> None:
        trouble = Trouble(self.random.randrange(5), ChecksumError("trouble"))
        where = self.random.choice([None, (self.below, "before_take"), (self.below, "before_put"),
                                    (self.cold, "before_write")])  # fmt: skip
        if where is not None:
            setattr(*where, trouble)
        action = self.random.choice([self.read, self.read, self.write, self.train, self.hold, self.drop, self.tidy])
        try:
            action()
        except ChecksumError:
            assert trouble.raised
            self.failures += 1
        finally:
            self.below.before_take = self.below.before_put = self.cold.before_write = nothing
        self.hot.check_integrity()
        assert self.hot.num_leased == len(self.leases)

    def read(self) -> None:
        rows = self.rows()
        assert read(self.hot, rows) == [self.shown[row] for row in rows]

    def write(self) -> None:
        """If it fails, rows of parts before were written."""
        rows, value = self.rows(), float(next(self.values))
        try:
            write(self.hot, rows, value)
        except ChecksumError:
            self.below.before_take = self.below.before_put = self.cold.before_write = nothing
            for row, found in zip(rows, read(self.hot, rows), strict=True):
                assert found in (self.shown[row], value)
                self.shown[row] = found
            raise
        self.shown |= dict.fromkeys(rows, value)

    def train(self) -> None:
        """Change rows under a lease."""
        rows, value = sorted(set(self.rows())), float(next(self.values))
        grouping = group(torch.from_numpy(keys(rows)))
        lease = self.hot.acquire(grouping, len(rows))
        if lease is not None:
            self.hot.weights[lease.claim.slots.long()] = value
            change(lease)
            self.shown |= dict.fromkeys(rows, value)

    def hold(self) -> None:
        lease = self.hot.acquire(group(torch.from_numpy(keys(self.rows()[:10]))), 10)
        if lease is not None and self.hot.hold(lease):
            self.leases.append(lease)

    def drop(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            if self.random.random() < 0.5:
                lease.release()

    def tidy(self) -> None:
        if self.leases:
            self.hot.flush()
        else:
            forget(self.hot)


@pytest.mark.parametrize(("seed", "policy"), [(0, "lru"), (1, "lfu")])
def test_random_work_and_trouble(below: Below, cold: TroubledTier, seed: int, policy: str) -> None:
    chaos = Chaos(make(below, policy), below, cold, seed)
    for _ in range(100):
        chaos.step()
    assert chaos.failures > 5
    chaos.leases.clear()
    assert read(chaos.hot, range(ROWS)) == list(chaos.shown.values())
    forget(chaos.hot)
    assert read(chaos.hot, range(ROWS)) == list(chaos.shown.values())
    assert (chaos.hot.num_leased, chaos.hot.cache.num_pinned, chaos.hot.overflow.num_pinned) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_launches_and_waits(below: Below, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    hot = make(below, policy)
    read(hot, range(20))
    resident, new = torch.arange(20).repeat(3), torch.arange(10, 20 + 2 * STAGED)

    def step(keys: torch.Tensor) -> None:
        lease = hot.acquire(group(keys), len(keys))
        assert lease is not None
        change(lease)
        count.catch_up()

    with counting(monkeypatch) as count:
        step(resident)
        count.clear()
        step(resident)
        step(resident)
        expected = ["mix_keys", "sort", "place_starts", "place_starts", "edit_flags", "plan", "copy_", "commit"]
        assert sorted(count.launches) == sorted(expected * 2)
        assert count.waits == ["synchronize"] * 2
        count.clear()
        step(new)
        assert count.waits == ["synchronize"] * 2
        listing = ["sort", "list_keys", "move_rows", "move_rows", "edit_flags"]
        assert sorted(count.launches) == sorted(expected + listing)
        count.clear()
        step(torch.arange(30, 40))  # over dirty victims
        # The summary; six dirty rows go down by two buffers; the third buffer of rows that go up waits for the first.
        assert hot.counters.evictions == 6
        assert count.waits == ["synchronize"] * (1 + 2 + 1)
    hot.check_integrity()
