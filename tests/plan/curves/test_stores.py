"""Curves of batches, against the reference cache in plain Python and against a real store's own counters."""

import bisect
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore.cache import Admission
from tierstore.cache.reference import ReferenceCache
from tierstore.errors import BudgetError
from tierstore.plan import Accesses, once_a_batch
from tierstore.plan.curves import curve
from tierstore.pool import HELD_SHARE
from tierstore.store.budget import divide

POLICIES = ("lru", "lfu", "tinylfu")


def of_batches(batches: Sequence[Any]) -> Accesses:
    keys = np.array([key for batch in batches for key in batch], np.int64)
    return Accesses(keys, np.cumsum([0, *map(len, batches)]), ("all",))


class Slow:
    """What a store does with its cache, in plain Python; rows are in place as soon as they are admitted."""

    def __init__(self, policy: str, capacity: int, depth: int) -> None:
        self.cache: Any = ReferenceCache(capacity, weight_words=0, state_words=0, policy=f"reference-{policy}")  # type: ignore[arg-type]
        self.depth = depth
        self.held: deque[Any] = deque()
        self.misses = 0

    def _release(self) -> None:
        self.cache.unpin(self.held.popleft())

    def _in_the_way(self, num_rows: int) -> bool:
        """Whether the oldest pinned batch has to go before the next one, of so many rows, comes."""
        pinned = sum(map(len, self.held)) + num_rows
        return len(self.held) > self.depth or (len(self.held) > 0 and pinned > self.cache.capacity * HELD_SHARE)

    def look_up(self, keys: list[int]) -> None:
        while self._in_the_way(len(keys)):
            self._release()
        left = np.array(keys, np.int64)
        while len(left):
            admission = Admission(left)
            self.cache.admit(admission)
            self.cache.filled(admission.missing_slots)
            self.misses += admission.num_missing
            left = left[admission.consumed :]
            self.held.append(admission.slots)
            while len(left) and self.held:
                self._release()


def slow_misses(accesses: Accesses, policy: str, capacity: int, depth: int = 0) -> int:
    slow = Slow(policy, capacity, depth)
    for begin, end in zip(accesses.starts[:-1], accesses.starts[1:], strict=True):
        slow.look_up(accesses.keys[begin:end].tolist())
    return slow.misses


def misses(accesses: Accesses, policy: str, capacity: int, depth: int = 0) -> int:
    made = curve(accesses, policy, sizes=[capacity], prefetch_depth=depth)
    return round(float(made.miss_ratios[0]) * made.num_accesses)


BATCHES = st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=25).filter(any)


@pytest.mark.kernel
@pytest.mark.parametrize("policy", POLICIES)
@given(batches=BATCHES, spare=st.integers(0, 25), depth=st.integers(0, 3))
def test_any_batches_at_any_size_that_holds_those_in_flight(
    policy: str, batches: list[list[int]], spare: int, depth: int
) -> None:
    accesses = once_a_batch(of_batches(batches))
    capacity = (1 + depth) * int(np.diff(accesses.starts).max()) + spare
    assert misses(accesses, policy, capacity, depth) == slow_misses(accesses, policy, capacity, depth)


@pytest.mark.kernel
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(batches=BATCHES, capacity=st.integers(1, 12), depth=st.integers(0, 2))
def test_a_batch_that_does_not_fit_is_looked_up_part_by_part(
    policy: str, batches: list[list[int]], capacity: int, depth: int
) -> None:
    accesses = once_a_batch(of_batches(batches))
    assert misses(accesses, policy, capacity, depth) == slow_misses(accesses, policy, capacity, depth)


class Looked(NamedTuple):
    """Of a store, after it looked all batches up; rows count once a batch."""

    capacity: int
    unique: int
    misses: int


