"""Curves of batches, against the reference cache in plain Python and against a real store's own counters."""

import time
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planning.beside_stores import errors_of, looked_up, one_table
from bench.planning.validation import trace_of
from tierstore.cache import Admission
from tierstore.cache.reference import ReferenceCache
from tierstore.plan import Accesses, accesses_of, once_a_batch
from tierstore.plan.curves import curve
from tierstore.pool import HELD_SHARE

POLICIES = ("lru", "lfu", "tinylfu")


def of_batches(batches: list[list[int]]) -> Accesses:
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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_misses_as_its_curve_says(policy: str) -> None:
    """From the largest batch's rows on. No id is twice in a batch: TinyLFU's window shrinks by the number of ids, which
    a trace of distinct rows has lost."""
    generator = np.random.default_rng(4)
    batches = [np.unique(generator.zipf(1.2, size) % 5000) for size in generator.integers(1, 400, 60)]
    workload = one_table("any", [generator.permutation(ids) for ids in batches])
    found = errors_of(workload, policy, 0, 4)
    assert found.sizes[0] in range(found.largest_batch, found.largest_batch + 3)
    assert max(map(abs, found.points)) < 1e-9, found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_store_with_batches_ahead_misses_as_its_curve_says(policy: str) -> None:
    """Each lookup waits until the two batches behind it are in."""
    generator = np.random.default_rng(5)
    workload = one_table("any", [np.unique(ids) for ids in generator.zipf(1.2, (40, 200)) % 4000])
    accesses = once_a_batch(accesses_of(trace_of(workload)))
    left = iter(range(len(workload.batches), 0, -1))

    def wait(store: Any) -> None:
        expected, pins = min(3, next(left)), store["t0"].pool.pins
        while pins.num_held < expected:
            time.sleep(0.001)

    found = looked_up(workload, 900, policy, depth=2, step=wait)
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
