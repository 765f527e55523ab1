"""The slow and obviously right row cache, of keys in mappings and sets of Python's own: the oracle of the fast ones.

It shares nothing with them but the contract (tierstore/cache/base.py), and has no slots: a row is its key. Its policies
are mappings of bounded size that pass over pinned keys, by the rules and constants of the fast caches."""

import math
from collections import Counter, OrderedDict, UserDict
from collections.abc import Iterable, Iterator
from typing import Final

from tierstore.cache.base import AdmitStatus, CacheCounters


class Pinnable(UserDict[int, int]):
    """key -> slot; evicts the first key in eviction order that is not in ``pins``."""

    def __init__(self, maxsize: int) -> None:
        super().__init__()
        self.maxsize = maxsize
        self.pins: dict[int, int] = {}

    def eviction_order(self) -> Iterator[int]:
        raise NotImplementedError

    def __setitem__(self, key: int, slot: int) -> None:
        if key not in self and len(self) == self.maxsize:
            self.popitem()
        super().__setitem__(key, slot)

    def first_unpinned(self) -> int | None:
        return next((key for key in self.eviction_order() if key not in self.pins), None)

    def popitem(self) -> tuple[int, int]:
        key = self.first_unpinned()
        assert key is not None, "every key is pinned"
        slot = self.data[key]
        del self[key]
        return key, slot

    def begin(self, num_accesses: int) -> None:
        """So many accesses are about to be counted."""

    def settle(self, keys: list[int]) -> None:
        """These keys were accessed by one call."""


class LRU(Pinnable):
    def eviction_order(self) -> Iterator[int]:
        return iter(self.data)

    def __getitem__(self, key: int) -> int:
        slot = self.data[key] = self.data.pop(key)
        return slot


LEVELS: Final = 256
TICKS_PER_LEVEL: Final = 768
NEWCOMER: Final = 2
HIGHEST: Final = 32
LOWEST: Final = -40
LOWERED_BASE: Final = 96
COUNTERS_PER_ROW: Final = 16
BLOCK: Final = 64
FILED_PER_ACCESS: Final = 4
MOVED_SHARE: Final = 32
MOVED_MAX: Final = 4096
WINDOW_SHARE: Final = 100
SAMPLED_ROWS: Final = 128
RATES: Final = (64, 91, 128, 181, 256, 362, 512, 724, 1024, 2266, 5016, 11101, 24576)
HIT: Final = 256
LEAD: Final = 24
WORD: Final = 2**64
HALF: Final = 2**32


def mixed(key: int) -> int:
    """Mix13, all three steps."""
    x = key % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


