"""One pooled lookup: the ids of some features of one pool, where each bag's result goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours. A lookup is used once: prepared (perhaps
ahead, by the prefetch pipeline), run forward, and, if gradients are wanted, run backward.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from . import kernels
from .optim.configs import NUM_HYPER
from .optim.kernels import merge_and_update
from .pool import Lease, Pool
from .rows import KEY_ROW_BITS
from .signals import shielded

if TYPE_CHECKING:
    from .table import Table

__all__ = ["MODES", "Jagged", "Joined", "Lookup"]

MODES: Final = {"sum": kernels.SUM, "mean": kernels.MEAN, "max": kernels.MAX}
_NO_FLOATS: Final = np.empty(0, np.float32)
_NO_ARG_MAX: Final = np.empty((0, 0), np.int32)


class Jagged(NamedTuple):
    """Ids of many features, key-major: all bags of feature 0, then all of feature 1, ...

    Attributes:
        ids: int64 or int32 [N].
        offsets: int64 [features * batch + 1].
        batch: bags of each feature.
        scale: float32 [N], per-sample weights, or None.
    """

    ids: Any
    offsets: Any
    batch: int
    scale: Any = None


class Joined:
    """The ids of some features laid end to end as row keys.

    Args:
        tables: the table of each feature; all in one pool.
        features: which feature of ``jagged`` each of them is.
        columns: where each feature's results begin in the output's columns.

    Attributes:
        tables: distinct, in order of first use.
        keys: int64 [N].
        bag_starts: int64 [features * batch + 1], where each bag begins in ``keys``.
        scale: float32 [N], per-sample weights, or empty.
        columns: int32 [features].
        batch: bags of each feature.

    Raises:
        ValueError: an id outside its table; names the table and the id.
    """

    def __init__(self, tables: "Sequence[Table]", jagged: Jagged, features: Any, columns: Any) -> None:
        self.tables = list(dict.fromkeys(tables))
        self.columns = np.asarray(columns, np.int32)
        self.batch = batch = jagged.batch
        offsets = jagged.offsets
        lists = np.lib.stride_tricks.sliding_window_view(offsets, batch + 1)[::batch] if batch else offsets[None, :1]
        lists = np.ascontiguousarray(lists[features] if batch else np.repeat(lists, len(features), 0))
        self._sources = list(zip(lists[:, 0].tolist(), lists[:, -1].tolist(), strict=True))
        self.keys = np.empty(sum(stop - start for start, stop in self._sources), np.int64)
        self.bag_starts = np.empty(len(features) * batch + 1, np.int64)
        bad = kernels.join_keys(
            jagged.ids,
            lists[:, 0].copy(),
            lists[:, -1].copy(),
            np.array([table.index << KEY_ROW_BITS for table in tables], np.int64),
            np.array([table.config.num_embeddings for table in tables], np.int64),
            lists,
            batch,
            self.keys,
            self.bag_starts,
        )
        if bad >= 0:
            owner = next(t for t, (start, stop) in zip(tables, self._sources, strict=True) if start <= bad < stop)
            raise owner.id_error(int(jagged.ids[bad]))
        self.scale = _NO_FLOATS if jagged.scale is None else self._gather(jagged.scale)

    def _gather(self, scale: Any) -> Any:
        return np.concatenate([scale[start:stop] for start, stop in self._sources] or [_NO_FLOATS])

    def scatter(self, values: Any, out: Any) -> None:
        """Add a value of each position to ``out``, float32 [ids of the batch], where its id came from."""
        place = 0
        for start, stop in self._sources:
            out[start:stop] += values[place : place + stop - start]
            place += stop - start

    def next_hyper(self) -> Any:
        """Count one more update of each table: its hyper-parameters, float32 [tables, NUM_HYPER]."""
        hyper = np.zeros((len(self.tables), NUM_HYPER), np.float32)
        for row, table in enumerate(self.tables):
            hyper[row] = table.next_hyper()
        return hyper


class Lookup:
    """A lookup in host memory.

    Args:
        joined: its ids.
        mode: "sum", "mean" or "max", for all features.
    """

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self._joined = joined
        self._tables = joined.tables
        self._mode = MODES[mode]
        self._lease: Lease | None = None
        self._keys, self._bag_starts, self._scale = joined.keys, joined.bag_starts, joined.scale
        self._sample_of = np.tile(np.arange(joined.batch, dtype=np.int32), len(joined.columns))
        self._column_of = np.repeat(joined.columns, joined.batch)
        self._arg_max = _NO_ARG_MAX

    @property
    def _pool(self) -> Pool:
        """The tables' pool as it is now: unless rows are pinned, a new table may have replaced it."""
        return self._tables[0].pool

    @property
    def demand(self) -> tuple[Pool, Any]:
        """The pool and the keys, int64 [N], of the rows it will use."""
        return self._pool, self._keys

    @shielded
    def stage(self) -> None:
        """Bring the rows in and keep them pinned until they are used, as far as the pool has room to keep them."""
        if len(self._keys):
            pool = self._pool
            lease = pool.acquire(self._keys)
            if not self._keep(pool, lease):
                lease.release()

    def release(self) -> None:
        """Unpin whatever is pinned; the lookup still works, it only has to bring its rows in again."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _keep(self, pool: Pool, lease: Lease) -> bool:
        if lease.consumed < len(self._keys) or not pool.hold(lease):
            return False
        self._lease = lease
        return True

    def _leases(self, pool: Pool, keys: Any) -> Iterator[tuple[int, Lease]]:
        """Slots are numbers of this very pool: whoever uses a lease reads the arenas of the pool it is of."""
        if self._lease is not None:
            yield 0, self._lease
        else:
            yield from pool.leases(keys)

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out`` (float32 [batch, columns], zero on entry, where the rows are).

        Args:
            keep: a backward is to come: remember arg-maxima, and keep the rows pinned if there is room.
        """
        pool, pooled = self._pool, out.numpy()
        if self._mode == kernels.MAX:
            self._arg_max = np.full((len(self._sample_of), pool.layout.dim), -1, np.int32)
        for first, lease in self._leases(pool, self._keys):
            with pool.rows_lock:
                self._pool_part(pool, first, lease, pooled)
            if keep and not lease.held:
                self._keep(pool, lease)
        if not keep:
            self.release()

    def _pool_part(self, pool: Pool, first: int, lease: Lease, out: Any) -> None:
        last = first + lease.consumed
        inverse, slots = lease.inverse, lease.slots

        def work(begin: int, end: int) -> None:
            kernels.pool_rows(
                begin, end, first, last, self._bag_starts, inverse, slots, self._scale, self._mode,
                pool.weights, pool.layout.dim, pool.half, self._sample_of, self._column_of, out, self._arg_max,
            )  # fmt: skip

        pool.workers.run(work, pool.workers.split(self._bag_starts))

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Any) -> None:
        """Gradient of the per-sample weights into ``grad_scale`` (numpy, float32 [ids of the batch]); before
        ``update``."""
        own = np.zeros(len(self._keys), np.float32)
        pool = self._pool
        for first, lease in self._leases(pool, self._keys):
            with pool.rows_lock:
                kernels.dot_rows(
                    0, len(self._sample_of), first, first + lease.consumed, self._bag_starts, lease.inverse,
                    lease.slots, pool.weights, pool.layout.dim, pool.half, self._sample_of, self._column_of,
                    grad_out.numpy(), own,
                )  # fmt: skip
        self._joined.scatter(own, grad_scale)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """Backward and optimizer in one: merge each row's gradients in their fixed order, mark it dirty, update it.

        If a batch is worked off in parts and reading a later part fails, the rows of earlier parts are updated: go
        back to the last commit (open the store again) rather than repeat the step.

        Args:
            grad_out: float32 [batch, columns], C-contiguous.
        """
        pool = self._pool
        hyper = self._joined.next_hyper()
        if not len(self._keys):
            return
        inverse, unique_keys = self._unique(pool)
        groups = _Groups(inverse, len(unique_keys), self._bag_starts)
        ordinal = {table.index: row for row, table in enumerate(self._tables)}
        indices, places = np.unique(unique_keys >> KEY_ROW_BITS, return_inverse=True)
        table_of = np.array([ordinal[int(index)] for index in indices], np.int32)[places]
        codes = np.array([table.config.optimizer.code for table in self._tables], np.int64)
        scale = self._backward_scale()
        for first, lease in self._leases(pool, unique_keys):
            self._update_part(pool, first, lease.slots, groups, scale, table_of, codes, hyper, grad_out.numpy())
        self.release()

    def _unique(self, pool: Pool) -> tuple[Any, Any]:
        """(inverse, unique keys in order of first use)."""
        if self._lease is not None:
            return self._lease.inverse, pool.cache.keys_of(self._lease.slots)
        unique_keys = np.empty_like(self._keys)
        inverse = np.empty(len(self._keys), np.int32)
        scratch = np.full(1 << (2 * len(self._keys) - 1).bit_length(), -1, np.int32)
        count = kernels.unique_in_order(self._keys, scratch, unique_keys, inverse)
        return inverse, unique_keys[:count]

    def _backward_scale(self) -> Any:
        if self._mode != kernels.MEAN:
            return self._scale
        counts = np.diff(self._bag_starts)
        return np.repeat((np.float32(1) / np.maximum(counts, 1).astype(np.float32)), counts)

    def _update_part(
        self, pool: Pool, first: int, slots: Any, groups: "_Groups", scale: Any, table_of: Any, codes: Any,
        hyper: Any, grad_out: Any,
    ) -> None:  # fmt: skip
        def work(begin: int, end: int) -> None:
            merge_and_update(
                first + begin, first + end, slots, first, groups.starts, groups.order, groups.bag_of, scale,
                self._arg_max, self._sample_of, self._column_of, grad_out, table_of, codes, hyper,
                pool.weights, pool.state, pool.layout.dim, pool.half,
            )  # fmt: skip

        with pool.lock:
            pool.writeback.begin_update(slots)
            pool.workers.run(work, pool.workers.split(groups.starts[first : first + len(slots) + 1]))


class _Groups:
    """Positions by unique row; see ``kernels.group_positions``."""

    def __init__(self, inverse: Any, num_unique: int, bag_starts: Any) -> None:
        self.starts = np.empty(num_unique + 1, np.int64)
        self.order = np.empty(len(inverse), np.int32)
        self.bag_of = np.empty(len(inverse), np.int32)
        kernels.group_positions(inverse, num_unique, bag_starts, self.starts, self.order, self.bag_of)
