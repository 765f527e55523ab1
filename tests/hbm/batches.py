"""Batches for tests of kernels over rows, and the CPU's kernels run on them: what the others must equal, bit by bit."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tierstore import kernels
from tierstore.hbm.batch import Bags, Groups
from tierstore.kernels import floats
from tierstore.kernels.threads import Workers
from tierstore.pool import backward

NO_FLOATS = np.empty(0, np.float32)
NO_ARG_MAX = np.empty((0, 0), np.int32)


@dataclass(frozen=True)
class Batch:
    """Two features of one pool, as numpy arrays, or as tensors (``weights``).

    Attributes:
        inverse: int32 [N], the unique row of each position; slots: int32 [U], its slot.
        weights: [S, > D], of the storage type.
        grad_out: float32 [B, C].
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

    @property
    def half(self) -> int:
        return floats.half_code(str(self.weights.dtype).removeprefix("torch."))

    def bags(self, device: str, *, scaled: bool = True) -> Bags:
        tensors = (torch.from_numpy(each).to(device) for each in (self.bag_starts, self.bag_of, self.columns))
        return Bags(
            *tensors, self.samples, torch.from_numpy(self.scale).to(device) if scaled else None, math.gcd(self.dim, 4)
        )

    def groups(self, device: str) -> Groups:
        order, starts = torch.from_numpy(self.order).to(device), torch.from_numpy(self.starts).to(device)
        return Groups(order, starts, len(self.slots))


def make_batch(dim: int, dtype: torch.dtype, *, longest: int = 4, hot: tuple[int, ...] = (), samples: int = 7) -> Batch:
    """Skewed positions in bags of ``longest`` at most, some empty; rows 2, 3, ... ``hot`` times more, in one bag."""
    rng = np.random.default_rng([dim, longest, *hot])
    lengths = rng.integers(0, longest + 1, 2 * samples)
    lengths[samples // 2] = 0
    bags = [(rng.random(length) ** 2 * 20).astype(np.int32) for length in lengths]
    bags[1] = rng.permutation(np.concatenate([bags[1], np.repeat(np.arange(2, 2 + len(hot), dtype=np.int32), hot)]))
    flat = np.concatenate(bags)
    numbers, inverse = np.unique(flat, return_inverse=True)
    bag_starts = np.cumsum([0, *(len(bag) for bag in bags)])
    inverse = inverse.astype(np.int32)
    order = np.argsort(inverse, kind="stable").astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(numbers)))])
    bag_of = np.repeat(np.arange(len(bags), dtype=np.int32), np.diff(bag_starts))
    # Two features side by side, a gap before and behind.
    columns = np.array([dim + 4, 4], np.int32)
    weights = torch.from_numpy(rng.standard_normal((64, dim + 3)).astype(np.float32)).to(dtype)
    return Batch(
        dim, bag_starts, bag_of, inverse, rng.permutation(64)[: len(numbers)].astype(np.int32), order, starts,
        rng.standard_normal(len(flat)).astype(np.float32), weights, columns, samples,
        rng.standard_normal((samples, 2 * dim + 8)).astype(np.float32),
    )  # fmt: skip


def storage(weights: Tensor) -> Any:
    """Numpy's view of weights, as kernels take them."""
    return weights.numpy() if weights.dtype == torch.float32 else weights.view(torch.uint16).numpy()


def bits(values: Any) -> Any:
    """Bit patterns on the CPU, those of NaN made one: devices differ in a NaN's sign and payload."""
    tensor = torch.as_tensor(values).detach().cpu().clone()
    if tensor.is_floating_point():
        tensor[tensor.isnan()] = float("nan")
        tensor = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return tensor.numpy()


def numba_pool(batch: Batch, mode: int, *, scaled: bool) -> tuple[Any, Any]:
    """(pooled, arg-maxima or None)."""
    out = np.zeros_like(batch.grad_out)
    num_bags = len(batch.bag_starts) - 1
    arg_max = np.full((num_bags, batch.dim), -1, np.int32) if mode == kernels.MAX else NO_ARG_MAX
    kernels.pool_rows(
        0, num_bags, 0, len(batch.inverse), batch.bag_starts, batch.slots[batch.inverse],
        batch.scale if scaled else NO_FLOATS, mode, storage(batch.weights), batch.dim, batch.half,
        batch.columns, batch.samples, out, arg_max,
    )  # fmt: skip
    return out, arg_max if mode == kernels.MAX else None


def numba_dot(batch: Batch) -> Any:
    """float32 [N], the gradient of per-sample weights."""
    out = np.empty(len(batch.inverse), np.float32)
    kernels.dot_rows(
        0, len(batch.bag_starts) - 1, 0, len(batch.inverse), batch.bag_starts, batch.slots[batch.inverse],
        storage(batch.weights), batch.dim, batch.half, batch.columns, batch.samples, batch.grad_out, out,
    )  # fmt: skip
    return out


class Updated(NamedTuple):
    """What an update changes."""

    weights: Tensor
    state: Tensor


def numba_update(
    batch: Batch, *, arg_max: Any, mean: bool, scaled: bool, table_of: Any, codes: Any, hyper: Any, state: Tensor
) -> Updated:
    """The batch's rows and state after an update."""
    changed = Updated(batch.weights.clone(), state.clone())
    scale = batch.scale if scaled else NO_FLOATS
    arg_max = NO_ARG_MAX if arg_max is None else arg_max
    bags = backward.Bags(
        np.array([0, len(batch.bag_starts) - 1]), batch.bag_starts, batch.columns, batch.samples, scale, mean, arg_max
    )
    pool: Any = SimpleNamespace(
        weights=storage(changed.weights), state=changed.state.numpy(), layout=SimpleNamespace(dim=batch.dim),
        half=batch.half,
    )  # fmt: skip
    # Row by row, since here rows of any two tables may follow each other.
    in_order = list(dict.fromkeys(batch.inverse.tolist()))
    number_of = {number: place for place, number in enumerate(in_order)}
    groups = backward.Groups(bags, batch.grad_out.shape[1], Workers(1))
    groups.by_number(np.array([number_of[number] for number in batch.inverse.tolist()], np.int32), len(in_order))
    for place, number in enumerate(in_order):
        table = table_of[number]
        groups.update(
            pool, place, batch.slots[number : number + 1], np.array(codes[table : table + 1], np.int64),
            hyper[table : table + 1], batch.grad_out,
        )  # fmt: skip
    return changed
