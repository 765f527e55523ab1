"""Lookups in tables with dynamic ids: of a batch's ids that have rows, and of those without a row that count as rows of
their first values, ``DynamicIds(unseen="init")``."""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.arrays import Floats, Int64s
from ..kernels.floats import code_of_dtype
from ..kernels.slots import MODES
from ..pool.joined import Bags, Joined
from ..pool.leases import RowArrays
from .base import AnyLookup, Found, Use


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
    made.unseen = unseen
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
        self._values.pool(workers, self._bags, MODES[mode], pooled, arg_max, 0, self._slots)
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
        return getattr(self._found(), name)

    def _found(self) -> AnyLookup:
        if self._known is None:
            self._known = self._joined(Use.PREPARE)
        return self._known

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
