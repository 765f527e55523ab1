"""Kernels over rows in slots: pooled lookup, copies in and out, grouping of duplicate ids.

Shape legend: N positions (ids of the batch), U unique rows, K bags, B samples, C output columns, S slots, D = dim.
"""

from typing import Any, Final

import numpy as np

from . import floats
from ._jit import kernel
from ._jit import uncounted_kernel as inline
from .init import mix64

__all__ = [
    "MAX",
    "MEAN",
    "SUM",
    "copy_rows_in",
    "copy_rows_out",
    "dot_rows",
    "group_positions",
    "halving_sum",
    "join_keys",
    "padded_width",
    "pool_rows",
    "put_rows",
    "unique_in_order",
]

SUM: Final = 0
MEAN: Final = 1
MAX: Final = 2


@kernel
def join_keys(
    ids: Any,
    starts: Any,
    stops: Any,
    table_keys: Any,
    num_rows: Any,
    lists: Any,
    batch: int,
    keys: Any,
    bag_starts: Any,
) -> Any:
    """Lay the ids of some features end to end as row keys, feature by feature.

    Args:
        ids: int64 or int32, the ids of all features.
        starts, stops: int64 [features], the range of ``ids`` each chosen feature owns.
        table_keys, num_rows: int64 [features], ``table_index << KEY_ROW_BITS`` and the table's rows.
        lists: int64 [features, batch], where each bag of each chosen feature begins in ``ids``.
        batch: bags of a feature.
        keys: int64 [N], out.
        bag_starts: int64 [features * batch + 1], out: where each bag begins in ``keys``.

    Returns:
        -1, or the position in ``ids`` of the first id outside its table.
    """
    out = 0
    for feature in range(starts.shape[0]):
        for bag in range(batch):
            bag_starts[feature * batch + bag] = out + lists[feature, bag] - starts[feature]
        for i in range(starts[feature], stops[feature]):
            row = np.int64(ids[i])
            if row < 0 or row >= num_rows[feature]:
                return i
            keys[out] = table_keys[feature] | row
            out += 1
    bag_starts[starts.shape[0] * batch] = out
    return np.int64(-1)


@kernel
def pool_rows(
    begin: int, end: int, first: int, last: int, bag_starts: Any, inverse: Any, unique_slots: Any, scale: Any,
    mode: int, weights: Any, dim: int, half: int, sample_of: Any, column_of: Any, out: Any, arg_max: Any,
) -> None:  # fmt: skip
    """Add the rows at positions ``[first, last)`` to the bags ``[begin, end)`` of ``out``.

    A bag is summed in id-list order, one row after another, so neither the split over threads (by bags) nor over
    calls (by positions) changes a bit.

    Args:
        bag_starts: int64 [K + 1].
        inverse: int32 [last - first], unique number of each position; unique_slots: int32, its slot.
        scale: float32 [N], per-sample weights, or empty.
        mode: SUM, MEAN or MAX; a mean is divided when its last position was added.
        weights: float32 or uint16 [S, >= D].
        sample_of, column_of: int32 [K], where a bag lies in ``out``.
        out: float32 [B, C], zero before the first call.
        arg_max: int32 [K, D], -1 before the first call (MAX), or empty: the first position of each maximum.
    """
    for bag in range(begin, end):
        low, high = max(bag_starts[bag], first), min(bag_starts[bag + 1], last)
        pooled = out[sample_of[bag], column_of[bag] : column_of[bag] + dim]
        if mode == MAX:
            for position in range(low, high):
                row = weights[unique_slots[inverse[position - first]]]
                best = arg_max[bag]
                for column in range(dim):
                    value = floats.load(row, column, half)
                    if best[column] < 0 or value > pooled[column]:
                        pooled[column] = value
                        best[column] = position
            continue
        if scale.shape[0]:
            for position in range(low, high):
                row, factor = weights[unique_slots[inverse[position - first]]], scale[position]
                for column in range(dim):
                    pooled[column] += factor * floats.load(row, column, half)
        else:
            for position in range(low, high):
                row = weights[unique_slots[inverse[position - first]]]
                for column in range(dim):
                    pooled[column] += floats.load(row, column, half)
        if mode == MEAN and low < high and high == bag_starts[bag + 1]:
            count = np.float32(high - bag_starts[bag])
            for column in range(dim):
                pooled[column] /= count


@inline
def padded_width(dim: int) -> int:
    """Columns that ``halving_sum`` wants for ``dim`` terms: a power of two, and enough for its closing line."""
    width = 8
    while width < dim:
        width *= 2
    return width


