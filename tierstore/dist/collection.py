"""Many features in one call, their tables sharded over ranks."""

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from ..errors import TableError
from ..lookup.joined import Joined
from ..nn.collection import Collection, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from ..nn.function import Prepared
from .lookup import ShardedLookup
from .store import ShardedStore

_NO_PREFETCH: Final = "prefetch does not serve modules over sharded tables yet; give batches to forward as they come"
_NO_OPTIMIZER: Final = "store.local.optimizer() does not serve sharded tables: backward updates rows; leave it out"


class ShardedCollection(Collection):
    """What both have in common."""

    def __init__(self, store: ShardedStore, *, tables: Sequence[str] | None = None) -> None:
        super().__init__(store.local, tables=tables)
        self._owners = store.owners
        for table in self.tables:
            if table.name not in store.shardings:
                raise TableError(f"table {table.name!r} is not sharded yet: all ranks must give it to create_table")

    def _make_lookup(self, joined: Joined, mode: str) -> ShardedLookup:
        return ShardedLookup(joined, mode=mode, owners=self._owners)

    def _prepare(self, features: Any) -> Prepared:
        try:
            if self.store.optimizer_in_use is not None:
                raise RuntimeError(_NO_OPTIMIZER)
            return super()._prepare(features)  # type: ignore[safe-super]
        except BaseException:
            if self._features:  # else the others exchange nothing
                self._owners.ranks.counts(None)
            raise

    def _require_one_process(self) -> None:
        pass

    def prepare(self, features: Any) -> NoReturn:  # noqa: ARG002
        """RuntimeError: ranks must exchange ids in one order, and prefetch's thread has another."""
        raise RuntimeError(_NO_PREFETCH)

    def announce(self, features: Any) -> NoReturn:  # noqa: ARG002
        """As ``prepare``."""
        raise RuntimeError(_NO_PREFETCH)


class ShardedTieredEmbeddingBagCollection(ShardedCollection, TieredEmbeddingBagCollection):
    """``TieredEmbeddingBagCollection`` over a sharded store; forward and backward are collective.

    Each rank gives its own part of a global batch, and gets its results. Gradients of a row are divided by the number
    of ranks and summed in order of the ranks, as ``DistributedDataParallel`` averages the rest of a model: where a
    rank's loss is the mean over its samples, rows are trained by the mean over all.
    """


class ShardedTieredEmbeddingCollection(ShardedCollection, TieredEmbeddingCollection):
    """``TieredEmbeddingCollection`` over a sharded store, as ``ShardedTieredEmbeddingBagCollection``."""
