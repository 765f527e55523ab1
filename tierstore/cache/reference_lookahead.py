"""Lookahead, slow and obviously right: a key's next use is looked for in batch after batch.

The rules are those of lookahead.py, and so are its bounds; no code is shared with it.
"""

from collections.abc import Iterator
from typing import Final

from .reference_pinnable import Pinnable

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
