"""What the owners of a table's ids decide together when a batch is admitted: here for one, who has all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..kernels.arrays import Bools, Int64s, Words


class Peers:
    """Of one owner. All owners make the same calls in the same order."""

    def excess(self, part: int, count: int, capacity: int) -> int:  # noqa: ARG002 - it is exact
        """By how many ids, which have rows (part 0) or are candidates (1) here or are to be, ``count`` of all owners is
        above the capacity; at most 0 if it is not."""
        return self.total(count) - capacity

    def total(self, count: int) -> int:
        """The sum over all owners."""
        return count

    def lowest(self, items: Int64s, words: Callable[[Int64s], Sequence[Any]], count: int) -> Bools:
        """bool [n]: which items of this owner, distinct, are among the ``count`` lowest of all owners.

        Args:
            words: of each of some items, unsigned, compared by the first, then the second, and so on.
        """
        found = np.full(len(items), len(items) <= count)
        if not found.all():
            found[np.lexsort(words(items)[::-1])[:count]] = True
        return found

    def positions(self, count: int) -> Words:
        """uint64 [count]: where the ids of the batch that this owner was given are in the batch of all."""
        return np.arange(count, dtype=np.uint64)
