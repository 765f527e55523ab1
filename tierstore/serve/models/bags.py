"""Pooled rows of bags that were asked for before, for all tables of a store."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...cache.pooled import PooledCache
from ...store import Store
from ...system.sizes import parse_size
from ..source import PooledStats
from .jagged import Merged

PoolBags = Callable[[Any, Any, Any], NDArray[np.float32]]
"""Pooled rows, float32 [B, columns], of ids int64 [N], offsets int64 [B + 1] and weights float32 [N] or None."""


class BagCaches:
    """A ``PooledCache`` for each width of pooled rows; they share a budget evenly. For one thread, but for ``stats``.

    Args:
        budget_bytes: for all of them, at least 1.
    """

    def __init__(self, store: Store, budget_bytes: int) -> None:
        self._budget_bytes: Final = budget_bytes
        self._caches: dict[int, PooledCache] = {}
        self._before = PooledStats()
        self.renew(store)

    @classmethod
    def of(cls, store: Store, size: int | str) -> "BagCaches | None":
        """Those of a store; None if the size is 0. ValueError if it is none."""
        table_bytes = sum(table.size_bytes for table in store.tables.values())
        budget_bytes = parse_size(size, name="pooled_cache", table_bytes=table_bytes)
        return cls(store, budget_bytes) if budget_bytes else None

    def renew(self, store: Store) -> None:
        """Forget all rows: the store shows another version, maybe with more tables."""
        widths = sorted({table.config.embedding_dim for table in store.tables.values()})
        if widths == list(self._caches):
            for cache in self._caches.values():
                cache.clear()
            return
        self._before = self.stats()._replace(bytes=0)
        share = max(1, self._budget_bytes // max(1, len(widths)))
        self._caches = {width: PooledCache(share, width) for width in widths}

    def pooled(self, table_index: int, columns: int, batch: Merged, pool: PoolBags) -> NDArray[np.float32]:
        """Pooled rows, float32 [B, columns], of a batch's bags: those that are known, and of the others by ``pool``."""
        cache = self._caches[columns]
        split = cache.split(batch.values, batch.offsets, table=table_index, weights=batch.weights)
        if not len(split.hits):
            rows = pool(batch.values, batch.offsets, batch.weights)
            cache.add(split.keys, rows)
            return rows
        rows = np.empty((len(batch.offsets) - 1, columns), np.float32)
        rows[split.hits] = split.rows
        if len(split.misses):
            missed = pool(*_chosen(batch, split.misses))
            cache.add(split.keys, missed)
            rows[split.misses] = missed
        return rows

    def stats(self) -> PooledStats:
        """Running totals, and the bytes of now; in any thread."""
        caches = list(self._caches.values())
        now = [PooledStats(cache.hits, cache.misses, cache.size_bytes) for cache in caches]
        return PooledStats(*map(sum, zip(self._before, *now, strict=True)))


def _chosen(batch: Merged, bags: Any) -> tuple[Any, Any, Any]:
    """Ids, offsets and weights of some of a batch's bags (int64 [M], ascending)."""
    lengths = np.diff(batch.offsets)
    is_chosen = np.zeros(len(lengths), np.bool_)
    is_chosen[bags] = True
    ids = np.repeat(is_chosen, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths[bags])])
    return batch.values[ids], offsets, None if batch.weights is None else batch.weights[ids]
