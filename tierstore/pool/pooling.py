"""Pooling of rows in slots, split over threads."""

from typing import Any

from .. import kernels
from ..kernels import quantized
from ..kernels.arrays import Int32s
from .arena import Arena
from .residency import Batch, Pooling


def pool_part(arena: Arena, batch: Batch, pooling: Pooling, first: int, slots: Int32s) -> None:
    """Pool the positions from ``first`` on, whose slots are given. The caller holds ``rows_lock``."""
    pool_rows: Any = quantized.pool_rows if arena.layout.is_quantized else kernels.pool_rows

    def work(begin: int, end: int) -> None:
        pool_rows(
            begin, end, first, first + len(slots), batch.bag_starts, slots, batch.scale, pooling.mode, arena.weights,
            arena.layout.dim, arena.half, batch.columns, batch.batch, pooling.out, pooling.arg_max,
        )  # fmt: skip

    arena.workers.share(work, batch.bag_starts)