class Sketch:
    """The levels of rows when they left."""

    def __init__(self, capacity: int) -> None:
        self._num_blocks = math.ceil(COUNTERS_PER_ROW * capacity / BLOCK)
        self._counters: dict[tuple[int, int], int] = {}

    def _places(self, key: int) -> list[tuple[int, int]]:
        """Block and place in it, for both halves of the block."""
        x = mixed(key)
        block = x // HALF * self._num_blocks // HALF
        return [(block, x % 32), (block, 32 + x // 32 % 32)]

    def level(self, key: int) -> int:
        return min(self._counters.get(place, 0) for place in self._places(key))

    def leave(self, key: int, level: int) -> None:
        for place in self._places(key):
            self._counters[place] = max(self._counters.get(place, 0), level)

    def lower(self, amount: int) -> None:
        self._counters = {place: level - amount for place, level in self._counters.items() if level > amount}


class HalfLife:
    """Small caches replay a sample of the accesses, each at its own rate; says the mean rate, weighted by hits."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._rows = capacity, min(capacity, SAMPLED_ROWS)
        self._small = [TinyLFU(self._rows, rate) for rate in RATES[::4]]
        self._scores = [0] * len(self._small)
        self._waiting: list[int] = []

    def observe(self, keys: list[int], rate: int) -> int:
        for key in keys:
            salted = mixed(key) * 0x9E3779B97F4A7C15 % WORD // HALF
            if salted * self._capacity // HALF < self._rows:
                self._waiting.append(key)
                if len(self._waiting) == max(1, self._rows // 4):
                    rate = self._choose()
        return rate

    def _choose(self) -> int:
        for speed, small in enumerate(self._small):
            hits = sum([small.access(key) for key in self._waiting])
            self._scores[speed] += HIT * hits - self._scores[speed] // 64
        self._waiting.clear()
        best, count = max(self._scores), len(self._scores)
        self._scores = [max(score, best - HIT * LEAD * (count - i)) for i, score in enumerate(self._scores)]
        weights = [2**40 // 2 ** ((best - score) // (4 * HIT)) for score in self._scores]
        moment = sum(weight * speed for speed, weight in enumerate(weights))
        return RATES[(8 * moment + sum(weights)) // (2 * sum(weights)) if best else 0]


class TinyLFU(Pinnable):
    """See tinylfu.py for the rules. ``rate``: of a small cache, which keeps it."""

    def __init__(self, maxsize: int, rate: int = 0) -> None:
        super().__init__(maxsize)
        self._levels: dict[int, int] = {}
        self._places: dict[int, int] = {}  # that of the window is ``LEVELS``
        self._parts: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(LEVELS + 1)]
        self._sketch = Sketch(maxsize)
        self._base = self._clock = 0
        self._rate = rate or RATES[0]
        self._half_life = None if rate else HalfLife(maxsize)

    def eviction_order(self) -> Iterator[int]:
        for part in self._parts:
            yield from part

    def _raised(self, level: int) -> int:
        above = max(level - self._base, LOWEST)
        return self._base + min(max(round(4 * math.log2(1 + 2 ** (above / 4))), above + 1), HIGHEST)

    def _move(self, key: int, place: int, last: bool = True) -> None:
        if key in self._places:
            del self._parts[self._places[key]][key]
        self._places[key] = place
        self._parts[place][key] = None
        self._parts[place].move_to_end(key, last)

    def __getitem__(self, key: int) -> int:
        level = self._levels[key] = self._raised(self._levels[key])
        self._move(key, LEVELS if self._places[key] == LEVELS else level)
        return super().__getitem__(key)

    def __setitem__(self, key: int, slot: int) -> None:
        super().__setitem__(key, slot)
        self._levels[key] = self._raised(self._sketch.level(key))
        self._move(key, LEVELS)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        del self._parts[self._places.pop(key)][key]
        self._sketch.leave(key, self._levels.pop(key))

    def access(self, key: int) -> bool:
        self.begin(1)
        is_hit = key in self
        if is_hit:
            self[key]
        else:
            self[key] = 0
        self.settle([key])
        return is_hit

    def begin(self, num_accesses: int) -> None:
        window, limit = self._parts[LEVELS], max(1, self.maxsize // WINDOW_SHARE)
        moved = min(self.maxsize // MOVED_SHARE, MOVED_MAX)
        for _ in range(moved + FILED_PER_ACCESS * num_accesses if len(window) > limit + moved else 0):
            if len(window) <= limit or (oldest := next(iter(window))) in self.pins:
                break
            self._move(oldest, max(0, self._levels[oldest] - NEWCOMER), last=False)

    def settle(self, keys: list[int]) -> None:
        risen, self._clock = divmod(self._clock + len(keys) * self._rate, TICKS_PER_LEVEL * self.maxsize)
        self._base += risen
        if self._base + HIGHEST >= LEVELS:
            self._lower(self._base - LOWERED_BASE)
        if self._half_life:
            self._rate = self._half_life.observe(keys, self._rate)

    def _lower(self, amount: int) -> None:
        self._base -= amount
        self._sketch.lower(amount)
        self._levels = {key: max(0, level - amount) for key, level in self._levels.items()}
        for key in list(self.eviction_order()):
            place = self._places[key]
            self._move(key, place if place == LEVELS else max(0, place - amount))


class LFU(LRU):
    """Least frequently used first; of several, the one that has been at that count for longest."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._counts: dict[int, int] = {}

    def eviction_order(self) -> Iterator[int]:
        return iter(sorted(self.data, key=self._counts.__getitem__))

    def __getitem__(self, key: int) -> int:
        self._counts[key] += 1
        return super().__getitem__(key)

    def __setitem__(self, key: int, slot: int) -> None:
        super().__setitem__(key, slot)
        self._counts[key] = 1

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        del self._counts[key]


CLASSES: Final[dict[str, type[Pinnable]]] = {"lru": LRU, "lfu": LFU, "tinylfu": TinyLFU}


class Batch:
    """What an ``Admission`` has of a batch: the number of each distinct key, and the positions of missing ones."""

    def __init__(self, keys: list[int]) -> None:
        self.keys: Final = keys  # in order of use
        self.clear()

    def clear(self) -> None:
        self.consumed, self.stamp = 0, -1
        self.numbers: dict[int, int] = {}
        self.missing: list[int] = []


class ReferenceCache:
    def __init__(self, capacity: int, policy: str) -> None:
        self.rows: Final = CLASSES[policy](capacity)
        self.loading: set[int] = set()
        self.dirty: set[int] = set()
        self.frozen: set[int] = set()
        self._counted: Counter[str] = Counter()
        self._admitted: dict[int, tuple[int, int]] = {}
        self._stamp = 0

    def counters(self) -> CacheCounters:
        return CacheCounters(**{name: self._counted[name] for name in CacheCounters._fields})

    def use(self, keys: list[int]) -> bool:
        if any(key not in self.rows or key in self.loading for key in keys):
            return False
        distinct = list(dict.fromkeys(keys))
        self.rows.begin(len(keys))
        for key in distinct:
            self.rows[key]
        self._counted.update(lookups=len(keys), hits=len(distinct))
        self.rows.settle(distinct)
        return True

    def admit(self, batch: Batch) -> AdmitStatus:
        if batch.stamp < 0:
            self._stamp += 1
            batch.stamp = self._stamp
        before = len(batch.numbers)
        self.rows.begin(len(batch.keys) - batch.consumed)
        status = self._admit(batch)
        self.rows.settle([*batch.numbers][before:])
        return status

    def _admit(self, batch: Batch) -> AdmitStatus:
        for position in range(batch.consumed, len(batch.keys)):
            key = batch.keys[position]
            if key not in batch.numbers:
                if key in self.rows:
                    self.rows[key]
                else:
                    status = self._make_room()
                    if status != AdmitStatus.COMPLETE:
                        return status
                    self.rows[key] = 0
                    self.loading.add(key)
                if key in self.loading:
                    batch.missing.append(position)
                self._counted["misses" if key in self.loading else "hits"] += 1
                self._pin(key)
                self._admitted[key] = batch.stamp, len(batch.numbers)
                batch.numbers[key] = len(batch.numbers)
            batch.consumed += 1
            self._counted["lookups"] += 1
        return AdmitStatus.COMPLETE

    def _make_room(self) -> AdmitStatus:
        if len(self.rows) < self.rows.maxsize:
            return AdmitStatus.COMPLETE
        victim = self.rows.first_unpinned()
        if victim is None:
            return AdmitStatus.ALL_PINNED
        if victim in self.dirty | self.frozen:
            return AdmitStatus.DIRTY_VICTIM
        self.evict(victim)
        return AdmitStatus.COMPLETE

    def release(self, batch: Batch) -> None:
        self.unpin(batch.numbers)
        batch.clear()

    def _pin(self, key: int) -> None:
        self.rows.pins[key] = self.rows.pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.rows.pins[key] -= 1
            if self.rows.pins[key] == 0:
                del self.rows.pins[key]
                if key in self.loading:
                    self._drop(key)

    def _drop(self, key: int) -> None:
        del self.rows[key]
        self.loading.discard(key)

    def evict(self, key: int) -> None:
        assert key not in self.rows.pins, f"key {key} is pinned"
        assert key not in self.dirty | self.frozen, f"key {key} is dirty or frozen"
        self._drop(key)
        self._counted["evictions"] += 1

    def mark_dirty(self, keys: list[int]) -> None:
        assert self.loading.isdisjoint(keys)
        self.frozen.difference_update(keys)
        self.dirty.update(keys)

    def take(self, keys: list[int]) -> list[int]:
        """The dirty ones of these, clean and pinned."""
        taken = [key for key in keys if key in self.dirty]
        self.dirty.difference_update(taken)
        for key in taken:
            self._pin(key)
        return taken

    def dirty_victims(self, count: int, gap: int) -> list[int]:
        found: list[int] = []
        clean = 0
        for key in [key for key in self.rows.eviction_order() if key not in self.rows.pins][:count]:
            if clean >= gap and len(found) >= gap / 8:
                break
            is_unclean = key in self.dirty | self.frozen
            found += [key] * is_unclean
            clean = 0 if is_unclean else clean + 1
        return found

    def by_admission(self) -> list[int]:
        return sorted(self.rows, key=self._admitted.__getitem__)

    def freeze(self) -> None:
        assert not self.frozen
        self.dirty, self.frozen = set(), self.dirty

    def unfreeze(self) -> None:
        self.dirty |= self.frozen
        self.frozen = set()

    def check_integrity(self) -> None:
        assert sorted(self.rows.eviction_order()) == sorted(self.rows)
        assert self.loading | self.dirty | self.frozen | self.rows.pins.keys() <= self.rows.keys()
        assert not self.loading & (self.dirty | self.frozen) | self.dirty & self.frozen
