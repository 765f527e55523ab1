"""Pooling of rows in slots, split over threads."""

from typing import Any

from .. import kernels
from ..kernels import quantized
from ..kernels.arrays import Floats, Int32s
from ..kernels.threads import Workers
from .arena import Rows
from .residency import Batch, Pooling


def pool_part(rows: Rows, workers: Workers, batch: Batch, pooling: Pooling, first: int, slots: Int32s) -> None:
    """Pool the positions from ``first`` on, whose slots are given. The caller holds the lock over the rows, if any."""
    pool_rows: Any = quantized.pool_rows if rows.layout.is_quantized else kernels.pool_rows

    def work(begin: int, end: int) -> None:
        pool_rows(
            begin, end, first, first + len(slots), batch.bag_starts, slots, batch.scale, pooling.mode, rows.weights,
            rows.layout.dim, rows.half, batch.columns, batch.batch, pooling.out, pooling.arg_max,
        )  # fmt: skip

    workers.share(work, batch.bag_starts)


def dot_part(rows: Rows, batch: Batch, grad_out: Floats, first: int, slots: Int32s, grad_scale: Floats) -> None:
    """Gradients of the weights of the positions from ``first`` on, added to ``grad_scale``, float32 [N]; see
    ``pool_part``.

    Args:
        grad_out: float32 [batch, columns].
    """
    dot_rows: Any = quantized.dot_rows if rows.layout.is_quantized else kernels.dot_rows
    dot_rows(
        0, len(batch.bag_starts) - 1, first, first + len(slots), batch.bag_starts, slots, rows.weights, rows.layout.dim,
        rows.half, batch.columns, batch.batch, grad_out, grad_scale,
    )  # fmt: skip
