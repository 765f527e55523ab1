"""One pooled lookup: the ids of some features of one pool, where each bag's result goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours. A lookup is used once: prepared (perhaps
ahead, by the prefetch pipeline), run forward, and, if gradients are wanted, run backward.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from . import direct, kernels, quantized
from .backward import NO_INTS, Bags, Groups
from .cache import FullCache
from .cache.admission import DIRTY, LOADING, RESIDENT
from .errors import ClosedError
from .joined import Joined
from .lease import Lease, Use
from .merging import Merged
from .pool import Pool
from .signals import shielded

if TYPE_CHECKING:
    from .hbm.lookup import HbmLookup

__all__ = ["MODES", "NO_ARG_MAX", "Lookup", "look_up", "new_output"]

MODES: Final = {"sum": kernels.SUM, "mean": kernels.MEAN, "max": kernels.MAX}
NO_ARG_MAX: Final = np.empty((0, 0), np.int32)


def new_output(lookups: "Sequence[Lookup | HbmLookup]", batch: int, columns: int, device: torch.device) -> Tensor:
    """float32 [batch, columns], of such content as the lookups that will fill it ask for."""
    make = torch.zeros if any(lookup.wants_zeros for lookup in lookups) else torch.empty
    return make((batch, columns), dtype=torch.float32, device=device)


def look_up(
    pool: Pool, cache: FullCache, plan: Any, scale: Any, mode: int, columns: Any, out: Any, arg_max: Any, slots: Any
) -> list[int]:
    """Pool rows of a full cache straight from ids (see ``kernels.look_up``); the caller holds ``pool.rows_lock``.

    Args:
        plan: what ``Joined.plan`` gives.

    Returns:
        nothing if all is done; else what the kernel said, and ``out`` may hold anything.
    """
    pool.require_open()
    flags = cache.flags[:0] if cache.is_complete else cache.flags
    ids, *bags = plan
    bad = direct.look_up(
        pool.workers, pool.layout.dim, ids, bags, flags, RESIDENT | LOADING, RESIDENT, scale, mode, pool.weights,
        pool.layout.dim, pool.half, columns, out, arg_max, slots,
    )  # fmt: skip
    if not bad:
        pool.note_hits(int(bags[-1][-1]))
    return bad


class Lookup:
    """A lookup in host memory.

    Where every row has a slot of its own, ids lead to slots at once and no row is ever pinned; else rows are leased.

    Args:
        joined: its ids.
        mode: "sum", "mean" or "max", for all features.

    Attributes:
        joined: its ids.
        mode: as given.
        wants_zeros: ``forward`` adds to what it is given, and so wants zeros.

    Raises:
        ValueError: an id outside its table; names the table and the id.
    """

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.wants_zeros = False
        self.joined = joined
        self.mode = mode
        self._tables = joined.tables
        self._mode = MODES[mode]
        self._lease: Lease | None = None
        self._use: Use | None = None
        self._bag_starts, self._scale = joined.bag_starts, joined.scale
        self._arg_max = NO_ARG_MAX
        self._rows_in: FullCache | None = None
        if self._pool.full is None:
            joined.keys  # noqa: B018 - checks the ids

    @classmethod
    def merged(cls, lookups: "Sequence[Lookup]", widths: Sequence[int]) -> "Lookup":
        """One to ``update`` the rows of several after ``forward``, given their gradients flat, [1, B * C of all].

        Args:
            lookups: of one pool and mode, in the order in which their positions are merged.
            widths: columns of each one's output.
        """
        joined = Merged([lookup.joined for lookup in lookups], widths, lookups[0]._pool.full)
        made = cls(joined, mode=lookups[0].mode)
        if made._mode == kernels.MAX:
            made._arg_max = np.concatenate(joined.winners([lookup._arg_max for lookup in lookups]))
        return made

    @property
    def _pool(self) -> Pool:
        """The tables' pool as it is now: unless rows are pinned, a new table may have replaced it."""
        return self._tables[0].pool

    @property
    def demand(self) -> tuple[Pool, Any]:
        """The pool and the keys, int64 [N], of the rows it will use."""
        return self._pool, self.joined.keys

    @shielded
    def stage(self) -> None:
        """Bring the rows in and keep them pinned until they are used, as far as the pool has room to keep them."""
        pool = self._pool
        if pool.full is not None:
            self._bring_in(pool, pool.full)
            self._use = self._use or Use(pool)
        elif len(self.joined):
            lease = pool.acquire_whole(self.joined.keys, self.joined.order)
            if lease is not None and not self._keep(pool, lease):
                lease.release()

    def release(self) -> None:
        """Unpin whatever is pinned; the lookup still works, it only has to bring its rows in again."""
        for held in (self._lease, self._use):
            if held is not None:
                held.release()
        self._lease = self._use = None

    def _keep(self, pool: Pool, lease: Lease) -> bool:
        if lease.consumed < len(self.joined) or not pool.hold(lease):
            return False
        self._lease = lease
        return True

    def _bring_in(self, pool: Pool, cache: FullCache) -> Any:
        """int32 [N]: the slot of each position, its row in. It stays in: the cache evicts nothing."""
        slots = self.joined.slots(cache)
        if self._rows_in is not cache:
            pool.bring_in(slots)
            self._rows_in = cache
        return slots

    def _parts(self, pool: Pool, *, keep: bool) -> Iterator[tuple[int, Any]]:
        """(first position, int32 slot of each from there on): parts of the batch whose rows are in, in order.

        Slots are numbers of this very pool: whoever uses them reads the arenas of the pool they are of.

        Args:
            keep: leave the rows pinned if they are all in and there is room.
        """
        if pool.full is not None:
            yield 0, self._bring_in(pool, pool.full)
            return
        if self._lease is not None:
            yield 0, self._lease.slots[self._lease.inverse]
            return
        for first, lease in pool.leases(self.joined.keys, self.joined.order):
            yield first, lease.slots[lease.inverse]
            if keep and not lease.held:
                self._keep(pool, lease)

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out`` (float32 [batch, columns], of any content, where the rows are).

        Args:
            keep: a backward is to come: remember arg-maxima, and keep the rows pinned if there is room.
        """
        while True:
            pool: Pool = self._pool
            try:
                self._forward(pool, out.numpy(), keep=keep)
            except ClosedError:
                if pool is self._pool:  # which fails in a closed store; else a new table brought a new pool
                    raise
            else:
                return

    def _forward(self, pool: Pool, pooled: Any, *, keep: bool) -> None:
        if self._mode == kernels.MAX:
            self._arg_max = np.empty((len(self._bag_starts) - 1, pool.layout.dim), np.int32)
        if pool.full is not None:
            with pool.rows_lock:
                is_fused = self._rows_in is not pool.full and not pool.layout.is_quantized
                is_done = is_fused and self._look_up(pool, pool.full, pooled, keep=keep)
            if not is_done:
                slots = self._bring_in(pool, pool.full)
                with pool.rows_lock:
                    self._pool_part(pool, 0, slots, pooled)
            if keep:
                self._use = self._use or Use(pool)
            else:
                self.release()
        elif not len(self.joined):
            self._pool_part(pool, 0, np.empty(0, np.int32), pooled)
        else:
            self._forward_leased(pool, pooled, keep=keep)

    def _look_up(self, pool: Pool, cache: FullCache, out: Any, *, keep: bool) -> bool:
        """Pool rows straight from ids; False, and nothing done, if some row is not in.

        Args:
            keep: note the slots: the caller may change the ids before backward.
        """
        joined = self.joined
        plan = joined.plan(joined.first_slots(cache))
        slots = np.empty(len(joined), np.int32) if keep else NO_INTS
        bad = look_up(pool, cache, plan, self._scale, self._mode, joined.columns, out, self._arg_max, slots)
        joined.check(bad)
        if bad:
            return False
        if keep:
            joined.note_slots(slots, cache)
        self._rows_in = cache
        return True

    def _forward_leased(self, pool: Pool, pooled: Any, *, keep: bool) -> None:
        for first, slots in self._parts(pool, keep=keep):
            with pool.rows_lock:
                self._pool_part(pool, first, slots, pooled)
        if not keep:
            self.release()

    def _pool_part(self, pool: Pool, first: int, slots: Any, out: Any) -> None:
        pool_rows: Any = quantized.pool_rows if pool.layout.is_quantized else kernels.pool_rows

        def work(begin: int, end: int) -> None:
            pool_rows(
                begin, end, first, first + len(slots), self._bag_starts, slots, self._scale, self._mode, pool.weights,
                pool.layout.dim, pool.half, self.joined.columns, self.joined.batch, out, self._arg_max,
            )  # fmt: skip

        pool.workers.run(work, pool.workers.split(self._bag_starts))

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Any) -> None:
        """Gradient of the per-sample weights into ``grad_scale`` (numpy, float32 [ids of the batch]); before
        ``update``."""
        own = np.zeros(len(self.joined), np.float32)
        pool = self._pool
        if not len(own):
            return
        dot_rows: Any = quantized.dot_rows if pool.layout.is_quantized else kernels.dot_rows
        for first, slots in self._parts(pool, keep=False):
            with pool.rows_lock:
                dot_rows(
                    0, len(self._bag_starts) - 1, first, first + len(slots), self._bag_starts, slots, pool.weights,
                    pool.layout.dim, pool.half, self.joined.columns, self.joined.batch, grad_out.numpy(), own,
                )  # fmt: skip
        self.joined.scatter(own, grad_scale)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """Backward and optimizer in one: merge each row's gradients in their fixed order, mark it dirty, update it.

        If a batch is worked off in parts and reading a later part fails, the rows of earlier parts are updated: go
        back to the last commit (open the store again) rather than repeat the step.

        Args:
            grad_out: float32 [batch, columns], C-contiguous.
        """
        pool, joined = self._pool, self.joined
        hyper, seeds = joined.next_hyper(), joined.rounding_seeds()
        if not len(joined):
            self.release()
            return
        codes = np.array([table.config.optimizer.code for table in self._tables], np.int64)
        is_mean = self._mode == kernels.MEAN
        bags = Bags(
            joined.table_bags, joined.bag_starts, joined.columns, joined.batch, self._scale, is_mean, self._arg_max
        )
        groups = Groups(bags, grad_out.shape[1], pool.workers)
        if pool.full is not None:
            self._update_full(pool, pool.full, groups, codes, hyper, seeds, grad_out.numpy())
            self.release()
            return
        inverse, unique_keys = self._unique(pool)
        groups.by_number(inverse, len(unique_keys))
        for first, slots in self._row_parts(pool, unique_keys):
            with pool.lock:
                pool.writeback.begin_update(slots)
                keys = None if seeds is None else unique_keys[first:]
                groups.update(pool, first, slots, codes, hyper, grad_out.numpy(), seeds=seeds, keys=keys)
        self.release()

    def _update_full(
        self, pool: Pool, cache: FullCache, groups: Groups, codes: Any, hyper: Any, seeds: Any, grad_out: Any
    ) -> None:
        slots = self._bring_in(pool, cache)
        with pool.lock:
            pool.require_open()
            row_slots = groups.by_slot(slots, cache)
            flags = cache.flags
            if cache.num_frozen:
                pool.writeback.begin_update(groups.used(row_slots))
                flags = flags[:0]
            keys = None if seeds is None else row_slots + self.joined.shifts(cache)
            newly_dirty = groups.update(
                pool, 0, row_slots, codes, hyper, grad_out, flags=flags, dirty=DIRTY, seeds=seeds, keys=keys
            )
            cache.note_dirty(newly_dirty)

    def _unique(self, pool: Pool) -> tuple[Any, Any]:
        """(inverse, unique keys in order of first use)."""
        if self._lease is not None:
            return self._lease.inverse, pool.cache.keys_of(self._lease.slots)
        keys = self.joined.keys
        unique_keys = np.empty_like(keys)
        inverse = np.empty(len(keys), np.int32)
        scratch = np.full(1 << (2 * len(keys) - 1).bit_length(), -1, np.int32)
        count = kernels.unique_in_order(keys, scratch, unique_keys, inverse)
        return inverse, unique_keys[:count]

    def _row_parts(self, pool: Pool, unique_keys: Any) -> Iterator[tuple[int, Any]]:
        """(first number, int32 slot of each from there on): parts of the rows, pinned. Those used last come first, as
        they are the likeliest to be in still."""
        if self._lease is not None:
            yield 0, self._lease.slots
            return
        for passed, lease in pool.leases(unique_keys[::-1].copy()):
            yield len(unique_keys) - passed - lease.num_unique, lease.slots[::-1].copy()
