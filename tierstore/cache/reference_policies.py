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


LEVELS: Final = 64
COUNTERS_PER_ROW: Final = 16
BLOCK: Final = 64
HALVING_PERIOD: Final = 50
FILED_PER_ACCESS: Final = 4
SAMPLED_ROWS: Final = 256
ROWS_PER_LEAD: Final = 16
RECENCY_LEAD: Final = 4
WINDOW_SHARE: Final = 100
WORD: Final = 2**64
HALF: Final = 2**32


def mixed(key: int) -> int:
    """Mix13, all three steps."""
    x = key % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


class Sketch:
    """What rows had been accessed when they left."""

    def __init__(self, capacity: int) -> None:
        self._num_blocks = math.ceil(COUNTERS_PER_ROW * capacity / BLOCK)
        self._counters: dict[tuple[int, int], int] = {}

    def _places(self, key: int) -> list[tuple[int, int]]:
        """Block and place in it, for both halves of the block."""
        x = mixed(key)
        block = x // HALF * self._num_blocks // HALF
        return [(block, x % 32), (block, 32 + x // 32 % 32)]

    def count(self, key: int) -> int:
        return min(self._counters.get(place, 0) for place in self._places(key))

    def leave(self, key: int, count: int) -> None:
        for place in self._places(key):
            self._counters[place] = max(self._counters.get(place, 0), count)

    def halve(self) -> None:
        self._counters = {place: count // 2 for place, count in self._counters.items()}


class Duel:
    """Two small caches replay a sample of the accesses; says whether frequency did better lately."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sampled_rows = min(capacity, SAMPLED_ROWS)
        self._recency = LRU(self._sampled_rows)
        self._frequency = TinyLFU(self._sampled_rows, is_sample=True)
        self._lead = 0
        self._lead_max = max(1, self._sampled_rows // ROWS_PER_LEAD)
        self._is_narrow = False

    def observe(self, keys: list[int]) -> bool:
        """Whether frequency decides after these accesses."""
        for key in keys:
            salted = mixed(key) * 0x9E3779B97F4A7C15 % WORD // HALF
            if salted * self._capacity // HALF < self._sampled_rows:
                self._lead += (key in self._frequency) - (key in self._recency)
                self._lead = sorted([-RECENCY_LEAD * self._lead_max, self._lead, self._lead_max])[1]
                if self._lead == self._lead_max:
                    self._is_narrow = True
                if self._lead < 0:
                    self._is_narrow = False
                self._frequency.access(key)
                if key in self._recency:
                    self._recency[key]
                else:
                    self._recency[key] = 0
        return self._is_narrow


class TinyLFU(Pinnable):
    """See ``Pinnable``; ``settle`` follows each call that accessed keys.

    Args:
        maxsize: keys.
        is_sample: its window stays narrow.
    """

    def __init__(self, maxsize: int, is_sample: bool = False) -> None:
        super().__init__(maxsize)
        self._counts: dict[int, int] = {}
        self._levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(LEVELS)]
        self._window: dict[int, None] = {}
        self._narrow = max(1, maxsize // WINDOW_SHARE)
        self._limit = self._narrow if is_sample else maxsize
        self._sketch = Sketch(maxsize)
        self._unhalved = 0
        self._duel = None if is_sample else Duel(maxsize)

    def eviction_order(self) -> Iterator[int]:
        for level in self._levels:
            yield from level
        yield from self._window

    def __getitem__(self, key: int) -> int:
        count = min(self._counts[key] + 1, LEVELS - 1)
        if key in self._window:
            del self._window[key]
            self._window[key] = None
        else:
            del self._levels[self._counts[key]][key]
            into = self._window if len(self._window) < self._limit else self._levels[count]
            into[key] = None
        self._counts[key] = count
        return super().__getitem__(key)

    def __setitem__(self, key: int, slot: int) -> None:
        super().__setitem__(key, slot)
        self._counts[key] = min(self._sketch.count(key) + 1, LEVELS - 1)
        self._window[key] = None

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        count = self._counts.pop(key)
        self._sketch.leave(key, count)
        if key in self._window:
            del self._window[key]
        else:
            del self._levels[count][key]

    def access(self, key: int) -> None:
        """A single access, settled at once."""
        self.begin(1)
        if key in self:
            self[key]
        else:
            self[key] = 0
        self.settle([key])

    def begin(self, num_accesses: int) -> None:
        for _ in range(FILED_PER_ACCESS * num_accesses):
            if len(self._window) <= self._limit:
                break
            oldest = next(iter(self._window))
            if oldest in self.pins:
                break
            del self._window[oldest]
            level = self._levels[self._counts[oldest]]
            level[oldest] = None
            level.move_to_end(oldest, last=False)

    def settle(self, keys: list[int]) -> None:
        """These keys were accessed by one call."""
        self._unhalved += len(keys)
        if self._unhalved >= HALVING_PERIOD * self.maxsize:
            self._unhalved = 0
            self._halve()
        if self._duel:
            self._limit = self._narrow if self._duel.observe(keys) else int(self.maxsize)

    def _halve(self) -> None:
        self._sketch.halve()
        self._counts = {key: count // 2 for key, count in self._counts.items()}
        pairs = zip(self._levels[::2], self._levels[1::2], strict=True)
        merged = [lower | upper for lower, upper in pairs]
        self._levels = merged + [OrderedDict() for _ in range(LEVELS - len(merged))]


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
