"""The policies of the slow caches: mappings of bounded size that pass over pinned keys.

The rules and constants are those of the fast caches; no code is shared with them.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Final


class Pinnable(MutableMapping[int, int]):
    """key -> slot; evicts the first key in eviction order that is not in ``pins``.

    Args:
        maxsize: keys.
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self.pins: dict[int, int] = {}
        self.slots: dict[int, int] = {}  # read without counting an access

    def eviction_order(self) -> Iterator[int]:
        """Keys, next victim first."""
        raise NotImplementedError

    def __getitem__(self, key: int) -> int:
        return self.slots[key]

    def __setitem__(self, key: int, slot: int) -> None:
        if key not in self.slots and len(self.slots) == self.maxsize:
            self.popitem()
        self.slots[key] = slot

    def __delitem__(self, key: int) -> None:
        del self.slots[key]

    def __contains__(self, key: object) -> bool:
        return key in self.slots

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def first_unpinned(self) -> int | None:
        return next((key for key in self.eviction_order() if key not in self.pins), None)

    def popitem(self) -> tuple[int, int]:
        key = self.first_unpinned()
        if key is None:
            raise KeyError("every key is pinned")
        slot = self.slots[key]
        del self[key]
        return key, slot

    def begin(self, num_accesses: int) -> None:
        """So many accesses are about to be counted."""

    def settle(self, keys: list[int]) -> None:
        """These keys were accessed by one call."""


class LRU(Pinnable):
    """Least recently used first."""

    def eviction_order(self) -> Iterator[int]:
        return iter(self.slots)

    def __getitem__(self, key: int) -> int:
        slot = self.slots[key] = self.slots.pop(key)
        return slot


MAX_BATCHES: Final = 1024
USES_PER_ROW: Final = 6


class Lookahead(Pinnable):
    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._batches: dict[int, dict[int, None]] = {}
        self._retired: set[int] = set()
        self._number = 0
        self._unknown: dict[int, None] = {}
        self._groups: dict[int, dict[int, None]] = {}

    def eviction_order(self) -> Iterator[int]:
        yield from self._unknown
        for batch in sorted(self._groups, reverse=True):
            yield from self._groups[batch]

    def _file(self, key: int) -> None:
        """Where the key's next announced use puts it, last of its kind."""
        uses = (batch for batch, keys in self._batches.items() if batch not in self._retired and key in keys)
        batch = next(uses, None)
        group = self._unknown if batch is None else self._groups.setdefault(batch, {})
        group[key] = None

    def _remove(self, key: int) -> None:
        for group in (self._unknown, *self._groups.values()):
            group.pop(key, None)

    def __getitem__(self, key: int) -> int:
        if key in self._unknown:
            del self._unknown[key]
            self._unknown[key] = None
        return super().__getitem__(key)

    def __setitem__(self, key: int, slot: int) -> None:
        super().__setitem__(key, slot)
        self._file(key)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self._remove(key)

    def can_announce(self, num_keys: int) -> bool:
        num_uses = sum(len(batch) for batch in self._batches.values())
        return len(self._batches) < MAX_BATCHES - 1 and num_uses + num_keys <= USES_PER_ROW * self.maxsize

    def announce(self, keys: list[int]) -> int:
        if not self.can_announce(len(keys)):
            return 0
        self._number += 1
        self._batches[self._number] = dict.fromkeys(keys)
        for key in self._batches[self._number]:
            if key in self._unknown:
                del self._unknown[key]
                self._file(key)
        return self._number

    def retire(self, batch: int) -> None:
        if batch not in self._batches or batch in self._retired:
            return
        self._retired.add(batch)
        group = self._groups.pop(batch, {})
        for key in self._batches[batch]:
            if key in group:
                self._file(key)
        # Only the oldest make room: what is announced is kept in order.
        while self._batches and next(iter(self._batches)) in self._retired:
            oldest = next(iter(self._batches))
            del self._batches[oldest]
            self._retired.remove(oldest)


LEVELS: Final = 256
HALVING: Final = 4
TICKS_PER_LEVEL: Final = 768
NEWCOMER: Final = 2
HIGHEST: Final = 32
LOWEST: Final = -40
LOWERED_BASE: Final = 96
COUNTERS_PER_ROW: Final = 16
BLOCK: Final = 64
FILED_PER_ACCESS: Final = 4
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


