"""Which rank owns a row."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS
from .load import Traffic
from .ranks import Precision, Ranks
from .table import ShardedTable
from .towers import Towers

Ranks16 = NDArray[np.uint16]


class Wire(NamedTuple):
    """How values cross: rows or pooled rows in forward, gradients in backward."""

    forward: Precision
    backward: Precision


class Owners:
    """Owners of the rows of a store's tables, by key. ``epoch`` counts how often rows got other owners: what goes by
    earlier ones is to be made again."""

    def __init__(self, ranks: Ranks, wire: Wire, towers: Towers | None = None) -> None:
        self.ranks = ranks
        self.wire = wire
        self.towers = towers
        self.epoch = 0
        self._by_part: list[tuple[Int64s, Ranks16]] = []  # keys of shards' first rows, ascending, and their ranks

    @property
    def traffic(self) -> Traffic:
        """Of the ranks' exchanges, those within hosts and between peers included."""
        groups = [self.ranks] if self.towers is None else [self.ranks, self.towers.host, self.towers.peers]
        return Traffic(*map(sum, zip(*(group.traffic for group in groups), strict=True)))

    def close(self) -> None:
        """Leave the groups that were made for the store."""
        if self.towers is not None:
            self.towers.close()
        self.ranks.close()

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
        self._by_part = [(each[:, 0].copy(), each[:, 1].astype(np.uint16)) for each in pairs]

    def of(self, keys: Int64s, num_parts: int) -> Ranks16:
        """uint16 [n, num_parts]: the rank of each range of columns of each key's row."""
        found = np.empty((len(keys), num_parts), np.uint16)
        for part, (firsts, ranks) in enumerate(self._by_part[:num_parts]):
            found[:, part] = ranks[np.searchsorted(firsts, keys, side="right") - 1]
        return found
