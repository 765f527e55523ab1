"""The fast cache and the reference, side by side through any history: admissions in flight, pins, dirty rows, failures.

Slots may differ; keys, order, numbers, statuses and counters may not. Each filled row carries its key, so a slot that
was given away while somebody relied on it shows.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cache.reference import ReferenceCache
from tests.conformance.row_cache import order_of, take
from tests.kernels.test_hash_table import key_of_hash
from tierstore.cache.base import Admission, AdmitStatus, Pinned
from tierstore.cache.ddr import DdrCache
from tierstore.kernels.arrays import Int32s, Int64s
from tierstore.kernels.hashing import SECRET

# Twelve ordinary keys, and four whose home is the last place of any index.
KEYS = [*range(12), *(key_of_hash(2**64 - 1 - rest, SECRET) for rest in range(4))]
batches = st.lists(st.sampled_from(KEYS), max_size=12).map(lambda keys: np.array(keys, np.int64))


def orders_of(keys: Int64s) -> st.SearchStrategy[Int32s]:
    places = range(len(keys))
    return (st.just([]) | st.permutations(places)).map(lambda order: np.array(order, np.int32))


ordered_batches = batches.flatmap(lambda keys: st.tuples(st.just(keys), orders_of(keys)))
places = st.integers(0, 2**16)


@dataclass
class Flight:
    """One batch on its way, in both caches: in an order of use in the fast one, which the keys of the slow one have."""

    fast: Admission
    slow: Admission


class TwinMachine(RuleBasedStateMachine):
    policy = "lru"

    @initialize(capacity=st.integers(1, 8))
    def build(self, capacity: int) -> None:
        self.fast = DdrCache(capacity, weight_words=1, state_words=0, policy=self.policy)  # type: ignore[arg-type]
        self.slow = ReferenceCache(capacity, weight_words=1, state_words=0, policy=self.policy)  # type: ignore[arg-type]
        self.flights: list[Flight] = []

    def both(self, keys: Int64s) -> tuple[Int32s, Int32s]:
        fast, slow = self.fast.find(keys), self.slow.find(keys)
        assert (fast >= 0).tolist() == (slow >= 0).tolist()
        return fast, slow

    def resident(self, keys: Int64s) -> Int64s:
        return keys[self.both(keys)[0] >= 0]

    def fill(self, flight: Flight) -> None:
        """Whatever still loads of this batch's rows, also what another batch reserved and gave up."""
        for cache, admission in ((self.fast, flight.fast), (self.slow, flight.slow)):
            slots = admission.slots
            loading = slots[[cache.is_loading(slots[i : i + 1]) for i in range(len(slots))]]
            cache.weights[loading, 0] = cache.keys_of(loading).view(np.uint64)
            cache.filled(loading)

    def same(self, flight: Flight) -> None:
        fast, slow = flight.fast, flight.slow
        assert (fast.consumed, fast.num_unique, fast.num_missing) == (slow.consumed, slow.num_unique, slow.num_missing)
        order = fast.order if len(fast.order) else np.arange(len(fast.keys))
        used = order[: fast.consumed]
        assert fast.inverse[used].tolist() == slow.inverse[: slow.consumed].tolist()
        assert fast.missing[: fast.num_missing].tolist() == order[slow.missing[: slow.num_missing]].tolist()
        assert self.fast.keys_of(fast.slots).tolist() == self.slow.keys_of(slow.slots).tolist()
        assert self.fast.keys_of(fast.slots)[fast.inverse[used]].tolist() == fast.keys[used].tolist()

    def take(self, limit: int) -> tuple[Pinned, Pinned]:
        """The next victims, written back as far as they were dirty; frozen ones are only thawed."""
        for gap in (1, 2, limit):
            victims = self.fast.dirty_victims(limit, gap), self.slow.dirty_victims(limit, gap)
            assert self.fast.keys_of(victims[0]).tolist() == self.slow.keys_of(victims[1]).tolist()
        self.fast.thaw(victims[0])
        self.slow.thaw(victims[1])
        fast, slow = (take(cache, cache.dirty_victims(limit, limit)) for cache in (self.fast, self.slow))
        assert self.fast.keys_of(fast.slots).tolist() == self.slow.keys_of(slow.slots).tolist()
        return fast, slow

    def mark(self, fast: Int32s, slow: Int32s) -> None:
        self.fast.mark_dirty(fast)
        self.slow.mark_dirty(slow)

    @rule(give_up=st.booleans())
    def freeze(self, give_up: bool) -> None:
        """A version begins; the one before it ended or was given up."""
        for cache in (self.fast, self.slow):
            if give_up:
                cache.unfreeze()
            else:
                cache.thaw(cache.frozen_slots())
            cache.freeze()

    @rule(batch=ordered_batches, limit=st.integers(1, 4), is_lucky=st.booleans())
    def admit(self, batch: tuple[Int64s, Int32s], limit: int, is_lucky: bool) -> None:
        keys, order = batch
        flight = Flight(Admission(keys, order), Admission(keys[order] if len(order) else keys))
        self.flights.append(flight)
        # Each stop cleans the next victim. While TinyLFU files rows, another one may come before it at the next try.
        stops = len(keys) if self.policy != "tinylfu" else self.fast.num_dirty + self.fast.num_frozen
        for _ in range(stops + 1):
            status = self.fast.admit(flight.fast)
            assert status is self.slow.admit(flight.slow)
            self.same(flight)
            if status is not AdmitStatus.DIRTY_VICTIM:
                break
            fast, slow = self.take(limit)
            if not is_lucky:
                self.mark(fast.slots, slow.slots)
            self.fast.release(fast)
            self.slow.release(slow)
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
        self.mark(flight.fast.slots, flight.slow.slots)
        for cache, slots in ((self.fast, flight.fast.slots), (self.slow, flight.slow.slots)):
            taken = take(cache, slots[:limit])
            assert taken.slots.tolist() == slots[:limit].tolist()
            cache.release(taken)

    @precondition(lambda self: self.flights)
    @rule(place=places, dirty=st.integers(0, 2**12 - 1))
    def finish(self, place: int, dirty: int) -> None:
        flight = self.flights.pop(place % len(self.flights))
        self.fill(flight)
        self.same(flight)
        is_written = np.array([dirty >> i & 1 for i in range(flight.fast.num_unique)], np.bool_)
        self.mark(flight.fast.slots[is_written], flight.slow.slots[is_written])
        self.fast.release(flight.fast)
        self.slow.release(flight.slow)

    @precondition(lambda self: self.flights)
    @rule(place=places)
    def give_up(self, place: int) -> None:
        flight = self.flights.pop(place % len(self.flights))
        for _ in range(2):
            self.fast.release(flight.fast)
            self.slow.release(flight.slow)

    @rule(keys=batches, are_resident=st.booleans())
    def use(self, keys: Int64s, are_resident: bool) -> None:
        keys = self.resident(keys) if are_resident else keys
        fast, slow = self.fast.use(keys), self.slow.use(keys)
        assert (fast is None) == (slow is None)
        assert fast is None or self.fast.keys_of(fast).tolist() == keys.tolist()

    @rule(limit=st.integers(0, 9))
    def write_back(self, limit: int) -> None:
        fast, slow = self.take(limit)
        self.fast.release(fast)
        self.slow.release(slow)

    @rule(key=st.sampled_from(KEYS))
    def evict(self, key: int) -> None:
        fast, slow = self.both(np.array([key], np.int64))
        if fast[0] < 0:
            return
        try:
            self.slow.evict(slow)
        except AssertionError:
            with pytest.raises(AssertionError):
                self.fast.evict(fast)
        else:
            self.fast.evict(fast)

    @precondition(lambda self: not (self.fast.num_pinned or self.fast.num_dirty or self.fast.num_frozen))
    @rule(keys=batches)
    def replay(self, keys: Int64s) -> None:
        hits = []
        for key in keys:
            admission = Admission(np.array([key]))
            self.slow.admit(admission)
            hits.append(not admission.num_missing)
            self.slow.filled(admission.missing_slots)
            self.slow.release(admission)
        assert self.fast.access(keys).tolist() == hits
        for cache in (self.fast, self.slow):
            resident = cache.resident_slots()
            cache.weights[resident, 0] = cache.keys_of(resident).view(np.uint64)

    @invariant()
    def agree(self) -> None:
        fast, slow = self.fast, self.slow
        fast.check_integrity()
        slow.check_integrity()
        assert order_of(fast) == order_of(slow)
        for count in ("num_resident", "num_dirty", "num_frozen", "num_pinned"):
            assert getattr(fast, count) == getattr(slow, count), count
        assert fast.counters() == slow.counters()
        for listed in ("dirty_slots", "frozen_slots"):
            one, other = (sorted(cache.keys_of(getattr(cache, listed)()).tolist()) for cache in (fast, slow))
            assert one == other, listed
        fast_slots, slow_slots = fast.resident_slots(), slow.resident_slots()
        one, other = (cache.by_admission(slots) for cache, slots in ((fast, fast_slots), (slow, slow_slots)))
        assert fast.keys_of(one).tolist() == slow.keys_of(other).tolist()
        for cache, slots in ((fast, fast_slots), (slow, slow_slots)):
            loaded = np.array([slot for slot in slots if not cache.is_loading(np.array([slot], np.int32))], np.int32)
            assert cache.weights[loaded, 0].view(np.int64).tolist() == cache.keys_of(loaded).tolist()


class LfuTwinMachine(TwinMachine):
    policy = "lfu"


class TinyLfuTwinMachine(TwinMachine):
    policy = "tinylfu"


for _machine in (TwinMachine, LfuTwinMachine, TinyLfuTwinMachine):
    _machine.TestCase.settings = settings(stateful_step_count=40, max_examples=3 * settings().max_examples)
TestLruTwins = pytest.mark.kernel(TwinMachine.TestCase)
TestLfuTwins = pytest.mark.kernel(LfuTwinMachine.TestCase)
TestTinyLfuTwins = pytest.mark.kernel(TinyLfuTwinMachine.TestCase)
