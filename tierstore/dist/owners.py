"""Which rank owns a row."""

from collections.abc import Mapping

import numpy as np

from ..kernels.arrays import Int64s
from ..rows import KEY_ROW_BITS
from ..store import Table
from .plan import Sharding
from .ranks import Ranks


class Owners:
    """Owners of the rows of a store's tables, by key.

    Attributes:
        ranks: the group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._firsts = self._owner_of = np.empty(0, np.int64)

    def set(self, shardings: Mapping[Table, Sharding]) -> None:
        """All tables, and how each is sharded."""
        shards = sorted(
            ((table.index << KEY_ROW_BITS) | shard.first_row, shard.rank)
            for table, sharding in shardings.items()
            for shard in sharding.shards(table.config.num_embeddings, table.config.embedding_dim)
        )
        self._firsts, self._owner_of = np.array(shards, np.int64).reshape(-1, 2).T.copy()

    def of(self, keys: Int64s) -> Int64s:
        """int64 [n], the rank of each key."""
        found: Int64s = self._owner_of[np.searchsorted(self._firsts, keys, side="right") - 1]
        return found