def looked_up(
    batches: list[Any], capacity: int, policy: Any, *, depth: int = 0, step: Callable[[Any], None] = lambda _: None
) -> Looked:
    """Look batches of ids up in one table's store of about so many rows, which has as many rows more.

    Args:
        depth: batches fetched ahead.
        step: what is done with the store before each lookup.
    """
    rows = 2 * int(max(ids.max() for ids in batches)) + 2
    table = tierstore.TableConfig(name="t0", num_embeddings=rows, embedding_dim=4, optimizer=tierstore.optim.SGD(lr=1))
    with tierstore.open(cold="memory", ddr="64MiB") as store:
        layout = store.create_table(table).layout

    def rows_of(budget: int) -> int:
        with contextlib.suppress(BudgetError):
            shares = divide(budget, {layout: rows}, num_tables=1, policy=policy, given=budget)
            return shares.pools[layout].cached_rows
        return 0

    budget = bisect.bisect_left(range(2**32), capacity, key=rows_of)
    jagged = [
        tierstore.KeyedJaggedTensor(["t0"], torch.from_numpy(ids), lengths=torch.tensor([len(ids)])) for ids in batches
    ]
    with tierstore.open(cold="memory", ddr=budget, policy=policy, threads=1) as store:
        store.create_table(table)
        module = tierstore.TieredEmbeddingBagCollection(store)
        with torch.no_grad(), contextlib.closing(tierstore.prefetch(jagged, module, depth=depth)) as ahead:
            for batch in ahead:
                step(store)
                module(batch)
        found = store.stats().ddr
        return Looked(found.capacity_rows, found.unique, found.misses)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_misses_as_its_curve_says(policy: str) -> None:
    """From the largest batch's rows on. No id is twice in a batch: TinyLFU's window shrinks by the number of ids, which
    a trace of distinct rows has lost."""
    generator = np.random.default_rng(4)
    batches = [generator.permutation(np.unique(generator.zipf(1.2, n) % 5000)) for n in generator.integers(1, 400, 60)]
    accesses = of_batches(batches)
    largest, num_rows = max(map(len, batches)), len(np.unique(accesses.keys))
    for size in np.geomspace(largest, 0.6 * num_rows, 4).astype(int).tolist():
        found = looked_up(batches, size, policy)
        assert found.capacity in range(size, size + 3)
        assert found.misses == misses(once_a_batch(accesses), policy, found.capacity)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_with_batches_ahead_misses_as_its_curve_says(policy: str) -> None:
    """Each lookup waits until the two batches behind it are in."""
    generator = np.random.default_rng(5)
    batches = [np.unique(ids) for ids in generator.zipf(1.2, (40, 200)) % 4000]
    accesses = once_a_batch(of_batches(batches))
    left = iter(range(len(batches), 0, -1))

    def wait(store: Any) -> None:
        expected, pins = min(3, next(left)), store["t0"].pool.pins
        while pins.num_held < expected:
            time.sleep(0.001)

    found = looked_up(batches, 900, policy, depth=2, step=wait)
    assert found.misses == misses(accesses, policy, found.capacity, 2)
    assert found.unique == len(accesses.keys)


def test_the_largest_batch_is_one_of_the_sizes() -> None:
    """Below it a batch is looked up in parts, and fewer rows of the batch before are left."""
    generator = np.random.default_rng(6)
    ends = np.cumsum(generator.integers(1, 500, 50))
    keys = generator.zipf(1.3, int(ends[-1])) % 3000
    accesses = once_a_batch(Accesses(keys, np.append(0, ends), ("all",)))
    largest = int(np.diff(accesses.starts).max())
    for policy in ("lfu", "tinylfu"):
        made = curve(accesses, policy)
        assert largest in made.sizes
        sizes = np.unique(np.geomspace(largest, made.num_rows, 12).astype(np.int64))
        off = [100 * (made.hit_rate(size) - curve(accesses, policy, sizes=[size]).hit_rate(size)) for size in sizes]
        assert np.abs(off).max() < 2
        assert np.abs(off).mean() < 0.5
