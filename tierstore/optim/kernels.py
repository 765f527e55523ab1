"""Backward of a pooled lookup, fused with the optimizer: each unique row is merged, updated and stored once.

Shape legend: N positions (ids of the batch), U unique rows, K bags, B samples, C output columns, T tables, S slots.
"""

import math
from typing import Any, Final

import numpy as np

from .. import floats
from .._jit import kernel
from .._jit import uncounted_kernel as inline
from ..kernels import halving_sum, padded_width

__all__ = ["RUN", "merge_and_update"]

RUN: Final = 64
"""Positions of one row that are summed one after another, from zero, before the sum joins those of the runs before."""

_SGD, _ROWWISE_ADAGRAD, _ADAGRAD = 0, 1, 2


@inline
def _merge(
    gradient: Any, earlier: Any, order: Any, first: int, last: int, bag_of: Any, scale: Any, arg_max: Any,
    sample_of: Any, column_of: Any, grad_out: Any,
) -> None:  # fmt: skip
    """Sum the gradients of positions ``order[first:last]`` into ``gradient``: run by run, each in id-list order.

    A run's sum does not depend on the runs before, so that those of a hot row may be summed apart from each other.
    """
    dim = gradient.shape[0]
    gradient[:] = np.float32(0)
    run_stop = first + RUN
    for i in range(first, last):
        if i == run_stop:
            _close_run(gradient, earlier, i - first == RUN)
            run_stop += RUN
        position = order[i]
        bag = bag_of[position]
        source = grad_out[sample_of[bag], column_of[bag] : column_of[bag] + dim]
        if arg_max.shape[0]:
            best = arg_max[bag]
            for column in range(dim):
                if best[column] == position:
                    gradient[column] += source[column]
        elif scale.shape[0]:
            factor = scale[position]
            for column in range(dim):
                gradient[column] += factor * source[column]
        else:
            for column in range(dim):
                gradient[column] += source[column]
    if last - first > RUN:
        for column in range(dim):
            gradient[column] += earlier[column]


@inline
def _close_run(gradient: Any, earlier: Any, first: bool) -> None:
    """Add a run's sum to those of the ``earlier`` ones (``first``: there are none), and begin the next at zero."""
    if first:
        earlier[:] = np.float32(0)
    for column in range(gradient.shape[0]):
        earlier[column] += gradient[column]
    gradient[:] = np.float32(0)


@inline
def _mean_square(gradient: Any, squares: Any) -> Any:
    """Mean of squares, summed as ``halving_sum`` does; ``squares`` is its scratch, zero from ``dim`` on."""
    dim = gradient.shape[0]
    for column in range(dim):
        squares[column] = gradient[column] * gradient[column]
    return np.float32(halving_sum(squares) / np.float32(dim))


@inline
def _update_row(code: int, hyper: Any, gradient: Any, squares: Any, row: Any, state: Any, half: int) -> None:
    """Apply one optimizer step to ``row`` and its ``state``; the formulas are those of ``optim.configs``."""
    dim = gradient.shape[0]
    lr, weight_decay, eps = hyper[0], hyper[1], hyper[2]
    if weight_decay != np.float32(0):
        for column in range(dim):
            gradient[column] += weight_decay * floats.load(row, column, half)
    if code == _SGD:
        for column in range(dim):
            value = floats.load(row, column, half)
            floats.store(row, column, np.float32(value - lr * gradient[column]), half)
    elif code == _ROWWISE_ADAGRAD:
        accumulator = np.float32(state[0] + _mean_square(gradient, squares))
        state[0] = accumulator
        step = np.float32(lr / np.float32(np.float32(math.sqrt(accumulator)) + eps))
        for column in range(dim):
            value = floats.load(row, column, half)
            floats.store(row, column, np.float32(value - step * gradient[column]), half)
    elif code == _ADAGRAD:
        for column in range(dim):
            g = gradient[column]
            accumulator = np.float32(state[column] + g * g)
            state[column] = accumulator
            value = floats.load(row, column, half)
            root = np.float32(np.float32(math.sqrt(accumulator)) + eps)
            floats.store(row, column, np.float32(value - np.float32(lr * g) / root), half)
    else:
        beta1, beta2, step_size, root_correction = hyper[3], hyper[4], hyper[5], hyper[6]
        for column in range(dim):
            g = gradient[column]
            first = np.float32(beta1 * state[column] + (np.float32(1) - beta1) * g)
            second = np.float32(beta2 * state[dim + column] + (np.float32(1) - beta2) * g * g)
            state[column] = first
            state[dim + column] = second
            root = np.float32(np.float32(math.sqrt(second)) / root_correction + eps)
            value = floats.load(row, column, half)
            floats.store(row, column, np.float32(value - step_size * first / root), half)


@inline
def _update_range(
    begin: int, end: int, unique_slots: Any, first_unique: int, group_start: Any, order: Any, bag_of: Any, scale: Any,
    arg_max: Any, sample_of: Any, column_of: Any, grad_out: Any, table_of: Any, codes: Any, hyper: Any,
    weights: Any, state: Any, half: int, gradient: Any, earlier: Any, squares: Any,
) -> None:  # fmt: skip
    """``merge_and_update`` on given scratch; whoever allocates counts references, and counting took half the time."""
    for unique in range(begin, end):
        _merge(
            gradient, earlier, order, group_start[unique], group_start[unique + 1], bag_of, scale, arg_max,
            sample_of, column_of, grad_out,
        )  # fmt: skip
        table = table_of[unique]
        slot = unique_slots[unique - first_unique]
        _update_row(codes[table], hyper[table], gradient, squares, weights[slot], state[slot], half)


@kernel
def merge_and_update(
    begin: int, end: int, unique_slots: Any, first_unique: int, group_start: Any, order: Any, bag_of: Any, scale: Any,
    arg_max: Any, sample_of: Any, column_of: Any, grad_out: Any, table_of: Any, codes: Any, hyper: Any,
    weights: Any, state: Any, dim: int, half: int,
) -> None:  # fmt: skip
    """Update the unique rows ``[begin, end)``; rows of distinct ranges may be updated by different threads.

    Args:
        unique_slots: int32; slot of unique row ``u`` is ``unique_slots[u - first_unique]``.
        group_start: int64 [U + 1]; positions of unique row ``u`` are ``order[group_start[u]:group_start[u + 1]]``.
        order: int32 [N].
        bag_of: int32 [N], the bag of each position.
        scale: float32 [N], the factor of each position's gradient, or empty for 1.
        arg_max: int32 [K, dim], the position that gave each maximum (max pooling), or empty.
        sample_of, column_of: int32 [K], where a bag's gradient lies in ``grad_out``.
        grad_out: float32 [B, C].
        table_of: int32 [U], which row of ``codes`` and ``hyper`` rules unique row ``u``.
        codes: int64 [T], optimizer of each table.
        hyper: float32 [T, NUM_HYPER].
        weights: float32 or uint16 [S, >= dim]; state: float32 [S, >= state_dim]. Both are changed.
    """
    gradient, earlier = np.empty(dim, np.float32), np.empty(dim, np.float32)
    squares = np.zeros(padded_width(dim), np.float32)
    _update_range(
        begin, end, unique_slots, first_unique, group_start, order, bag_of, scale, arg_max, sample_of, column_of,
        grad_out, table_of, codes, hyper, weights, state, half, gradient, earlier, squares,
    )  # fmt: skip
