"""Which rank owns a row."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS
from .ranks import Ranks
from .table import ShardedTable
from .wire import Precision


class Wire(NamedTuple):
    """How values cross: rows or pooled rows in forward, gradients in backward."""

    forward: Precision = "fp32"
    backward: Precision = "fp32"


Ranks16 = NDArray[np.uint16]


class _Firsts(NamedTuple):
    """Shards that have the same of their tables' ranges of columns: the keys of their first rows, ascending; ranks."""

    keys: Int64s
    ranks: Ranks16


class Owners:
    """Owners of the rows of a store's tables, by key.

    Attributes:
        ranks: the group.
        wire: how values cross.
    """

    def __init__(self, ranks: Ranks, wire: Wire) -> None:
        self.ranks = ranks
        self.wire = wire
        self._by_part: list[_Firsts] = []

    def set(self, tables: Iterable[ShardedTable]) -> None:
        """All tables. Of those that all ranks have whole, each rank owns every row."""
        parts: dict[int, list[tuple[int, int]]] = {}
        for table in tables:
            width = table.local.config.embedding_dim
            for shard in table.shards:
                if table.sharding.sharding_type != "data_parallel":
                    first = (table.index << KEY_ROW_BITS) | shard.first_row
                    parts.setdefault(shard.first_column // width, []).append((first, shard.rank))
        pairs = [np.array(sorted(parts[part]), np.int64) for part in sorted(parts)]
        self._by_part = [_Firsts(each[:, 0].copy(), each[:, 1].astype(np.uint16)) for each in pairs]

    def of(self, keys: Int64s, num_parts: int) -> Ranks16:
        """uint16 [n, num_parts]: the rank of each range of columns of each key's row."""
        found = np.empty((len(keys), num_parts), np.uint16)
        for part, firsts in enumerate(self._by_part[:num_parts]):
            found[:, part] = firsts.ranks[np.searchsorted(firsts.keys, keys, side="right") - 1]
        return found
