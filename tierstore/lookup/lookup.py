"""One pooled lookup: the ids of some features of one pool, where each bag's result goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours. Ids on a device are joined there. Of dynamic ids
those are looked up that have rows, and those without that count as first values, ``DynamicIds(unseen="init")``.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..hbm.base import POSITIONS_MAX, DeviceRows, rows_of
from ..hbm.kernel_types import DeviceIds
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int64s
from ..kernels.floats import code_of_dtype
from ..layout import ROW_MASK
from ..pool.joined import NO_FLOATS, Bags, Features, Jagged, Joined
from ..pool.leases import RowArrays
from ..pool.pool import Pool
from ..pool.tier import Tier
from ..system.signals import shielded
from .base import AnyLookup, Found, Ready, RowGradients, Use, by_table
from .finite import check_gradient, check_rows


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
        if joined.tables[0].store.check_finite:
            check_gradient(self, grad_out)
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
        if joined.tables[0].store.check_finite:
            check_rows(joined)
        self.release()

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        tier = self._enter(self.joined.tables[0].pool)
        keys, values = tier.gradients(self.joined, self._mode, grad_out, self._arg_max)
        self.release()
        return by_table(self.tables, keys, values)


# Ids on a device


class DeviceJagged:
    """A ``Jagged`` whose tensors are on a device. ``to_host`` copies them, checked, and waits; ``offsets_error``: the
    error for a wrong offset, given its index."""

    def __init__(
        self, given: DeviceIds, num_bags: int, to_host: Callable[[], Jagged], offsets_error: Callable[[int], ValueError]
    ) -> None:
        self.given = given
        self.batch = self._num_bags = num_bags
        self.offsets_error = offsets_error
        self._to_host = to_host

    def of(self, batch: int) -> "DeviceJagged":
        self.batch = batch
        return self

    @cached_property
    def on_host(self) -> Jagged:
        """A copy; waits for the device."""
        return self._to_host()._replace(batch=self.batch)

    def join(self, features: Features, places: Sequence[int]) -> Joined:
        """As ``Jagged.join``: on the device, if these are all features, in order, of tables without dynamic ids."""
        is_all = self.batch > 0 and list(places) == list(range(self._num_bags // self.batch))
        if features.has_dynamic_ids or not (is_all and 0 < len(self.given.ids) <= POSITIONS_MAX):
            return self.on_host.join(features, places)
        in_pool: Any = features.tables[0].in_pool
        made: Joined = in_pool(lambda pool: _JoinedThere(features, self, rows_of(pool)))
        return made


class _JoinedThere(Joined):
    """Ids of all features of a batch, joined and checked on the device. What the host has of them otherwise it fetches
    when it is first asked for: that waits for the device, and raises ValueError for a wrong id or offset."""

    _places = _read_rows = None

    def __init__(self, features: Features, jagged: DeviceJagged, rows: DeviceRows) -> None:
        self.features, self.tables, self.batch = features, features.tables, jagged.batch
        self.columns, self.tier = features.columns, rows
        rows.begin()

        def explain(record: Int64s) -> ValueError:
            if record[-1]:
                return jagged.offsets_error(int(record[-1]) - 1)
            feature = int(np.flatnonzero(record)[0])
            error: ValueError = features.tables[features.table_of[feature]].id_error(int(record[feature]))
            return error

        self.sent = rows.join(features, self.batch, jagged.given, explain)

    def __len__(self) -> int:
        return len(self.sent)

    def __getattr__(self, name: str) -> Any:
        """What ``Joined.__init__`` sets."""
        if name not in ("starts", "scale", "_ids", "_keys", "_slots", "_numbering"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows, sent = self.tier, self.sent
        rows.require_right(sent)
        keys = rows.position_keys(sent)
        rows.streams.follow(sent.ready)
        starts = sent.bags.bag_starts.cpu().numpy().astype(np.int64)
        scale = NO_FLOATS if sent.bags.scale is None else sent.bags.scale.cpu().numpy()
        ends = starts[:: self.batch]
        super().__init__(
            self.features, self.batch, starts, scale, ids=(keys & ROW_MASK, ends[:-1], ends[1:]), keys=keys
        )
        return getattr(self, name)


# Dynamic ids


class Sought(NamedTuple):
    """Ids of a batch in one table with dynamic ids, feature after feature."""

    table: Any  # a ``LookupTable``
    ids: Int64s  # int64 [n]
    ends: Int64s  # int64 [features], where each feature's end


Find = Callable[[Sequence[Sought]], Sequence[Found]]  # finds the rows of each table's ids


def with_rows(joined: Joined, find: Find) -> Joined:
    """What of it has rows by ``find``. Other ids are left out of their bags; if they count, they are in ``unseen``."""
    given, begins, ends = joined._ids
    places = np.concatenate([np.arange(*each) for each in zip(begins.tolist(), ends.tolist(), strict=True)])
    ids = given[places].astype(np.int64, copy=False)
    features, begins = joined.features, joined.starts[np.arange(len(joined.columns) + 1) * joined.batch]
    bounds = [begins[low : high + 1] for low, high in itertools.pairwise(features.bounds.tolist())]
    parts = zip(joined.tables, bounds, strict=True)
    found = find([Sought(table, ids[own[0] : own[-1]], own[1:] - own[0]) for table, own in parts])
    keys = np.concatenate([each.keys for each in found])
    starts, scale, has_row, unseen = joined.starts, joined.scale, keys >= 0, None
    if not has_row.all():
        starts = np.append(0, np.cumsum(has_row))[starts]
        count = np.repeat([table.config.counts_unseen for table in joined.tables], [len(each.keys) for each in found])
        if len(lost := np.flatnonzero(count & ~has_row)):
            unseen = Unseen(joined, lost, ids[lost], places[lost], np.diff(starts))
        keys, places, scale = keys[has_row], places[has_row], scale[has_row[: len(scale)]]
    made = Joined(features, joined.batch, starts, scale, keys=keys, places=places)
    made.holds = [each.hold for each in found if each.hold is not None]
    made.unseen, made.dynamic_ids = unseen, (ids, has_row)
    return made


class Unseen:
    """Such ids of a lookup. They are pooled among themselves, in order, and joined to what is pooled of rows.

    Args:
        joined: all ids of the lookup.
        positions: int64 [n], ascending, where these are among all. ids: int64 [n]. places: int64 [n], in the batch.
        num_known: int64 [K], how many ids of each bag have rows.
    """

    def __init__(self, joined: Joined, positions: Int64s, ids: Int64s, places: Int64s, num_known: Any) -> None:
        tables: Sequence[Any] = joined.tables
        bag_of = np.searchsorted(joined.starts, positions, side="right") - 1
        own, firsts, counts = np.unique(bag_of, return_index=True, return_counts=True)
        features, samples = np.divmod(own, joined.batch)
        columns = joined.columns[features][:, None] + np.arange(tables[0].layout.dim)
        self._where = torch.from_numpy(samples[:, None]), torch.from_numpy(columns)
        self._known_share = (num_known[own] / (num_known[own] + counts)).astype(np.float32)[:, None]
        scale = joined.scale[positions[: len(joined.scale)]]
        self._bags = Bags(np.append(firsts, len(ids)), np.zeros(1, np.int32), len(own), scale)
        self._ids = np.split(ids, np.searchsorted(bag_of, joined.bounds[1:-1]))
        self._tables, self._places, self._slots = tables, places, np.arange(len(ids), dtype=np.int32)
        self._kept: Tensor | None = None

    @cached_property
    def _values(self) -> RowArrays:
        layout = self._tables[0].layout
        words = [table.config.init.rows(ids, layout) for table, ids in zip(self._tables, self._ids, strict=True)]
        weights: Any = np.concatenate(words).view(layout.numpy_dtype)
        return RowArrays(layout, code_of_dtype(layout.dtype), weights, np.empty((len(weights), 0), np.float32))

    def add(self, out: Tensor, mode: str) -> None:
        """Join them to ``out``, float32 [batch, columns], which has the rows. Of equal maxima the row's is kept."""
        shape = self._where[1].shape
        pooled, arg_max = np.empty(shape, np.float32), np.empty(shape, np.int32)
        workers = self._tables[0].store.workers
        self._values.pool(workers, self._bags, kernels.MODES[mode], pooled, arg_max, 0, self._slots)
        values, share = (torch.from_numpy(each).to(out.device) for each in (pooled, self._known_share))
        known = out[self._where]
        if mode == "sum":
            out[self._where] = known + values
        elif mode == "mean":
            self._kept = share
            out[self._where] = known * share + values * (1 - share)
        else:
            self._kept = (share > 0) & ~(values > known)
            out[self._where] = torch.where(self._kept, known, values)

    def of_rows(self, gradient: Tensor) -> Tensor:
        """The gradient of what ``add`` was given, of that of what it made, float32 [batch, columns]."""
        kept = self._kept
        return gradient if kept is None else gradient.index_put(self._where, gradient[self._where] * kept)

    def scale_gradient(self, gradient: Tensor, grad_scale: Floats) -> None:
        """Add the gradient of their weights to ``grad_scale``, float32 [ids of the batch]."""
        own = np.zeros(len(self._slots), np.float32)
        self._values.dot(self._bags, gradient[self._where].cpu().numpy(), 0, self._slots, own)
        grad_scale[self._places] += own


