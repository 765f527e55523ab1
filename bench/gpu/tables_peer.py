"""A plain peer of the tier's kernels, written for this benchmark in CUDA C++ (``tables.cu``), compiled when it runs."""

from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from .rig import Action, Rig

__all__ = ["SOURCE", "TablesPeer", "source_for", "tables_missing"]

SOURCE: Final = Path(__file__).with_name("tables.cu")
_KERNELS: Final = ("forward", "backward", "finish")
_THREADS: Final = 256
_WARP: Final = 32
_SEGMENT: Final = 256
"""As in the source."""
_WIDTHS: Final = (4, 8, 16, 32, 64, 128)


def source_for(dim: int) -> str:
    """The source for rows of one width."""
    if dim not in _WIDTHS:
        raise ValueError(f"tables.cu has rows of {_WIDTHS} floats, not of {dim}")
    return f"#define DIM {dim}\n{SOURCE.read_text()}"


def _compiled(dim: int) -> dict[str, Any]:
    """Its kernels, by torch's run-time compiler."""
    # No header is needed, and torch looks for the toolkit's only to fail where there is none.
    with mock.patch("torch.utils.cpp_extension.include_paths", return_value=[]):
        compile_kernel: Any = torch.cuda._compile_kernel
        return {name: compile_kernel(source_for(dim), name) for name in _KERNELS}


def tables_missing(rig: Rig) -> str:
    """Why this peer cannot be measured on this device, or "": found out by a small lookup and its update."""
    if not rig.is_cuda:
        return "there is no CUDA device"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} has no run-time compiler"
    # Whatever is wrong with it, the rest is measured.
    try:
        _check(rig)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _check(rig: Rig) -> None:
    """RuntimeError unless one row asked for 1,000 times, and 1,000 asked for once, come out right."""
    many = torch.zeros(1000, dtype=torch.int32, device=rig.device)
    rows = torch.cat([many, torch.arange(1, 1001, dtype=torch.int32, device=rig.device)])
    starts = torch.arange(0, 2001, 100, dtype=torch.int32, device=rig.device)
    gradient = torch.ones((20, 8), device=rig.device)
    for is_adagrad in (False, True):
        weights = torch.rand((1001, 8), generator=rig.generator, device=rig.device)
        peer = TablesPeer(weights, [rows], starts, gradient, 20, is_adagrad=is_adagrad, lr=0.125, eps=0.0)
        expected = torch.stack([weights[part].sum(0) for part in rows.long().view(20, 100)])
        pooled = peer.forward(0)
        # A gradient of ones: its mean square's root is itself, so that Adagrad's first step is the rate alone.
        steps = torch.where(torch.arange(1001, device=rig.device) == 0, 1 if is_adagrad else 1000, 1) * 0.125
        after = weights - steps[:, None]
        peer.backward(0)
        if not torch.allclose(pooled, expected, rtol=1e-4) or not torch.allclose(weights, after, rtol=1e-4, atol=1e-4):
            raise RuntimeError("wrong results")


class TablesPeer:
    """All rows in one array; backward sorts the ids and updates the rows in place.

    Args:
        weights: float32 [S, D], which it trains.
        rows: of each batch, int32 [N].
        starts: int32 [K + 1], of every batch; K = tables * samples bags, feature-major.
        gradient: float32 [B, tables * D], of every batch.
        samples: B.
        is_adagrad: row-wise Adagrad, else SGD.
    """

    def __init__(
        self, weights: Tensor, rows: list[Tensor], starts: Tensor, gradient: Tensor, samples: int, *,
        is_adagrad: bool, lr: float = 1e-6, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        self._weights = weights
        self._kernels = _compiled(weights.shape[1])
        self._rows, self._starts, self._gradient = rows, starts, gradient
        self._samples, self._tables = samples, (len(starts) - 1) // samples
        self._bag_of = torch.repeat_interleave(starts.diff().long()).to(torch.int32)
        self._state = torch.zeros(len(weights), device=weights.device)
        self._rule = [lr, eps, int(is_adagrad)]

    def _launch(self, name: str, warps: int, *given: Any) -> None:
        blocks = -(-warps * _WARP // _THREADS)
        self._kernels[name](grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=list(given))

    def forward(self, number: int) -> Tensor:
        """float32 [B, tables * D]."""
        bags = len(self._starts) - 1
        out = torch.empty_like(self._gradient)
        rows = self._rows[number]
        self._launch("forward", bags, self._weights, rows, self._starts, out, bags, self._samples, self._tables)
        return out

    def backward(self, number: int) -> None:
        """The update of every row of the batch."""
        rows = self._rows[number]
        count, dim = len(rows), self._weights.shape[1]
        ordered, order = torch.sort(rows)
        segments = -(-count // _SEGMENT)
        partial = torch.zeros((segments, dim), device=rows.device)
        self._launch(
            "backward", count, ordered, order, self._bag_of, self._gradient, self._weights, self._state, partial,
            count, self._samples, self._tables, *self._rule,
        )  # fmt: skip
        self._launch("finish", segments, ordered, partial, self._weights, self._state, count, *self._rule)

    @property
    def actions(self) -> dict[str, Action]:
        return {"forward": self.forward, "backward": self.backward}
