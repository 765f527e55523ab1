"""What the slow caches share: a cachetools cache that passes over pinned keys."""

from collections.abc import Iterator

import cachetools


class Pinnable(cachetools.Cache[int, int]):
    """key -> slot; evicts the first key in eviction order that is not in ``pins``.

    Args:
        maxsize: keys.
    """

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self.pins: dict[int, int] = {}

    def eviction_order(self) -> Iterator[int]:
        """Keys, next victim first."""
        raise NotImplementedError

    def first_unpinned(self) -> int | None:
        return next((key for key in self.eviction_order() if key not in self.pins), None)

    def popitem(self) -> tuple[int, int]:
        key = self.first_unpinned()
        if key is None:
            raise KeyError("every key is pinned")
        slot = cachetools.Cache.__getitem__(self, key)
        del self[key]
        return key, slot

    def begin(self, num_accesses: int) -> None:
        """So many accesses are about to be counted."""

    def settle(self, keys: list[int]) -> None:
        """These keys were accessed by one call."""
