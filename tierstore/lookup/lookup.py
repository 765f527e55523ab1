"""One pooled lookup: the ids of some features of one pool, where each bag's result goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours. A lookup is used once: prepared (perhaps
ahead, by the prefetch pipeline), run forward, and, if gradients are wanted, run backward.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from ..kernels import slots as kernels
from ..kernels.arrays import Floats
from ..layout import ROW_MASK
from ..pool import Pool
from ..pool.arena import dot_part
from ..pool.backward import Groups, Update
from ..pool.bags import NO_ARG_MAX, Batch, Pooling
from ..pool.pins import Lease
from ..system.signals import shielded
from .hbm import HbmLookup
from .joined import AnyLookup, Joined, Unjoined
from .tables import Found, LookupTable, Ready, RowGradients, Sought, Use


class Lookup(AnyLookup):
    """A lookup in host memory. Methods that need rows raise ValueError, which names table and id, for an id outside its
    table, unless ids were read before."""

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.joined = joined
        self.mode = mode
        self._mode = kernels.MODES[mode]
        self._lease: Lease | None = None
        self._arg_max = NO_ARG_MAX

    @classmethod
    def merged(cls, lookups: "Sequence[Lookup]", widths: Sequence[int]) -> "Lookup":
        """One lookup whose ``update`` trains the rows of several of one pool and mode after ``forward``, in their
        order, given their gradients flat, [1, B * C of all]; ``widths``: columns of each one's output."""
        joined = Joined.merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode)
        if made._mode == kernels.MAX:
            assert joined.parts is not None
            made._arg_max = np.concatenate(joined.parts.winners([lookup._arg_max for lookup in lookups]))
        return made

    def has_room(self) -> bool:
        return self.joined.tables[0].in_pool(lambda pool: pool.rows.has_room(self._batch_in(pool)))

    @shielded
    def stage(self) -> bool:
        self._lease = self.joined.tables[0].in_pool(lambda pool: pool.rows.stage(self._batch_in(pool)))
        return self._lease is not None or not len(self.joined)

    def _batch_in(self, pool: Pool) -> Batch:
        """The batch as the pool takes it; its ids are read now if they were not."""
        joined, numbering = self.joined, pool.rows.numbering
        return joined.keyed if numbering is None else Batch(joined.bags, joined.slots(numbering))

    def _lease_in(self, pool: Pool) -> Lease | None:
        """What is held of this pool's rows. One of a pool that was closed is dropped."""
        if self._lease is not None and self._lease.keeper is not pool.pins:
            self.release()
        return self._lease

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out`` (float32 [batch, columns], of any content, where the rows are). ``keep``: a
        backward follows, so it remembers arg-maxima, and holds the rows if there is room. ValueError: an id outside
        its table."""
        joined = self.joined
        if self._mode == kernels.MAX:
            self._arg_max = np.empty((len(joined.bags.starts) - 1, joined.tables[0].layout.dim), np.int32)
        pooling = Pooling(self._mode, out.numpy(), self._arg_max)
        joined.tables[0].in_pool(partial(self._look_up, pooling=pooling, keep=keep))
        if not keep and self._lease is not None:
            self.release()

    def _look_up(self, pool: Pool, *, pooling: Pooling, keep: bool) -> None:
        joined, rows = self.joined, pool.rows
        lease = None if self._lease is None else self._lease_in(pool)
        numbering = rows.numbering if rows.takes_ids else None
        if lease is None and numbering is not None and not joined.is_read:
            slots, failed = rows.look_up_ids(joined.ids_of_bags(numbering), joined.bags, pooling, keep=keep)
            if not failed:
                if keep:  # the caller may change the ids before backward
                    joined.note_slots(slots, numbering)
                    self._lease = rows.held(slots)
                return
            joined.check(failed)
        self._lease = rows.look_up(self._batch_in(pool), pooling, lease, keep=keep)

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Gradient of the per-sample weights into ``grad_scale`` (numpy, float32 [ids of the batch]); before
        ``update``."""
        joined, pool = self.joined, self.joined.tables[0].pool
        own = np.zeros(len(joined), np.float32)
        if not len(own):
            return
        for first, part in pool.rows.parts(self._batch_in(pool), self._lease_in(pool)):
            with pool.arena.rows_lock:
                dot_part(pool.arena, joined.bags, grad_out.numpy(), first, part.position_slots, own)
        joined.scatter(own, grad_scale)

    @shielded
    def readied(self, grad_out: Tensor) -> Ready:
        self._lease = self.joined.tables[0].in_pool(self._whole)
        return Ready(partial(self.update, grad_out), self._lease is not None or not len(self.joined))

    def _whole(self, pool: Pool) -> Lease | None:
        lease = self._lease_in(pool)
        return lease or pool.rows.whole(self._batch_in(pool))

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """Backward and optimizer in one, by the gradient of the output, float32 [batch, columns], C-contiguous."""
        joined, pool = self.joined, self.joined.tables[0].pool
        hyper, seeds = np.array(joined.next_hyper(), np.float32), joined.rounding_seeds()
        if len(joined):
            codes = np.array([table.config.optimizer.code for table in joined.tables], np.int64)
            groups = self._groups(grad_out)
            update = Update(groups, codes, hyper, grad_out.numpy(), seeds)
            pool.rows.update(self._batch_in(pool), update, self._lease_in(pool))
        self.release()

    def _groups(self, grad_out: Tensor) -> Groups:
        return self.joined.groups(self._arg_max, grad_out.shape[1], is_mean=self._mode == kernels.MEAN)

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """What ``update`` would apply, of each table; rows stay as they are, and are released."""
        joined, pool = self.joined, self.joined.tables[0].pool
        inverse, keys = joined.distinct
        groups = self._groups(grad_out)
        values = groups.merged(inverse, len(keys), pool.layout.dim, grad_out.numpy())
        self.release()
        counts = groups.counts.tolist()
        rows, parts = (torch.split(torch.from_numpy(each), counts) for each in (keys & ROW_MASK, values))
        return [RowGradients(*each) for each in zip(joined.tables, rows, parts, strict=True)]


