"""Ids as embedding tables are asked for them: a few rows very often, most of them seldom."""

import math

import torch
from torch import Tensor

from .rig import Rig

__all__ = ["Zipf"]


class Zipf:
    """Rows of a table: rank ``r`` (from 0) as likely as ``(r + 1) ** -exponent``, ranks scattered over the table.

    Args:
        exponent: 0 for rows that are all as likely.
    """

    def __init__(self, rig: Rig, rows: int, exponent: float) -> None:
        self._generator = rig.generator
        self._device = rig.device
        self._rows = rows
        self._exponent = exponent
        ranks = torch.arange(1, rows + 1, dtype=torch.float64, device=rig.device)
        self._sums = torch.cumsum(ranks**-exponent, 0) if exponent else None
        self._step = _coprime(rows)

    def ranks(self, count: int) -> Tensor:
        """int64 [count], on the device."""
        if self._sums is None:
            return torch.randint(self._rows, (count,), generator=self._generator, device=self._device)
        uniform = torch.rand(count, dtype=torch.float64, generator=self._generator, device=self._device)
        return torch.searchsorted(self._sums, uniform * self._sums[-1]).clamp_(max=self._rows - 1)

    def draw(self, count: int) -> Tensor:
        """int64 [count], on the device."""
        return self.ranks(count) * self._step % self._rows


def _coprime(rows: int) -> int:
    """A step that visits every row, about the golden section of the table."""
    step = max(1, int(rows * 0.618))
    while math.gcd(step, rows) > 1:
        step += 1
    return step
