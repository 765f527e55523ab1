"""One pooled lookup: the ids of some features of one pool, where each bag's result goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import slots as kernels
from ..kernels.arrays import Floats
from ..pool.joined import Joined
from ..pool.pool import Pool
from ..pool.tier import Tier
from ..system.signals import shielded
from .base import AnyLookup, Ready, RowGradients, by_table
from .dynamic_ids import DynamicLookup


class Lookup(AnyLookup):
    """A lookup in the fastest tier of the tables; errors as of ``pool.tier``."""

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.joined, self.tables, self.holds = joined, joined.tables, joined.holds
        self.mode = mode
        self._mode = kernels.MODES[mode]
        self._tier: Tier | None = None  # whose the lease is
        self._lease: Any = None
        self._arg_max: Any = None

    @classmethod
    def merged(cls, lookups: "Sequence[Lookup]", widths: Sequence[int]) -> "Lookup":
        """One lookup whose ``update`` trains the rows of several of one pool and mode after ``forward``, in their
        order, given their gradients flat, [1, B * C of all]; ``widths``: columns of each one's output."""
        joined = Joined.merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode)
        made._arg_max = lookups[0]._arg_max
        if made._mode == kernels.MAX and joined.parts is not None:
            winners = joined.parts.winners([lookup._arg_max for lookup in lookups])
            made._arg_max = (torch.cat if isinstance(winners[0], Tensor) else np.concatenate)(winners)
        return made

    def _enter(self, pool: Pool) -> Tier:
        """The tier. A lease of a pool that was closed is dropped."""
        tier = pool.tier
        if tier is not self._tier:
            if self._lease is not None:
                self.release()
            self._tier = tier
        return tier

    def has_room(self) -> bool:
        found: bool = self.joined.tables[0].in_pool(lambda pool: self._enter(pool).has_room(self.joined))
        return found

    @shielded
    def stage(self) -> bool:
        if len(self.joined):
            self._lease = self.joined.tables[0].in_pool(lambda pool: self._enter(pool).stage(self.joined))
        return self._lease is not None or not len(self.joined)

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        self.joined.tables[0].in_pool(self._forward, out, keep)

    def _forward(self, pool: Pool, out: Tensor, keep: bool) -> None:
        tier = pool.tier
        if self._lease is None:
            self._tier = tier
        elif tier is not self._tier:
            self._enter(pool)
        self._lease, self._arg_max = tier.look_up(self.joined, self._mode, out, self._lease, keep=keep)
        if not keep and self._lease is not None:
            self.release()

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        joined = self.joined
        if len(joined):
            joined.scatter(self._enter(joined.tables[0].pool).dot(joined, grad_out, self._lease), grad_scale)

    @shielded
    def readied(self, grad_out: Tensor) -> Ready:
        joined = self.joined
        if not len(joined):
            self.release()  # the in-flight batch
            return Ready(joined.next_hyper, True)
        pool = joined.tables[0].pool
        if pool.tier is not self._tier:
            self._enter(pool)
        if self._lease is None or pool.tier.on_device:
            self._lease = joined.tables[0].in_pool(lambda pool: self._enter(pool).whole(joined, self._lease))
        return Ready(partial(self.update, grad_out), self._lease is not None)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """Backward and optimizer in one, by the gradient of the output, float32 [batch, columns], C-contiguous."""
        joined, hyper = self.joined, self.joined.next_hyper()
        pool = joined.tables[0].pool
        tier = pool.tier
        if tier is not self._tier:
            self._enter(pool)
        tier.update(joined, self._mode, hyper, grad_out, self._arg_max, self._lease)
        self.release()

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        tier = self._enter(self.joined.tables[0].pool)
        keys, values = tier.gradients(self.joined, self._mode, grad_out, self._arg_max)
        self.release()
        return by_table(self.tables, keys, values)


def make_lookup(joined: Joined, *, mode: str) -> AnyLookup:
    """A pooled lookup in the fastest tier of the tables. ValueError, which names table and id, for an id outside its
    table; where each row has a slot of its own, and in device memory, the lookup raises it."""
    if joined.has_dynamic_ids:
        found: Any = DynamicLookup(joined, mode=mode, make=partial(make_lookup, mode=mode))
        return found  # type: ignore[no-any-return]
    if joined.tables[0].pool.tier.reads_keys:
        joined.keys  # noqa: B018 - reads ids
    return Lookup(joined, mode=mode)
