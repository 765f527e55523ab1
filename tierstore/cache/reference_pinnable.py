"""What the slow caches share: a mapping of bounded size that passes over pinned keys, and the simplest order."""

from collections.abc import Iterator, MutableMapping


class Pinnable(MutableMapping[int, int]):
    """key -> slot; evicts the first key in eviction order that is not in ``pins``.

    Args:
        maxsize: keys.
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self.pins: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        """Read without counting an access."""

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
