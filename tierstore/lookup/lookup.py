"""One pooled lookup: the ids of some features of one pool, where each bag's result goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours. A lookup is used once: prepared (perhaps
ahead, by the prefetch pipeline), run forward, and, if gradients are wanted, run backward.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import slots as kernels
from ..kernels.arrays import Floats
from ..pool.joined import Joined
from ..pool.pool import Pool
from ..pool.tier import Tier
from ..system.signals import shielded
from .tables import Found, Hold, LookupTable, Ready, RowGradients, Sought, TrainsRows, Use, by_table
from .unseen import Unjoined


class AnyLookup(TrainsRows, Protocol):
    """What modules and backward passes ask of a lookup, wherever its rows are."""

    joined: Joined  # the ids
    mode: str  # how they are pooled

    @property
    def group(self) -> Hashable:
        """Equal of lookups that may be merged."""
        table = self.joined.tables[0]
        return table.store, table.layout, self.mode

    @property
    def tables(self) -> Sequence[LookupTable]:
        return self.joined.tables

    @property
    def holds(self) -> Sequence[Hold]:
        return self.joined.holds

    @abstractmethod
    def has_room(self) -> bool:
        """Whether ``stage`` would bring the rows in."""

    @abstractmethod
    def stage(self) -> bool:
        """Bring the rows in and hold them until used; False, and nothing is held, if the pool has no room."""

    @abstractmethod
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out``."""

    @abstractmethod
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Gradient of the per-sample weights into ``grad_scale``."""


class Lookup(AnyLookup):
    """A lookup in the fastest tier of the tables; errors as of ``pool.tier``."""

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.joined = joined
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
        """Pool every bag into ``out`` (float32 [batch, columns], of any content, where the rows are). ``keep``: a
        backward follows, so it remembers arg-maxima, and holds the rows if there is room."""
        self.joined.tables[0].in_pool(self._forward, out, keep)

    def _forward(self, pool: Pool, out: Tensor, keep: bool) -> None:
        tier = self._enter(pool)
        self._lease, self._arg_max = tier.look_up(self.joined, self._mode, out, self._lease, keep=keep)
        if not keep and self._lease is not None:
            self.release()

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Gradient of the per-sample weights into ``grad_scale`` (numpy, float32 [ids of the batch]); before
        ``update``."""
        joined = self.joined
        if len(joined):
            joined.scatter(self._enter(joined.tables[0].pool).dot(joined, grad_out, self._lease), grad_scale)

    @shielded
    def readied(self, grad_out: Tensor) -> Ready:
        joined = self.joined
        if not len(joined):
            return Ready(partial(self.update, grad_out), True)
        if self._enter(joined.tables[0].pool).on_device or self._lease is None:
            self._lease = joined.tables[0].in_pool(lambda pool: self._enter(pool).whole(joined, self._lease))
        return Ready(partial(self.update, grad_out), self._lease is not None)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """Backward and optimizer in one, by the gradient of the output, float32 [batch, columns], C-contiguous."""
        joined = self.joined
        hyper = joined.next_hyper()
        if len(joined):
            tier = self._enter(joined.tables[0].pool)
            tier.update(joined, self._mode, hyper, grad_out, self._arg_max, self._lease)
        self.release()

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """What ``update`` would apply, of each table; rows stay as they are, and are released."""
        tier = self._enter(self.joined.tables[0].pool)
        keys, values = tier.gradients(self.joined, self._mode, grad_out, self._arg_max)
        self.release()
        return by_table(self.tables, keys, values)


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
    if joined.tables[0].pool.tier.reads_keys:
        joined.keys  # noqa: B018 - reads ids
    return Lookup(joined, mode=mode)
