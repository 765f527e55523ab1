"""The slow and obviously right row cache, of keys in mappings and sets of Python's own: the oracle of the fast ones.

It shares nothing with them but the contract (tierstore/cache/base.py), and has no slots: a row is its key.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from tests.cache.reference_policies import CLASSES
from tierstore.cache.base import AdmitStatus, CacheCounters


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
