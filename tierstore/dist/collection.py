"""Many features in one call, their tables sharded over ranks."""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

from ..lookup.joined import Joined
from ..nn.collection import Collection, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from ..nn.function import Prepared
from .ahead import Ahead
from .lookup import RowsLookup, ShardedLookup
from .pooled import PooledLookup
from .ranks import Ranks
from .replicated import ReplicatedLookup
from .store import ShardedStore
from .table import ShardedTable

_NO_LOOKAHEAD: Final = "lookahead= does not serve modules over sharded tables; leave it 0"


class ShardedCollection(Collection):
    """What both have in common."""

    def __init__(self, store: ShardedStore, *, tables: Sequence[str] | None = None, **options: Any) -> None:
        as_one: Any = store  # it has what a module asks of a store
        super().__init__(as_one, tables=tables, **options)
        self._owners = store.owners

    def _make_lookup(self, joined: Joined, mode: str) -> ShardedLookup:
        tables: list[Any] = joined.tables
        return self._kind_of(tables[0])(joined, mode=mode, owners=self._owners)

    def _kind_of(self, table: ShardedTable) -> type[ShardedLookup]:
        if table.sharding.sharding_type == "data_parallel":
            return ReplicatedLookup
        return PooledLookup if table.sharding.exchange == "pooled" else RowsLookup

    def _alike(self, table: Any) -> Any:
        return (*super()._alike(table), self._kind_of(table), table.num_parts)

    def _prepare(self, features: Any) -> Prepared:
        return self.prepare_by(self._owners.ranks, features)

    def prepare_by(self, ranks: Ranks, features: Any) -> Prepared:
        """``_prepare``; if it fails the others, which begin a lookup, are told by ``ranks``."""
        with ranks.telling() if self._features else contextlib.nullcontext():  # without, nothing is exchanged
            return super()._prepare(features)  # type: ignore[safe-super]

    def _require_one_process(self) -> None:
        pass

    def ahead(self) -> Ahead:
        """Called by ``tierstore.prefetch``. Collective."""
        return Ahead(self, self._owners.ranks.twin())

    def announce(self, features: Any) -> Any:  # noqa: ARG002
        """RuntimeError: rows that other ranks will ask for are not known so far ahead."""
        raise RuntimeError(_NO_LOOKAHEAD)


class ShardedTieredEmbeddingBagCollection(ShardedCollection, TieredEmbeddingBagCollection):
    """``TieredEmbeddingBagCollection`` over a sharded store; forward and backward are collective.

    Each rank gives its own part of a global batch, and gets its results. Gradients of a row are divided by the number
    of ranks and summed in order of the ranks, as ``DistributedDataParallel`` averages the rest of a model: where a
    rank's loss is the mean over its samples, rows are trained by the mean over all.
    """


class ShardedTieredEmbeddingCollection(ShardedCollection, TieredEmbeddingCollection):
    """``TieredEmbeddingCollection`` over a sharded store, as ``ShardedTieredEmbeddingBagCollection``. A table's
    ``exchange`` plays no part."""

    def _kind_of(self, table: ShardedTable) -> type[ShardedLookup]:
        kind = super()._kind_of(table)
        return RowsLookup if kind is PooledLookup else kind
