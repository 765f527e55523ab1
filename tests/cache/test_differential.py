"""The fast caches and the reference side by side, through any history of admissions, pins, dirty rows and failures.

Keys, order, numbers, statuses and counters agree. Each filled row carries its key, so a slot that was given away while
somebody relied on it shows.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.reference import Batch, ReferenceCache
from tests.cache.support import keys_from, order_of, take
from tests.kernels.test_hash_table import key_of_hash
from tierstore.cache.base import Admission, AdmitStatus, Pinned
from tierstore.cache.ddr import DdrCache
from tierstore.cache.full import FullCache
from tierstore.kernels.arrays import Int32s
from tierstore.kernels.hashing import SECRET
from tierstore.layout import KEY_ROW_BITS

TABLES = {4: range(5), 1: range(10, 13), 7: range(1, 9)}
batches: st.SearchStrategy[list[int]] = st.lists(st.integers(0, 15), max_size=12)
"""Numbers of keys, of which a machine has 16."""
ordered_batches = batches.flatmap(
    lambda batch: st.tuples(st.just(batch), st.just([]) | st.permutations(range(len(batch))))
)
places = st.integers(0, 2**16)


class Flight(NamedTuple):
    """One batch on its way, in both caches: in an order of use in the fast one, which the keys of the slow one have."""

    fast: Admission
    slow: Batch


class TwinMachine(RuleBasedStateMachine):
    policy = "lru"
    evicts = True
    # Twelve ordinary keys, and four whose home is the last place of any index.
    keys = keys_from(*range(12), *(key_of_hash(2**64 - 1 - rest, SECRET) for rest in range(4)))

    @initialize(capacity=st.integers(1, 8))
    def build(self, capacity: int) -> None:
        self.fast: Any = DdrCache(capacity, weight_words=1, state_words=0, policy=self.policy)
        self.slow = ReferenceCache(capacity, self.policy)
        self.flights: list[Flight] = []

    def in_slots(self, slots: Int32s) -> list[int]:
        return self.fast.keys_of(slots).tolist()  # type: ignore[no-any-return]

    def fill(self, flight: Flight) -> None:
        """Whatever still loads of this batch's rows, also what another batch reserved and gave up."""
        slots = flight.fast.slots
        loading = slots[[self.fast.is_loading(slots[i : i + 1]) for i in range(len(slots))]]
        keys = self.fast.keys_of(loading)
        assert set(keys.tolist()) == self.slow.loading & flight.slow.numbers.keys()
        self.fast.weights[loading, 0] = keys.view(np.uint64)
        self.fast.filled(loading)
        self.slow.loading.difference_update(keys.tolist())

    def same(self, flight: Flight) -> None:
        fast, slow = flight
        assert (fast.consumed, fast.num_unique, fast.num_missing) == (
            slow.consumed,
            len(slow.numbers),
            len(slow.missing),
        )
        order = fast.order if len(fast.order) else np.arange(len(fast.keys))
        inverse = fast.inverse[order[: fast.consumed]].tolist()
        assert inverse == [slow.numbers[key] for key in slow.keys[: slow.consumed]]
        assert fast.missing[: fast.num_missing].tolist() == [order[position] for position in slow.missing]
        assert self.in_slots(fast.slots) == [*slow.numbers]

    def take(self, slots: Int32s) -> tuple[Pinned, list[int]]:
        fast, keys = take(self.fast, slots), self.slow.take(self.in_slots(slots))
        assert self.in_slots(fast.slots) == keys
        return fast, keys

    def take_victims(self, limit: int) -> tuple[Pinned, list[int]]:
        """The next victims, written back as far as they were dirty; frozen ones are only thawed."""
        for gap in (1, 2, limit):
            victims = self.fast.dirty_victims(limit, gap)
            assert self.in_slots(victims) == self.slow.dirty_victims(limit, gap)
        self.slow.frozen.difference_update(self.in_slots(victims))
        self.fast.thaw(victims)
        return self.take(self.fast.dirty_victims(limit, limit))

    def mark(self, slots: Int32s) -> None:
        self.slow.mark_dirty(self.in_slots(slots))
        self.fast.mark_dirty(slots)

    def release(self, fast: Pinned, keys: list[int]) -> None:
        self.fast.release(fast)
        self.slow.unpin(keys)

    @rule(give_up=st.booleans())
    def freeze(self, give_up: bool) -> None:
        """A version begins; the one before it ended or was given up."""
        if self.slow.frozen:
            with pytest.raises(AssertionError, match="frozen"):
                self.fast.freeze()
        if give_up:
            self.fast.unfreeze()
            self.slow.unfreeze()
        else:
            self.fast.thaw(self.fast.frozen_slots())
            self.slow.frozen = set()
        self.fast.freeze()
        self.slow.freeze()

    @rule(batch=ordered_batches, limit=st.integers(1, 4), is_lucky=st.booleans())
    def admit(self, batch: tuple[list[int], list[int]], limit: int, is_lucky: bool) -> None:
        keys, order = self.keys[batch[0]], np.array(batch[1], np.int32)
        flight = Flight(Admission(keys, order), Batch((keys[order] if len(order) else keys).tolist()))
        self.flights.append(flight)
        # Each stop cleans the next victim. While TinyLFU files rows, another one may come before it at the next try.
        stops = len(keys) if self.policy != "tinylfu" else self.fast.num_dirty + self.fast.num_frozen
        for _ in range(stops + 1):
            status = self.fast.admit(flight.fast)
            assert status is self.slow.admit(flight.slow)
            self.same(flight)
            if status is not AdmitStatus.DIRTY_VICTIM:
                break
            taken = self.take_victims(limit)
            if not is_lucky:
                self.mark(taken[0].slots)
            self.release(*taken)
            if not is_lucky:
                self.give_up(-1)
                break
        else:
            raise AssertionError("each stop wrote the next victim back, yet admission does not end")

    @precondition(lambda self: self.flights)
    @rule(place=places)
    def load(self, place: int) -> None:
        self.fill(self.flights[place % len(self.flights)])

    @precondition(lambda self: self.flights)
    @rule(place=places, limit=st.integers(1, 9))
    def train(self, place: int, limit: int) -> None:
        """Rows in use become dirty, and some are written back while they are in use."""
        flight = self.flights[place % len(self.flights)]
        self.fill(flight)
        self.mark(flight.fast.slots)
        taken = self.take(flight.fast.slots[:limit])
        assert taken[0].slots.tolist() == flight.fast.slots[:limit].tolist()
        self.release(*taken)

    @precondition(lambda self: self.flights)
    @rule(place=places, dirty=st.integers(0, 2**12 - 1))
    def finish(self, place: int, dirty: int) -> None:
        flight = self.flights.pop(place % len(self.flights))
        self.fill(flight)
        self.same(flight)
        self.mark(flight.fast.slots[[bool(dirty >> i & 1) for i in range(flight.fast.num_unique)]])
        self.fast.release(flight.fast)
        self.slow.release(flight.slow)

    @precondition(lambda self: self.flights)
    @rule(place=places)
    def give_up(self, place: int) -> None:
        flight = self.flights.pop(place % len(self.flights))
        for _ in range(2):
            self.fast.release(flight.fast)
            self.slow.release(flight.slow)

    @rule(batch=batches, are_resident=st.booleans())
    def use(self, batch: list[int], are_resident: bool) -> None:
        keys = self.keys[batch]
        keys = keys[self.fast.find(keys) >= 0] if are_resident else keys
        found = self.fast.use(keys)
        assert (found is not None) == self.slow.use(keys.tolist())
        assert found is None or self.in_slots(found) == keys.tolist()

    @precondition(lambda self: self.evicts)
    @rule(limit=st.integers(0, 9))
    def write_back(self, limit: int) -> None:
        self.release(*self.take_victims(limit))

    @rule(number=st.integers(0, 15))
    def evict(self, number: int) -> None:
        slots, key = self.fast.find(self.keys[[number]]), int(self.keys[number])
        if slots[0] < 0:
            return
        try:
            self.slow.evict(key)
        except AssertionError:
            with pytest.raises(AssertionError):
                self.fast.evict(slots)
        else:
            self.fast.evict(slots)

    @precondition(lambda self: self.evicts)
    @precondition(lambda self: not (self.fast.num_pinned or self.fast.num_dirty or self.fast.num_frozen))
    @rule(batch=batches)
    def replay(self, batch: list[int]) -> None:
        hits = []
        for key in self.keys[batch].tolist():
            one = Batch([key])
            self.slow.admit(one)
            hits.append(not one.missing)
            self.slow.loading.discard(key)
            self.slow.release(one)
        assert self.fast.access(self.keys[batch]).tolist() == hits
        resident = self.fast.resident_slots()
        self.fast.weights[resident, 0] = self.fast.keys_of(resident).view(np.uint64)

    @invariant()
    def agree(self) -> None:
        fast, slow = self.fast, self.slow
        fast.check_integrity()
        slow.check_integrity()
        assert {key for key in self.keys.tolist() if fast.find(keys_from(key))[0] >= 0} == slow.rows.keys()
        counts = fast.num_resident, fast.num_dirty, fast.num_frozen, fast.num_pinned
        assert counts == tuple(map(len, (slow.rows, slow.dirty, slow.frozen, slow.rows.pins)))
        assert fast.counters() == slow.counters()
        assert set(self.in_slots(fast.dirty_slots())) == slow.dirty
        assert set(self.in_slots(fast.frozen_slots())) == slow.frozen
        slots = fast.resident_slots()
        assert set(self.in_slots(fast.frozen_of(slots))) == slow.frozen
        assert len(slots) == fast.num_resident
        if self.evicts:
            assert order_of(fast) == list(slow.rows.eviction_order())
            assert self.in_slots(fast.by_admission(slots)) == slow.by_admission()
        loaded = slots[[not fast.is_loading(slots[i : i + 1]) for i in range(len(slots))]]
        assert fast.weights[loaded, 0].view(np.int64).tolist() == self.in_slots(loaded)


class LfuTwinMachine(TwinMachine):
    policy = "lfu"


class TinyLfuTwinMachine(TwinMachine):
    policy = "tinylfu"


class FullTwinMachine(TwinMachine):
    evicts = False
    keys = keys_from(*(table << KEY_ROW_BITS | row for table, rows in TABLES.items() for row in rows))

    @initialize(capacity=st.just(16))
    def build(self, capacity: int) -> None:
        super().build(capacity)
        self.fast = FullCache(TABLES, weight_words=1, state_words=0)


for _machine in (TwinMachine, LfuTwinMachine, TinyLfuTwinMachine, FullTwinMachine):
    _machine.TestCase.settings = settings(stateful_step_count=40)
TestLruTwins = pytest.mark.kernel(TwinMachine.TestCase)
TestLfuTwins = pytest.mark.kernel(LfuTwinMachine.TestCase)
TestTinyLfuTwins = pytest.mark.kernel(TinyLfuTwinMachine.TestCase)
TestFullTwins = pytest.mark.kernel(FullTwinMachine.TestCase)
