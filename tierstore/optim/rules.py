"""Backward of a pooled lookup, fused with the optimizer: each unique row is merged, updated and stored once.

Shape legend: N positions (ids of the batch), U unique rows, K bags, B samples, C output columns, T tables, S slots.
"""

import math
from typing import Any, Final

import numpy as np

from ..kernels.arrays import Bytes, Floats, Int32s, Int64s, Weights, Words
from ..kernels.floats import FLOAT32, store_row
from ..kernels.jit import prefetch_item, prefetch_word, uncounted_kernel
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_template as template
from ..kernels.simd import WIDEST, fill, halved, item, load, root, store
from ..kernels.slots import halving_sum, padded_width

RUN: Final = 64
"""Positions of one row that are summed one after another, from zero."""
SUPER_RUN: Final = 64 * RUN
"""Positions of one row in the runs whose sums are added one after another; then the sums of super-runs are."""

_ROWS_AHEAD: Final = 4
"""Rows are fetched from memory so long before they are updated."""

_GRADIENT, _SQUARES, _ROW = range(3)
"""Rows of scratch: a gradient, its squares, and a row in float32 before it is rounded."""
_SUPER_RUNS: Final = _SQUARES
"""The sum of a hot row's super-runs, until its gradient is complete."""
_SGD, _ROWWISE_ADAGRAD, _ADAGRAD, _ADAM, _OF_COLUMNS = range(5)
"""``code`` of each rule."""
_RATE, _WEIGHT_DECAY, _EPS, _BETA1, _BETA2, _STEP_SIZE, _ROOT_CORRECTION, _KEPT = range(8)
"""Columns of ``configs.Hyper``."""


SCRATCH_ROWS: Final = 3


def scratch(dim: int) -> Floats:
    """float32 [SCRATCH_ROWS, columns], zeros: what one thread needs to update rows of ``dim`` columns."""
    return np.zeros((SCRATCH_ROWS, padded_width(dim)), np.float32)


@template
def _merge_columns(
    lanes: int, column: Any, begin: int, end: int, dim: int, sources: Int64s, factors: Floats, grad_out: Floats,
    work: Floats,
) -> Any:  # fmt: skip
    """The columns from ``column`` on, as long as there are ``lanes`` left, of the sum of the gradients ``[begin,
    end)``, into the gradient of ``work``. Returns the first column that is not done."""
    while column + lanes <= dim:
        zero = fill(np.float32(0), lanes)
        total = zero
        run_stop = begin + RUN
        for i in range(begin, end):
            if i == run_stop:
                # Of earlier runs and super-runs, sums are kept in memory: the loop has registers for one.
                if (i - begin) % SUPER_RUN != RUN:
                    total = load(work, _GRADIENT, column, FLOAT32, lanes) + total
                if (i - begin) % SUPER_RUN != 0:
                    store(work, _GRADIENT, column, total, FLOAT32, lanes)
                else:
                    if i - begin > SUPER_RUN:
                        total = load(work, _SUPER_RUNS, column, FLOAT32, lanes) + total
                    store(work, _SUPER_RUNS, column, total, FLOAT32, lanes)
                total = zero
                run_stop += RUN
            term = load(grad_out, 0, item(sources, i) + column, FLOAT32, lanes)
            total = total + (item(factors, i) * term if factors.shape[0] else term)
        if end - begin > RUN:
            if (end - begin - 1) % SUPER_RUN >= RUN:
                total = load(work, _GRADIENT, column, FLOAT32, lanes) + total
            if end - begin > SUPER_RUN:
                total = load(work, _SUPER_RUNS, column, FLOAT32, lanes) + total
        store(work, _GRADIENT, column, total, FLOAT32, lanes)
        column += lanes
    return column


@inline
def _merge_max(
    begin: int, end: int, dim: int, sources: Int64s, positions: Int32s, bags: Int32s, arg_max: Int32s, grad_out: Floats,
    work: Floats,
) -> None:  # fmt: skip
    """As ``_merge_columns`` for maxima: of each gradient the columns that its position won."""
    for column in range(dim):
        total, earlier, merged = np.float32(0), np.float32(0), np.float32(0)
        run_stop = begin + RUN
        for i in range(begin, end):
            if i == run_stop:
                earlier, total = np.float32(earlier + total), np.float32(0)
                run_stop += RUN
                if (i - begin) % SUPER_RUN == 0:
                    merged, earlier = np.float32(merged + earlier), np.float32(0)
            if arg_max[bags[i], column] == positions[i]:
                total += grad_out[0, sources[i] + column]
        work[_GRADIENT, column] = merged + np.float32(earlier + total)


