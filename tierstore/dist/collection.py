"""Modules over tables that are sharded over ranks."""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

from ..config import Pooling
from ..lookup.joined import Joined
from ..nn.collection import Collection, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from ..nn.embedding import TieredEmbedding, TieredEmbeddingBag
from ..nn.function import Prepared
from ..nn.module import TieredModule
from ..pool.bags import Features
from ..store import Table
from .ahead import Ahead
from .lookup import RowsLookup, ShardedLookup
from .owners import Owners
from .pooled import PooledLookup
from .ranks import Ranks
from .replicated import ReplicatedLookup
from .store import ShardedStore
from .table import ShardedTable

_NO_LOOKAHEAD: Final = "lookahead= does not serve modules over sharded tables; leave it 0"


class ShardedModule(TieredModule):
    """What all have in common."""

    @property
    def _owners(self) -> Owners:
        owners: Owners = self._store.owners  # type: ignore[attr-defined]
        return owners

    def _prepare(self, *arguments: Any) -> Prepared:
        return self.prepare_by(self._owners.ranks, *arguments)

    def prepare_by(self, ranks: Ranks, *arguments: Any) -> Prepared:
        """``_prepare``; if it fails, ``ranks`` reports it to the others, which begin a lookup."""
        with ranks.telling() if self._tables else contextlib.nullcontext():  # without, nothing is exchanged
            return super()._prepare(*arguments)  # type: ignore[safe-super]

    def _require_one_process(self) -> None:
        pass

    def ahead(self) -> Ahead:
        """Called by ``tierstore.prefetch``. Collective."""
        return Ahead(self, self._owners.ranks.twin())

    def announce(self, features: Any) -> Any:  # noqa: ARG002
        """RuntimeError: rows that other ranks will ask for are not known so far ahead."""
        raise RuntimeError(_NO_LOOKAHEAD)


class ShardedCollection(ShardedModule, Collection):
    """What collections have in common."""

    def __init__(self, store: ShardedStore, *, tables: Sequence[str] | None = None, **options: Any) -> None:
        as_one: Any = store  # it has what a module asks of a store
        super().__init__(as_one, tables=tables, **options)

    def _make_lookup(self, joined: Joined, mode: str) -> ShardedLookup:
        tables: list[Any] = joined.tables
        return self._kind_of(tables[0])(joined, mode=mode, owners=self._owners)

    def _kind_of(self, table: ShardedTable) -> type[ShardedLookup]:
        return _kind_of(table)

    def _alike(self, table: Any) -> Any:
        return (*super()._alike(table), self._kind_of(table), table.num_parts)


def _kind_of(table: ShardedTable, *, of_rows: bool = False) -> type[ShardedLookup]:
    """The lookup in a table's rows: pooled by owners, if they may (``of_rows``: no)."""
    if table.sharding.sharding_type == "data_parallel":
        return ReplicatedLookup
    return PooledLookup if table.sharding.exchange == "pooled" and not of_rows else RowsLookup


class _OneTable:
    """A sharded table as the modules of one table ask of it."""

    jagged = Table.jagged

    def __init__(self, store: ShardedStore, name: str, *, of_rows: bool) -> None:
        self.store: Any = store
        self._table: Any = store[name]
        self.name, self.config, self.layout = name, self._table.config, self._table.layout
        self._kind = _kind_of(self._table, of_rows=of_rows)

    def lookup(self, jagged: Any, *, mode: str) -> ShardedLookup:
        return self._kind(jagged.join(Features.of([self._table], [0]), [0]), mode=mode, owners=self.store.owners)

    def __repr__(self) -> str:
        return repr(self._table)


class ShardedTieredEmbeddingBag(ShardedModule, TieredEmbeddingBag):
    """``TieredEmbeddingBag`` over a table, by name, of a sharded store; as ``ShardedTieredEmbeddingBagCollection``."""

    def __init__(
        self, store: ShardedStore, table: str, *, mode: Pooling | None = None, include_last_offset: bool = False
    ) -> None:
        one: Any = _OneTable(store, table, of_rows=False)
        super().__init__(one, mode=mode, include_last_offset=include_last_offset)


class ShardedTieredEmbedding(ShardedModule, TieredEmbedding):
    """``TieredEmbedding`` over a table, by name, of a sharded store, without ``padding_idx``."""

    def __init__(self, store: ShardedStore, table: str) -> None:
        one: Any = _OneTable(store, table, of_rows=True)
        super().__init__(one)


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
        return _kind_of(table, of_rows=True)