class Aging:
    """Small caches replay a sample of the accesses, each at its own rate; says the mean rate, weighted by hits."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows = min(capacity, SAMPLED_ROWS)
        self._small = [TinyLFU(self._rows, rate) for rate in RATES[::4]]
        self._scores = [0] * len(self._small)
        self._waiting: list[int] = []
        self.rate = RATES[0]

    def observe(self, keys: list[int]) -> None:
        for key in keys:
            salted = mixed(key) * 0x9E3779B97F4A7C15 % WORD // HALF
            if salted * self._capacity // HALF < self._rows:
                self._waiting.append(key)
                if len(self._waiting) == max(1, self._rows // 4):
                    hits = [sum(small.access(each) for each in self._waiting) for small in self._small]
                    self._waiting = []
                    scores = [score + HIT * new - score // 64 for score, new in zip(self._scores, hits, strict=True)]
                    bounds = [max(0, *scores) - HIT * LEAD * (len(scores) - speed) for speed in range(len(scores))]
                    self._scores = [max(each) for each in zip(scores, bounds, strict=True)]
                    self.rate = self._choose()

    def _choose(self) -> int:
        best = max(self._scores)
        if best <= 0:
            return RATES[0]
        weights = [2**40 // 2 ** ((best - score) // (4 * HIT)) for score in self._scores]
        moment = sum(weight * speed for speed, weight in enumerate(weights))
        return RATES[(8 * moment + sum(weights)) // (2 * sum(weights))]


class TinyLFU(Pinnable):
    """See ``Pinnable``; ``settle`` follows each call that accessed keys.

    Args:
        maxsize: keys.
        rate: of a small cache, which keeps it.
    """

    def __init__(self, maxsize: int, rate: int = 0) -> None:
        super().__init__(maxsize)
        self._levels: dict[int, int] = {}
        self._new: set[int] = set()
        self._main: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(LEVELS)]
        self._window: dict[int, None] = {}
        self._sketch = Sketch(maxsize)
        self._base = self._clock = 0
        self._rate = rate
        self._aging = None if rate else Aging(maxsize)

    def eviction_order(self) -> Iterator[int]:
        for level in self._main:
            yield from level
        yield from self._window

    def _raised(self, level: int) -> int:
        above = max(level - self._base, LOWEST)
        more = round(HALVING * math.log2(1 + 2 ** (above / HALVING)))
        return self._base + min(max(more, above + 1), HIGHEST)

    def _place(self, key: int) -> int:
        return max(0, self._levels[key] - NEWCOMER) if key in self._new else self._levels[key]

    def _leave(self, key: int) -> None:
        if key in self._window:
            del self._window[key]
        else:
            del self._main[self._place(key)][key]
            self._new.discard(key)

    def __getitem__(self, key: int) -> int:
        is_in_window = key in self._window
        self._leave(key)
        self._levels[key] = self._raised(self._levels[key])
        into = self._window if is_in_window else self._main[self._levels[key]]
        into[key] = None
        return super().__getitem__(key)

    def __setitem__(self, key: int, slot: int) -> None:
        super().__setitem__(key, slot)
        self._levels[key] = self._raised(self._sketch.level(key))
        self._window[key] = None

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self._leave(key)
        self._sketch.leave(key, self._levels.pop(key))

    def access(self, key: int) -> bool:
        """A single access, settled at once; whether it hit."""
        self.begin(1)
        is_hit = key in self
        if is_hit:
            self[key]
        else:
            self[key] = 0
        self.settle([key])
        return is_hit

    def begin(self, num_accesses: int) -> None:
        for _ in range(FILED_PER_ACCESS * num_accesses):
            if len(self._window) <= max(1, self.maxsize // WINDOW_SHARE):
                break
            oldest = next(iter(self._window))
            if oldest in self.pins:
                break
            del self._window[oldest]
            self._new.add(oldest)
            level = self._main[self._place(oldest)]
            level[oldest] = None
            level.move_to_end(oldest, last=False)

    def settle(self, keys: list[int]) -> None:
        """These keys were accessed by one call."""
        self._clock += len(keys) * (self._aging.rate if self._aging else self._rate)
        period = TICKS_PER_LEVEL * self.maxsize
        self._base += self._clock // period
        self._clock %= period
        if self._base + HIGHEST >= LEVELS:
            self._lower(self._base - LOWERED_BASE)
        if self._aging:
            self._aging.observe(keys)

    def _lower(self, amount: int) -> None:
        self._base -= amount
        self._sketch.lower(amount)
        self._levels = {key: max(0, level - amount) for key, level in self._levels.items()}
        lowered: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(LEVELS)]
        for level, keys in enumerate(self._main):
            lowered[max(0, level - amount)] |= keys
        self._main = lowered


class LFU(Pinnable):
    """Least frequently used first; of several, the one that has been at that count for longest."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._counts: dict[int, int] = {}
        self._levels: defaultdict[int, dict[int, None]] = defaultdict(dict)

    def eviction_order(self) -> Iterator[int]:
        for count in sorted(self._levels):
            yield from self._levels[count]

    def __getitem__(self, key: int) -> int:
        self._enter(key, self._leave(key) + 1)
        return super().__getitem__(key)

    def __setitem__(self, key: int, slot: int) -> None:
        super().__setitem__(key, slot)
        self._enter(key, 1)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self._leave(key)

    def _enter(self, key: int, count: int) -> None:
        self._counts[key] = count
        self._levels[count][key] = None

    def _leave(self, key: int) -> int:
        count = self._counts.pop(key)
        del self._levels[count][key]
        if not self._levels[count]:
            del self._levels[count]
        return count


CLASSES: Final[dict[str, type[Pinnable]]] = {
    "reference-lru": LRU,
    "reference-lfu": LFU,
    "reference-tinylfu": TinyLFU,
    "reference-lookahead": Lookahead,
}