@inline
def halving_sum(terms: Any) -> Any:
    """Sum of float32 [a power of two >= 8], in the order of a halving tree; the lower half of ``terms`` is used up.

    The upper half is added to the lower one, element by element, until one element is left, and that to +0.0. More
    zeros behind the terms change no bit, and a CPU's vector unit can follow this order as well as a GPU's threads.
    """
    width = terms.shape[0]
    while width > 8:
        width //= 2
        for i in range(width):
            terms[i] += terms[width + i]
    even, odd = (terms[0] + terms[4]) + (terms[2] + terms[6]), (terms[1] + terms[5]) + (terms[3] + terms[7])
    return np.float32(np.float32(0) + (even + odd))


@kernel
def dot_rows(
    begin: int, end: int, first: int, last: int, bag_starts: Any, inverse: Any, unique_slots: Any, weights: Any,
    dim: int, half: int, sample_of: Any, column_of: Any, grad_out: Any, grad_scale: Any,
) -> None:  # fmt: skip
    """Gradient of per-sample weights: ``grad_scale[p] = row(p) . grad_out[bag of p]``, positions ``[first, last)``.

    The products are summed as ``halving_sum`` does.
    """
    products = np.zeros(padded_width(dim), np.float32)
    for bag in range(begin, end):
        low, high = max(bag_starts[bag], first), min(bag_starts[bag + 1], last)
        gradient = grad_out[sample_of[bag], column_of[bag] : column_of[bag] + dim]
        for position in range(low, high):
            row = weights[unique_slots[inverse[position - first]]]
            for column in range(dim):
                products[column] = floats.load(row, column, half) * gradient[column]
            grad_scale[position] = halving_sum(products)


@kernel
def copy_rows_out(inverse: Any, unique_slots: Any, weights: Any, dim: int, out: Any) -> None:
    """``out[i] = weights[unique_slots[inverse[i]], :dim]``, bits unchanged."""
    for i in range(inverse.shape[0]):
        row, target = weights[unique_slots[inverse[i]]], out[i]
        for column in range(dim):
            target[column] = row[column]


@kernel
def copy_rows_in(inverse: Any, unique_slots: Any, rows: Any, weights: Any, dim: int) -> None:
    """``weights[unique_slots[inverse[i]], :dim] = rows[i]`` in order, so that the last of equal ids wins."""
    for i in range(inverse.shape[0]):
        row, target = rows[i], weights[unique_slots[inverse[i]]]
        for column in range(dim):
            target[column] = row[column]


@kernel
def put_rows(begin: int, end: int, slots: Any, weights: Any, state: Any, new_weights: Any, new_state: Any) -> None:
    """``arena[slots[i]] = new[i]`` for i in [begin, end), both arenas (uint64 [S, words]); slots are distinct.

    Three times as fast as numpy's assignment. The other way round ``numpy.take`` is the faster one.
    """
    for i in range(begin, end):
        row, source = weights[slots[i]], new_weights[i]
        for word in range(source.shape[0]):
            row[word] = source[word]
        row, source = state[slots[i]], new_state[i]
        for word in range(source.shape[0]):
            row[word] = source[word]


@kernel
def group_positions(inverse: Any, num_unique: int, bag_starts: Any, group_start: Any, order: Any, bag_of: Any) -> None:
    """Positions grouped by unique row, each group in id-list order (a counting sort), and the bag of each position.

    Args:
        inverse: int32 [N], values in [0, num_unique).
        bag_starts: int64 [K + 1].
        group_start: int64 [U + 1], out; order, bag_of: int32 [N], out.
    """
    group_start[:] = 0
    for position in range(inverse.shape[0]):
        group_start[inverse[position] + 1] += 1
    for unique in range(num_unique):
        group_start[unique + 1] += group_start[unique]
    for position in range(inverse.shape[0]):
        unique = inverse[position]
        order[group_start[unique]] = position
        group_start[unique] += 1
    for unique in range(num_unique, 0, -1):
        group_start[unique] = group_start[unique - 1]
    group_start[0] = 0
    for bag in range(bag_starts.shape[0] - 1):
        for position in range(bag_starts[bag], bag_starts[bag + 1]):
            bag_of[position] = bag


@kernel
def unique_in_order(keys: Any, scratch: Any, unique_keys: Any, inverse: Any) -> Any:
    """Number the distinct keys in order of first use.

    Args:
        keys: int64 [N].
        scratch: int32 [a power of two >= 2 N], all -1.
        unique_keys: int64 [N], out; inverse: int32 [N], out.

    Returns:
        how many are distinct.
    """
    mask = np.uint64(scratch.shape[0] - 1)
    count = 0
    for position in range(keys.shape[0]):
        key = keys[position]
        place = mix64(np.uint64(key)) & mask
        while scratch[place] >= 0 and unique_keys[scratch[place]] != key:
            place = np.uint64(place + np.uint64(1)) & mask
        if scratch[place] < 0:
            scratch[place] = count
            unique_keys[count] = key
            count += 1
        inverse[position] = scratch[place]
    return count