class DynamicLookup:
    """Which rows a batch has is known when it is looked up, not when it is prepared. Until ``admitted`` makes a lookup
    of one kind more, it is of the ids that have rows. All that it lacks of ``AnyLookup`` is of the lookup of these."""

    def __init__(self, batch: Joined, *, mode: str, make: Callable[[Joined], AnyLookup]) -> None:
        self.mode = mode
        self.tables: Any = batch.tables
        self._batch, self._make = batch, make
        self._known: AnyLookup | None = None

    def __getattr__(self, name: str) -> Any:
        if self._known is None:
            self._known = self._joined(Use.PREPARE)
        return getattr(self._known, name)

    def _joined(self, use: Use) -> AnyLookup:
        def find(sought: Sequence[Sought]) -> Sequence[Found]:
            return [each.table.keys_of(each.ids, use) for each in sought]

        return self._make(with_rows(self._batch, find))

    def admitted(self) -> AnyLookup:
        """A lookup whose ids were admitted, for a forward pass that trains."""
        self.release()
        return self._joined(Use.ADMIT)

    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Of the ids that have rows now: since it was prepared, rows may have got other ids."""
        self.release()
        self._known = self._joined(Use.KEEP if keep else Use.READ)
        self._known.forward(out, keep=keep)

    def release(self) -> None:
        """What is looked up next is looked for again: ids may have got other rows."""
        known, self._known = self._known, None
        if known is not None:
            known.release()


def make_lookup(joined: Joined, *, mode: str) -> AnyLookup:
    """A pooled lookup in the fastest tier of the tables. ValueError, which names table and id, for an id outside its
    table; where each row has a slot of its own, and in device memory, the lookup raises it."""
    if joined.has_dynamic_ids:
        found: Any = DynamicLookup(joined, mode=mode, make=partial(make_lookup, mode=mode))
        return found  # type: ignore[no-any-return]
    if joined.tables[0].pool.tier.reads_keys:
        joined.keys  # noqa: B018 - reads ids
    return Lookup(joined, mode=mode)