@inline
def _mean_square(dim: int, work: Floats) -> np.float32:
    """Mean of the squares of the gradient, summed as ``halving_sum`` does."""
    if work.shape[1] == WIDEST:  # in registers alone
        gradient = load(work, _GRADIENT, 0, FLOAT32, WIDEST)
        return np.float32(halved(gradient * gradient) / np.float32(dim))
    for column in range(0, work.shape[1], WIDEST):
        gradient = load(work, _GRADIENT, column, FLOAT32, WIDEST)
        store(work, _SQUARES, column, gradient * gradient, FLOAT32, WIDEST)
    return np.float32(halving_sum(work, _SQUARES) / np.float32(dim))


@uncounted_kernel
def _fill_mean_squares(gradients: Floats, work: Floats, out: Floats) -> None:
    for row in range(gradients.shape[0]):
        for column in range(gradients.shape[1]):
            work[_GRADIENT, column] = gradients[row, column]
        out[row] = _mean_square(gradients.shape[1], work)


def mean_squares(gradients: Floats) -> Floats:
    """float32 [U] of float32 [U, dim]: what row-wise Adagrad adds to each row's accumulator."""
    out = np.empty(len(gradients), np.float32)
    _fill_mean_squares(gradients, scratch(gradients.shape[1]), out)
    return out


@template
def _step_columns(
    lanes: int, column: Any, code: int, rate: np.float32, kept: np.float32, hyper: Floats, work: Floats,
    weights: Weights, slot: int, state: Floats, state_row: int, dim: int, dtype_code: int,
) -> Any:  # fmt: skip
    """One step of a row's columns from ``column`` on, as ``_merge_columns`` has them. Of row-wise Adagrad, ``rate`` is
    divided by its root already."""
    while column + lanes <= dim:
        gradient = load(work, _GRADIENT, column, FLOAT32, lanes)
        if code <= _ROWWISE_ADAGRAD or code == _OF_COLUMNS:  # and _SGD
            step = rate * gradient
        elif code == _ADAGRAD:
            accumulator = load(state, state_row, column, FLOAT32, lanes) + gradient * gradient
            store(state, state_row, column, accumulator, FLOAT32, lanes)
            step = (hyper[_RATE] * gradient) / (root(accumulator) + hyper[_EPS])
        else:  # _ADAM
            first = hyper[_BETA1] * load(state, state_row, column, FLOAT32, lanes)
            first = first + np.float32(np.float32(1) - hyper[_BETA1]) * gradient
            second = hyper[_BETA2] * load(state, state_row, dim + column, FLOAT32, lanes)
            second = second + (np.float32(np.float32(1) - hyper[_BETA2]) * gradient) * gradient
            store(state, state_row, column, first, FLOAT32, lanes)
            store(state, state_row, dim + column, second, FLOAT32, lanes)
            step = (hyper[_STEP_SIZE] * first) / (root(second) / hyper[_ROOT_CORRECTION] + hyper[_EPS])
        store(weights, slot, column, kept * load(weights, slot, column, dtype_code, lanes) - step, dtype_code, lanes)
        column += lanes
    return column


@inline
def _update_row(
    code: int, hyper: Floats, work: Floats, square: np.float32, weights: Weights, slot: int, state: Floats,
    state_row: int, dim: int, dtype_code: int,
) -> None:  # fmt: skip
    """One optimizer step of a row and its state, by the formulas of ``optim.configs``. ``square``: the mean of the
    squares of the gradient that this is a range of columns of; ``work``: the gradient, zero behind ``dim``, and
    scratch."""
    rate, kept = hyper[_RATE], hyper[_KEPT]
    if hyper[_WEIGHT_DECAY] != np.float32(0):
        for place in range(dim):
            work[_GRADIENT, place] += hyper[_WEIGHT_DECAY] * load(weights, slot, place, dtype_code, 1)
    if code == _ROWWISE_ADAGRAD:
        square = _mean_square(dim, work)
    if code in (_ROWWISE_ADAGRAD, _OF_COLUMNS):
        accumulator = np.float32(state[state_row, 0] + square)
        state[state_row, 0] = accumulator
        rate = np.float32(rate / np.float32(np.float32(math.sqrt(accumulator)) + hyper[_EPS]))
    column: Any = np.int64(0)
    column = _step_columns(16, column, code, rate, kept, hyper, work, weights, slot, state, state_row, dim, dtype_code)
    column = _step_columns(4, column, code, rate, kept, hyper, work, weights, slot, state, state_row, dim, dtype_code)
    _step_columns(1, column, code, rate, kept, hyper, work, weights, slot, state, state_row, dim, dtype_code)


@inline
def _update_and_round(
    code: int, hyper: Floats, work: Floats, square: np.float32, weights: Weights, slot: int, state: Floats, dim: int,
    dtype_code: int, seed: np.uint64, key: int,
) -> None:  # fmt: skip
    """``_update_row`` of a row of halfs in float32, then rounded as ``floats.store_row`` does."""
    for column in range(dim):
        work[_ROW, column] = load(weights, slot, column, dtype_code, 1)
    _update_row(code, hyper, work, square, work, _ROW, state, slot, dim, FLOAT32)
    store_row(work[_ROW], weights[slot], dim, dtype_code, seed, key)