def pool_all(lookup: AnyLookup, out: Tensor, *, keep: bool) -> None:
    """``lookup.forward``, with ids that have no row where they count."""
    lookup.forward(out, keep=keep)
    if lookup.joined.unseen is not None:
        lookup.joined.unseen.add(out, lookup.mode)


class DynamicLookup(AnyLookup):
    """Of tables with dynamic ids: which rows a batch has is known when it is looked up, not when it is prepared. It is
    of the ids that have rows, until ``admitted`` makes a lookup of one kind more. Errors as of ``Lookup``."""

    def __init__(self, batch: Unjoined, *, mode: str, make: Callable[[Joined], AnyLookup]) -> None:
        self.mode = mode
        self._batch = batch
        self._make = make

    @cached_property
    def _known(self) -> AnyLookup:
        return self._joined(Use.PREPARE)

    def _joined(self, use: Use) -> AnyLookup:
        def find(sought: Sequence[Sought]) -> Sequence[Found]:
            return [each.table.keys_of(each.ids, use) for each in sought]

        return self._make(self._batch.join(find))

    def admitted(self) -> AnyLookup:
        """A lookup whose ids were admitted, for a forward pass that trains."""
        self.release()
        return self._joined(Use.ADMIT)

    @property
    def joined(self) -> Joined:  # type: ignore[override]
        """Of the ids that have rows."""
        return self._known.joined

    @property
    def tables(self) -> Sequence[LookupTable]:
        return self._batch.features.tables

    def has_room(self) -> bool:
        return self._known.has_room()

    def stage(self) -> bool:
        return self._known.stage()

    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Of the ids that have rows now: since it was prepared, rows may have got other ids."""
        self.release()
        self._known = self._joined(Use.KEEP if keep else Use.READ)
        self._known.forward(out, keep=keep)

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        self._known.scale_gradient(grad_out, grad_scale)

    def readied(self, grad_out: Tensor) -> Ready:
        return self._known.readied(grad_out)

    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        return self._known.gradients(grad_out)

    def release(self) -> None:
        """What is looked up next is looked for again: ids may have got other rows."""
        if "_known" in self.__dict__:
            self.__dict__.pop("_known").release()


def make_lookup(joined: Joined | Unjoined, *, mode: str) -> AnyLookup:
    """A pooled lookup in the fastest tier of the tables. ValueError, which names table and id, for an id outside its
    table; where each row has a slot of its own, and in device memory, the lookup raises it."""
    if isinstance(joined, Unjoined):
        return DynamicLookup(joined, mode=mode, make=partial(make_lookup, mode=mode))
    pool = joined.tables[0].pool
    if pool.tier.on_device:
        return HbmLookup(joined, mode=mode)
    if pool.rows.numbering is None:
        joined.keyed  # noqa: B018 - reads ids
    return Lookup(joined, mode=mode)
