"""Ids without a row that count as rows of their first values, ``DynamicIds(unseen="init")``."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.arrays import Floats, Int64s
from ..kernels.floats import code_of_dtype
from ..kernels.slots import MODES
from ..pool.arena import RowArrays, dot_part, pool_part
from ..pool.bags import Bags, Pooling
from .tables import LookupTable


class Unseen:
    """Such ids of a lookup. They are pooled among themselves, in order, and joined to what is pooled of rows.

    Args:
        tables: of the lookup. bags: of all its ids.
        positions: int64 [n], ascending, where these are among all. ids: int64 [n]. places: int64 [n], in the batch.
        num_known: int64 [K], how many ids of each bag have rows.
    """

    def __init__(
        self, tables: Sequence[LookupTable], bags: Bags, positions: Int64s, ids: Int64s, places: Int64s, num_known: Any
    ) -> None:
        bag_of = np.searchsorted(bags.starts, positions, side="right") - 1
        own, firsts, counts = np.unique(bag_of, return_index=True, return_counts=True)
        features, samples = np.divmod(own, bags.batch)
        columns = bags.columns[features][:, None] + np.arange(tables[0].layout.dim)
        self._where = torch.from_numpy(samples[:, None]), torch.from_numpy(columns)
        self._known_share = (num_known[own] / (num_known[own] + counts)).astype(np.float32)[:, None]
        self._bags = bags._replace(
            starts=np.append(firsts, len(ids)), columns=np.zeros(1, np.int32), batch=len(own),
            scale=bags.scale[positions[: len(bags.scale)]],
        )  # fmt: skip
        self._ids = np.split(ids, np.searchsorted(bag_of, bags.bounds[1:-1]))
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
        pooling = Pooling(MODES[mode], np.empty(shape, np.float32), np.empty(shape, np.int32))
        pool_part(self._values, self._tables[0].store.workers, self._bags, pooling, 0, self._slots)
        values, share = (torch.from_numpy(each).to(out.device) for each in (pooling.out, self._known_share))
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
        dot_part(self._values, self._bags, gradient[self._where].cpu().numpy(), 0, self._slots, own)
        grad_scale[self._places] += own
