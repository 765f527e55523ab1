"""Batches for tests of kernels over rows."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.hbm.batch import Bags, Groups

UNTOUCHED = 7.0
"""In the gaps of results."""


@dataclass(frozen=True)
class Batch:
    """Features of one pool, as numpy arrays, or as tensors (``weights``).

    Attributes:
        inverse: int32 [N], the unique row of each position; slots: int32 [U], its slot.
        starts: int32 [N + 1], what follows the first U + 1 is far out of bounds.
        weights: [S, > D], of the storage type.
        grad_out: float32 [B, C], has gaps.
        table_of: int32 [F].
    """

    dim: int
    bag_starts: Any
    bag_of: Any
    inverse: Any
    slots: Any
    order: Any
    starts: Any
    scale: Any
    weights: Tensor
    columns: Any
    samples: int
    grad_out: Any
    table_of: Any

    @property
    def lengths(self) -> Any:
        """int [U], positions of each unique row."""
        return np.diff(self.starts[: len(self.slots) + 1])

    def bags(self, module: ModuleType, device: str, *, scaled: bool = True) -> Bags:
        """``bag_of`` is what the kernels of ``module`` make of ``bag_starts``."""
        starts, columns, table_of, scale = (
            torch.from_numpy(each).to(device) for each in (self.bag_starts, self.columns, self.table_of, self.scale)
        )
        bag_of = torch.full((len(self.inverse),), -1, dtype=torch.int32, device=device)
        module.number_bags(starts, bag_of)
        assert np.array_equal(bag_of.cpu().numpy(), self.bag_of)
        return Bags(starts, bag_of, columns, table_of, self.samples, scale if scaled else None, math.gcd(self.dim, 4))

    def groups(self, device: str) -> Groups:
        order, starts = torch.from_numpy(self.order).to(device), torch.from_numpy(self.starts).to(device)
        return Groups(order, starts, torch.tensor([len(self.slots)], dtype=torch.int32, device=device))


def make_batch(
    dim: int, dtype: torch.dtype, *, longest: int = 4, hot: tuple[int, ...] = (), samples: int = 7, tables: int = 1
) -> Batch:
    """Skewed positions in bags of ``longest`` at most, some empty; rows 2, 3, ... ``hot`` times more, in one bag.

    Two features of one table, or one feature of each of several ``tables``.
    """
    rng = np.random.default_rng([dim, longest, *hot])
    features, num_rows = (2, 20) if tables == 1 else (tables, 8)
    lengths = rng.integers(0, longest + 1, features * samples)
    lengths[samples // 2] = 0
    bags = [(rng.random(length) ** 2 * num_rows).astype(np.int32) for length in lengths]
    bags[1] = rng.permutation(np.concatenate([bags[1], np.repeat(np.arange(2, 2 + len(hot), dtype=np.int32), hot)]))
    bag_starts = np.cumsum([0, *(len(bag) for bag in bags)]).astype(np.int32)
    bag_of = np.repeat(np.arange(len(bags), dtype=np.int32), np.diff(bag_starts))
    flat = np.concatenate(bags)
    if tables > 1:
        flat += bag_of // samples * num_rows
    numbers, inverse = np.unique(flat, return_inverse=True)
    inverse = inverse.astype(np.int32)
    starts = np.full(len(flat) + 1, 10**9, np.int32)
    starts[: len(numbers) + 1] = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(numbers)))])
    # Features side by side, the last one first, a gap before and behind.
    columns = (4 + dim * np.arange(features)[::-1]).astype(np.int32)
    weights = torch.from_numpy(rng.standard_normal((64, dim + 3)).astype(np.float32)).to(dtype)
    return Batch(
        dim, bag_starts, bag_of, inverse, rng.permutation(64)[: len(numbers)].astype(np.int32),
        np.argsort(inverse, kind="stable"), starts, rng.standard_normal(len(flat)).astype(np.float32), weights,
        columns, samples, rng.standard_normal((samples, features * dim + 8)).astype(np.float32),
        rng.permutation(tables)[np.arange(features) % tables].astype(np.int32),
    )  # fmt: skip


def bits(values: Any) -> Any:
    """Bit patterns on the CPU, those of NaN made one: devices differ in a NaN's sign and payload."""
    tensor = torch.as_tensor(values).detach().cpu().clone()
    if tensor.is_floating_point():
        tensor[tensor.isnan()] = float("nan")
        tensor = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return tensor.numpy()