@inline
def _merge(
    begin: int, end: int, dim: int, sources: Int64s, factors: Floats, positions: Int32s, bags: Int32s, arg_max: Int32s,
    grad_out: Floats, work: Floats,
) -> None:  # fmt: skip
    """Sum one row's gradients ``[begin, end)`` into the gradient of ``work``, in the canonical order: in id-list order
    within runs of RUN, the runs' sums in order within super-runs of SUPER_RUN positions, then the super-runs' sums. No
    sum depends on the runs before it, so a device may compute the runs of a hot row in parallel."""
    if arg_max.shape[0]:
        _merge_max(begin, end, dim, sources, positions, bags, arg_max, grad_out, work)
        return
    column: Any = np.int64(0)
    column = _merge_columns(64, column, begin, end, dim, sources, factors, grad_out, work)
    column = _merge_columns(16, column, begin, end, dim, sources, factors, grad_out, work)
    _merge_columns(1, column, begin, end, dim, sources, factors, grad_out, work)


@uncounted_kernel
def merge_and_update(
    begin_table: int, begin_row: int, end_table: int, end_row: int, table_firsts: Int64s, unique_firsts: Int64s,
    unique_slots: Int32s, counts: Int64s, starts: Int64s, sources: Int64s, factors: Floats, positions: Int32s,
    bags: Int32s, arg_max: Int32s, grad_out: Floats, codes: Int64s, hyper: Floats, weights: Weights, state: Floats,
    dim: int, dtype_code: int, flags: Bytes, dirty: int, seeds: Words | None, keys: Any, work: Floats,
) -> None:  # fmt: skip
    """Update rows from number ``begin_row`` of ``begin_table`` up to, not including, ``end_row`` of ``end_table``.
    Threads may update disjoint ranges.

    Args:
        table_firsts: int64 [T], first position of each table.
        unique_firsts: int64 [T]; row u of table t is in slot ``unique_slots[unique_firsts[t] + u]``.
        unique_slots: int32.
        counts, starts, sources, factors, positions, bags: what ``kernels.group_rows`` made.
        arg_max: int32 [K, dim], the position that gave each maximum (max pooling), or empty.
        grad_out: float32 [1, B * C]. For ``RowWiseAdagradOfColumns`` float32 [1, n * dim + n]: gradients of n rows,
            and then the mean square of each.
        codes: int64 [T], optimizer of each table.
        hyper: float32 [T, NUM_HYPER].
        weights: float32 or uint16 [S, >= dim]; state: float32 [S, >= state_dim]. Both are changed.
        flags: uint8 [S], or empty: ``dirty`` is set in those of the rows.
        seeds: uint64 [T], what each table's update rounds with, see ``kernels.floats``; or None, which compiles to a
            kernel that rounds to nearest and is the faster one.
        keys: int64, of the rows, by place as ``unique_slots``; or None without ``seeds``.
        work: as of ``scratch``, this thread's own; allocated here, counting references would take half the time.
    """
    for table in range(begin_table, min(end_table + 1, counts.shape[0])):
        first = table_firsts[table]
        low = begin_row if table == begin_table else 0
        high = end_row if table == end_table else counts[table]
        for row in range(low, high):
            if row + _ROWS_AHEAD < high:
                ahead = np.int64(unique_slots[unique_firsts[table] + row + _ROWS_AHEAD])
                for column in range(0, dim, 16):
                    prefetch_word(weights, (ahead, column))
                if state.shape[1]:
                    prefetch_word(state, (ahead, np.int64(0)))
                if flags.shape[0]:
                    prefetch_item(flags, ahead)
            place = first + 2 * table + row
            _merge(
                first + starts[place], first + starts[place + 1], dim, sources, factors, positions, bags, arg_max,
                grad_out, work,
            )  # fmt: skip
            slot: Any = np.int64(unique_slots[unique_firsts[table] + row])
            square = np.float32(0)
            if codes[table] == _OF_COLUMNS:
                source = sources[first + starts[place]]  # of one of its gradients; the squares are behind all of them
                square = np.float32(grad_out[0, grad_out.shape[1] // (dim + 1) * dim + source // dim])
            if seeds is None:
                _update_row(codes[table], hyper[table], work, square, weights, slot, state, slot, dim, dtype_code)
            else:
                _update_and_round(
                    codes[table], hyper[table], work, square, weights, slot, state, dim, dtype_code, seeds[table],
                    keys[unique_firsts[table] + row],
                )  # fmt: skip
            if flags.shape[0]:
                flags[slot] |= dirty
