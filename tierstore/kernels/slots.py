"""Kernels over rows in slots: pooled lookup, copies in and out, grouping of duplicate ids.

Shape legend: N positions (ids of the batch), U unique rows, F features, T tables, K = F * B bags, B samples, C output
columns, S slots, D = dim.
"""

import math
from typing import Any, Final

import numpy as np

from .arrays import Bytes, Floats, Ids, Int32s, Int64s, Weights, Words
from .floats import FLOAT32
from .hashing import keyed_hash, mix64, unit
from .jit import kernel, prefetch_item, prefetch_word, uncounted_kernel
from .jit import uncounted_inline as inline
from .jit import uncounted_template as template
from .simd import WIDE, WIDEST, fill, halved, item, load, put, store

SUM, MEAN, MAX = range(3)
MODES: Final = {"sum": SUM, "mean": MEAN, "max": MAX}  # by the names that configurations have

_CONSTANT, _UNIFORM, _NORMAL = range(3)
FIRST_VALUES: Final = {"constant": _CONSTANT, "uniform": _UNIFORM, "normal": _NORMAL}  # by the kind of an initializer
DONE, ABSENT = -1, -2  # what ``look_up`` returns
AHEAD: Final = 16  # positions: rows are fetched from memory so long before they are used
BLOCK_POSITIONS: Final = 1024
"""``look_up`` checks so many, at most, before it pools them: their slots are still in the innermost cache then."""
SCRATCH_SLOTS: Final = BLOCK_POSITIONS + AHEAD


@uncounted_kernel
def row_keys(ids: Ids, first: int, stop: int, table_key: int, keys: Int64s) -> int:
    """``keys[i]`` = ids[i] | table_key, of ids in [first, stop): -1. Or the position of the first id that is not."""
    for i in range(ids.size):
        row = np.int64(ids[i])
        if not first <= row < stop:
            return i
        keys[i] = row | table_key
    return -1


@uncounted_kernel
def join_ids(
    begin: int, end: int, ids: Ids, starts: Int64s, firsts: Int64s, num_rows: Int64s, batch: int, bag_starts: Ids,
    joined: Ids,
) -> Any:  # fmt: skip
    """Lay the ids of the bags ``[begin, end)`` end to end, each plus its feature's ``firsts``. Each id is read once.

    Args:
        ids: int64 or int32, the ids of all features.
        starts: int64 [features], where each chosen feature begins in ``ids``.
        firsts: int64 [features], what its row 0 becomes: a row key, or a slot.
        num_rows: int64 [features], the table's rows.
        batch: bags of a feature.
        bag_starts: int64 or int32 [features * batch + 1], where each bag begins in ``joined``.
        joined: int64 or int32 [N], out.

    Returns -1, or the position in ``ids`` of the first id outside its table; of the feature's first, if none is now.
    """
    if begin == end:
        return np.int64(-1)
    for feature in range(begin // batch, (end - 1) // batch + 1):
        first, limit = firsts[feature], num_rows[feature]
        shift = starts[feature] - bag_starts[feature * batch]
        low, high = bag_starts[max(begin, feature * batch)], bag_starts[min(end, feature * batch + batch)]
        is_outside = False  # looked at once, so that the loop is vector code
        for position in range(low, high):
            row = np.int64(item(ids, position + shift))
            is_outside |= (row < 0) | (row >= limit)
            put(joined, position, first + row)
        if is_outside:
            return _first_outside(ids, low + shift, high + shift, limit)
    return np.int64(-1)


@inline
def _first_outside(ids: Ids, begin: int, end: int, num_rows: int) -> Any:
    """In ``[begin, end)``, of an id not in ``[0, num_rows)``; ``begin`` if somebody changed the one that was not."""
    for position in range(begin, end):
        row = np.int64(item(ids, position))
        if row < 0 or row >= num_rows:
            return np.int64(position)
    return np.int64(begin)


@template
def _pool_columns(
    lanes: int, column: Any, dim: int, low: int, high: int, known: int, shift: int, fresh: bool, slots: Int32s,
    scale: Floats, weights: Weights, dtype_code: int, divisor: np.float32, out: Floats, sample: int, target: int,
) -> Any:  # fmt: skip
    """Of one bag, whose positions are ``[low, high)``, the columns from ``column`` on, as long as there are ``lanes``
    left; slots are known up to position ``known``. Returns the first column that is not done."""
    is_scaled = scale.shape[0] > 0
    while column + lanes <= dim:
        pooled = fill(np.float32(0), lanes) if fresh else load(out, sample, target + column, FLOAT32, lanes)
        for position in range(low, high):
            if lanes > 1 and position + AHEAD < known:  # a single column's cache line was fetched with those before
                ahead = np.int64(item(slots, position + AHEAD + shift))
                for line in range(0, lanes, WIDE):
                    prefetch_word(weights, (ahead, column + line))
            row = load(weights, np.int64(item(slots, position + shift)), column, dtype_code, lanes)
            pooled = pooled + (item(scale, position) * row if is_scaled else row)
        store(out, sample, target + column, pooled / divisor if divisor > 0 else pooled, FLOAT32, lanes)
        column += lanes
    return column


@uncounted_kernel
def pool_rows(
    begin: int, end: int, first: int, last: int, bag_starts: Int64s, slots: Int32s, scale: Floats, mode: int,
    weights: Weights, dim: int, dtype_code: int, columns: Int32s, batch: int, out: Floats, arg_max: Int32s,
) -> None:  # fmt: skip
    """Add the rows at positions ``[first, last)`` to the bags ``[begin, end)`` of ``out``.

    A bag is summed in id-list order, one row after another, so neither the split over threads (by bags) nor over
    calls (by positions) changes a bit. A bag that begins in the range of a call is set by it, whatever ``out`` held.

    Args:
        bag_starts: int64 [K + 1].
        slots: int32 [last - first], slot of each position.
        scale: float32 [N], per-sample weights, or empty.
        mode: SUM, MEAN or MAX; a mean is divided when its last position was added.
        weights: float32 or uint16 [S, >= D].
        columns: int32 [F], where a feature's results begin; bag k is of feature ``k // batch``, sample ``k % batch``.
        out: float32 [B, C].
        arg_max: int32 [K, D], out (MAX), or empty: the first position of each maximum, or -1.
    """
    bag = begin
    while bag < end:
        feature = bag // batch
        stop = min(end, (feature + 1) * batch)
        _pool_feature(
            bag, stop, bag - feature * batch, np.int64(columns[feature]), first, last, last, -first, bag_starts, slots,
            scale, mode, weights, dim, dtype_code, out, arg_max,
        )  # fmt: skip
        bag = stop


@inline
def _pool_feature(
    begin: int, end: int, sample: int, target: Any, first: int, last: int, known: int, shift: int, bag_starts: Int64s,
    slots: Int32s, scale: Floats, mode: int, weights: Weights, dim: int, dtype_code: int, out: Floats, arg_max: Int32s,
) -> None:  # fmt: skip
    """``pool_rows`` for bags of one feature: of ``sample`` and those that follow, from column ``target`` on. The slot
    of a position is ``slots[position + shift]``, known up to position ``known``."""
    for bag in range(begin, end):
        fresh = bag_starts[bag] >= first
        low, high = max(bag_starts[bag], first), min(bag_starts[bag + 1], last)
        if mode == MAX:
            pooled = out[sample, target : target + dim]
            if fresh:
                pooled[:] = np.float32(0)
                arg_max[bag, :] = -1
            _pool_max(low, high, shift, slots, weights, dtype_code, pooled, arg_max[bag])
        elif fresh or low < high:
            divisor = np.float32(0)
            if mode == MEAN and low < high and high == bag_starts[bag + 1]:
                divisor = np.float32(high - bag_starts[bag])
            column: Any = np.int64(0)
            column = _pool_columns(64, column, dim, low, high, known, shift, fresh, slots, scale, weights, dtype_code,
                                   divisor, out, sample, target)  # fmt: skip
            column = _pool_columns(16, column, dim, low, high, known, shift, fresh, slots, scale, weights, dtype_code,
                                   divisor, out, sample, target)  # fmt: skip
            column = _pool_columns(4, column, dim, low, high, known, shift, fresh, slots, scale, weights, dtype_code,
                                   divisor, out, sample, target)  # fmt: skip
            _pool_columns(1, column, dim, low, high, known, shift, fresh, slots, scale, weights, dtype_code,
                          divisor, out, sample, target)  # fmt: skip
        sample += 1


@uncounted_kernel
def look_up(
    begin: int, end: int, ids: Ids, starts: Int64s, firsts: Int64s, num_rows: Int64s, batch: int, bag_starts: Int64s,
    flags: Bytes, asked: int, wanted: int, scale: Floats, mode: int, weights: Weights, dim: int, dtype_code: int,
    columns: Int32s, out: Floats, arg_max: Int32s, slots: Int32s, scratch: Int32s,
) -> Any:  # fmt: skip
    """``pool_rows`` straight from ids, of rows that have slots of their own; arguments as there and of ``join_ids``.

    Each id is read once: its slot is checked, kept and used, whatever becomes of the id.

    Args:
        flags: uint8 [S], or empty: every row must have ``flags[slot] & asked == wanted``.
        slots: int32 [N], or empty: receives the slot of each position.
        scratch: int32 [``SCRATCH_SLOTS``].

    Returns ``DONE``; or, ``out`` holding anything, a position as ``join_ids``, or ``ABSENT`` if flags are others.
    """
    known_slots = slots if slots.shape[0] else scratch
    bag, known = begin, bag_starts[begin]
    origin: Any = np.int64(0)
    while bag < end:
        feature = bag // batch
        stop = min(end, (feature + 1) * batch)
        shift, base = starts[feature] - bag_starts[feature * batch], firsts[feature]
        first, last = bag_starts[bag], bag_starts[stop]
        stop = _block_end(bag_starts, bag, min(stop, bag + BLOCK_POSITIONS))
        is_over = False
        while not is_over:  # again only within a bag that is longer than a block
            high = min(bag_starts[stop], first + BLOCK_POSITIONS)
            if not slots.shape[0]:
                for position in range(first, known):
                    put(scratch, position - first, item(scratch, position - origin))
                origin = first
            goal = min(high + AHEAD, last)
            if not _take_slots(ids, known + shift, goal + shift, base, num_rows[feature], known_slots, known - origin):
                return _first_outside(ids, known + shift, goal + shift, num_rows[feature])
            if flags.shape[0] and not _all_flagged(known_slots, known - origin, goal - origin, flags, asked, wanted):
                return np.int64(ABSENT)
            known = goal
            _pool_feature(
                bag, stop, bag - feature * batch, np.int64(columns[feature]), first, high, known, -origin, bag_starts,
                known_slots, scale, mode, weights, dim, dtype_code, out, arg_max,
            )  # fmt: skip
            first = high
            is_over = first >= bag_starts[stop]
        bag = stop
    return np.int64(DONE)


@inline
def _block_end(bag_starts: Int64s, begin: int, end: int) -> Any:
    """Where the bags from ``begin`` on, but not behind ``end``, have ``BLOCK_POSITIONS`` together; at least one bag."""
    low, high = begin + 1, end
    if bag_starts[high] - bag_starts[begin] <= BLOCK_POSITIONS:
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        if bag_starts[middle] - bag_starts[begin] <= BLOCK_POSITIONS:
            low = middle
        else:
            high = middle - 1
    return low


@inline
def _take_slots(ids: Ids, begin: int, end: int, base: int, num_rows: int, slots: Int32s, place: int) -> bool:
    """``base + id`` of the ids at ``[begin, end)`` into ``slots`` from ``place`` on; whether all are in the table."""
    signs = np.int64(0)
    for i in range(end - begin):  # without a way out, so that it is done in vectors
        row = np.int64(item(ids, begin + i))
        signs |= row | (num_rows - 1 - row)
        put(slots, place + i, base + row)
    return bool(signs >= 0)


@inline
def _all_flagged(slots: Int32s, begin: int, end: int, flags: Bytes, asked: int, wanted: int) -> bool:
    """Whether ``flags[slot] & asked == wanted`` for all slots at ``[begin, end)``."""
    for position in range(begin, end):
        if position + AHEAD < end:
            prefetch_item(flags, np.int64(item(slots, position + AHEAD)))
        if item(flags, np.int64(item(slots, position))) & asked != wanted:
            return False
    return True


@uncounted_kernel
def copy_offsets(offsets: Ids, num_ids: int, out: Ids) -> bool:
    """Whether offsets [n > 0] start at 0, never descend and end at ``num_ids``; copied to ``out``, each read once."""
    first: Any = np.int64(item(offsets, 0))
    put(out, 0, first)
    before = first
    descends: Any = False
    for bag in range(1, offsets.shape[0]):
        start = np.int64(item(offsets, bag))
        descends |= start < before
        before = start
        put(out, bag, start)
    return first == 0 and before == num_ids and not descends


@inline
def _pool_max(
    low: int, high: int, shift: int, slots: Int32s, weights: Weights, dtype_code: int, pooled: Floats, best: Int32s
) -> None:
    for position in range(low, high):
        slot = np.int64(item(slots, position + shift))
        for column in range(pooled.shape[0]):
            value = load(weights, slot, column, dtype_code, 1)
            if best[column] < 0 or value > pooled[column]:
                pooled[column] = value
                best[column] = position


@uncounted_kernel
def padded_width(dim: int) -> int:
    """Columns that ``halving_sum`` wants for ``dim`` terms: a power of two, ``WIDEST`` at least."""
    width = WIDEST
    while width < dim:
        width *= 2
    return width


@inline
def halving_sum(work: Floats, row: int) -> np.float32:
    """Sum of the float32 in a row of ``work`` ([rows, a power of two >= 64]), in the order of a halving tree; the lower
    half of the row is used up.

    The upper half is added to the lower one until one element is left, and that to +0.0. More zeros behind the terms
    change no bit, and a CPU's vector unit can follow this order as well as a GPU's threads."""
    width = work.shape[1]
    while width > WIDEST:
        width //= 2
        for column in range(0, width, WIDEST):
            upper = load(work, row, width + column, FLOAT32, WIDEST)
            store(work, row, column, load(work, row, column, FLOAT32, WIDEST) + upper, FLOAT32, WIDEST)
    return np.float32(np.float32(0) + halved(load(work, row, 0, FLOAT32, WIDEST)))


@kernel
def dot_rows(
    begin: int, end: int, first: int, last: int, bag_starts: Int64s, slots: Int32s, weights: Weights, dim: int,
    dtype_code: int, columns: Int32s, batch: int, grad_out: Floats, grad_scale: Floats,
) -> None:  # fmt: skip
    """Gradient of per-sample weights: ``grad_scale[p] = row(p) . grad_out[bag of p]``, positions ``[first, last)``,
    summed as ``halving_sum`` does."""
    work = np.zeros((1, padded_width(dim)), np.float32)
    for bag in range(begin, end):
        low, high = max(bag_starts[bag], first), min(bag_starts[bag + 1], last)
        sample, target = bag % batch, np.int64(columns[bag // batch])
        for position in range(low, high):
            slot, column = np.int64(slots[position - first]), np.int64(0)
            column = _multiply(16, column, dim, weights, slot, dtype_code, grad_out, sample, target, work)
            column = _multiply(4, column, dim, weights, slot, dtype_code, grad_out, sample, target, work)
            _multiply(1, column, dim, weights, slot, dtype_code, grad_out, sample, target, work)
            grad_scale[position] = halving_sum(work, 0)


@template
def _multiply(
    lanes: int, column: Any, dim: int, weights: Weights, slot: Any, dtype_code: int, grad_out: Floats, sample: int,
    target: Any, work: Floats,
) -> Any:  # fmt: skip
    """The products of a row's columns with a bag's gradient into ``work``, as ``_pool_columns``."""
    while column + lanes <= dim:
        gradient = load(grad_out, sample, target + column, FLOAT32, lanes)
        store(work, 0, column, load(weights, slot, column, dtype_code, lanes) * gradient, FLOAT32, lanes)
        column += lanes
    return column


@kernel
def copy_rows_out(slots: Int32s, weights: Weights, dim: int, out: Weights) -> None:
    """``out[i] = weights[slots[i], :dim]``, bits unchanged."""
    for i in range(slots.shape[0]):
        row, target = weights[slots[i]], out[i]
        for column in range(dim):
            target[column] = row[column]


@kernel
def copy_rows_in(slots: Int32s, rows: Weights, weights: Weights, dim: int) -> None:
    """``weights[slots[i], :dim] = rows[i]`` in order, so that the last of equal ids wins."""
    for i in range(slots.shape[0]):
        row, target = rows[i], weights[slots[i]]
        for column in range(dim):
            target[column] = row[column]


@kernel
def put_rows(
    begin: int, end: int, slots: Int32s, weights: Words, state: Words, new_weights: Words, new_state: Words
) -> None:
    """``arena[slots[i]] = new[i]`` for i in [begin, end), both arenas (uint64 [S, words]); slots are distinct. Three
    times as fast as numpy's assignment; the other way round ``numpy.take`` is the faster one."""
    for i in range(begin, end):
        row, source = weights[slots[i]], new_weights[i]
        for word in range(source.shape[0]):
            row[word] = source[word]
        row, source = state[slots[i]], new_state[i]
        for word in range(source.shape[0]):
            row[word] = source[word]


@kernel
def fill_state(slots: Int32s, state: Floats, dim: int, value: float) -> None:
    """``state[slots[i], :dim] = value``, and 0 from there on."""
    for slot in slots:
        for column in range(state.shape[1]):
            state[slot, column] = np.float32(value if column < dim else 0)


@uncounted_kernel
def group_rows(
    begin: int, end: int, table_bags: Int64s, bag_starts: Int64s, columns: Ids, batch: int, num_columns: int,
    slots: Int32s, number: Int32s, unique_slots: Int32s, inverse: Int32s, scale: Floats, is_mean: bool, counts: Int64s,
    starts: Int64s, sources: Int64s, factors: Floats, positions: Int32s, bags: Int32s,
) -> None:  # fmt: skip
    """Group the positions of the tables ``[begin, end)`` by row, each group in id-list order (a counting sort).

    Rows of a table are numbered from 0 in order of first use. With p the table's first position, what belongs to its
    row u lies at ``p + starts[p + 2 * table + u]`` and the places behind it, up to that of row u + 1.

    Args:
        table_bags: int64 [T + 1], the bags of each table.
        bag_starts: int64 [K + 1]; columns: int32 or int64 [F]; batch: bags of a feature.
        num_columns: C.
        slots: int32 [N], slot of each position.
        number: int32 [S], scratch, all 0 before and after.
        unique_slots: int32 [N], out: row u of the table is in slot ``unique_slots[p + u]``.
        inverse: int32 [N], out, number of each position's row.
        scale: float32 [N], per-sample weights, or empty; is_mean: gradients are divided by the sizes of the bags.
        counts: int64 [T], out: rows of each table.
        starts: int64 [N + 2 * T], out.
        sources: int64 [N], out: where the position's gradient begins in ``grad_out``, as one run of float32.
        factors: float32 [N], out, or empty: what the gradient is multiplied by.
        positions, bags: int32 [N], out, or empty: the positions themselves, and their bags.
    """
    for table in range(begin, end):
        first, last = bag_starts[table_bags[table]], bag_starts[table_bags[table + 1]]
        start = starts[first + 2 * table : last + 2 * table + 2]
        count = _number_rows(first, last, slots, number, unique_slots, inverse)
        counts[table] = count
        start[: count + 2] = 0
        for position in range(first, last):
            row = np.int64(item(inverse, position)) + 2
            put(start, row, item(start, row) + 1)
        for number_of_row in range(count):
            start[number_of_row + 2] += start[number_of_row + 1]
        for bag in range(table_bags[table], table_bags[table + 1]):
            source = np.int64(bag % batch) * num_columns + columns[bag // batch]
            size = bag_starts[bag + 1] - bag_starts[bag]
            for position in range(bag_starts[bag], bag_starts[bag + 1]):
                row = np.int64(item(inverse, position)) + 1
                place = first + item(start, row)
                put(start, row, place - first + 1)
                put(sources, place, source)
                if factors.shape[0]:
                    factors[place] = np.float32(1) / np.float32(size) if is_mean else scale[position]
                if positions.shape[0]:
                    positions[place] = position
                    bags[place] = bag


@inline
def _number_rows(first: int, last: int, slots: Int32s, number: Int32s, unique_slots: Int32s, inverse: Int32s) -> int:
    count: Any = np.int64(0)
    for position in range(first, last):  # without a branch: whether a row is new, no processor foretells
        if position + AHEAD < last:
            prefetch_item(number, np.int64(item(slots, position + AHEAD)))
        slot = item(slots, position)
        known = np.int64(item(number, slot)) - 1
        is_new = np.int64(known < 0)
        known += is_new * (count + 1)
        put(number, slot, np.int32(known + 1))
        put(inverse, position, np.int32(known))
        put(unique_slots, first + count, slot)  # the next one overwrites it, if the row is not new
        count += is_new
    for row in range(count):
        put(number, item(unique_slots, first + row), np.int32(0))
    return int(count)


@kernel
def order_by_sample(bag_starts: Ids, batch: int, order: Int32s) -> None:
    """The positions (int32 [N], out) of key-major bags (``Jagged``) sample by sample; int64 or int32 [K + 1]."""
    place: Any = np.int64(0)
    for sample in range(batch):
        for bag in range(sample, bag_starts.shape[0] - 1, batch):
            for position in range(bag_starts[bag], bag_starts[bag + 1]):
                order[place] = position
                place += 1


@kernel
def unique_in_order(keys: Int64s, scratch: Int32s, unique_keys: Int64s, inverse: Int32s, secret: int) -> int:
    """Number the distinct keys (int64 [N]) in order of first use; how many there are. ``scratch``: int32 [a power of
    two >= 2 N], all -1; ``unique_keys``, ``inverse``: out [N]; ``secret``: of ``hashing``."""
    mask = np.uint64(scratch.shape[0] - 1)
    count = 0
    for position in range(keys.shape[0]):
        key = keys[position]
        place = keyed_hash(key, secret) & mask
        while scratch[place] >= 0 and unique_keys[scratch[place]] != key:
            place = np.uint64(place + np.uint64(1)) & mask
        if scratch[place] < 0:
            scratch[place] = count
            unique_keys[count] = key
            count += 1
        inverse[position] = scratch[place]
    return count


@inline
def _value(code: int, first: float, second: float, row_bits: np.uint64, column: int) -> np.float32:
    if code == _CONSTANT:
        return np.float32(first)
    bits = mix64(np.uint64(row_bits + np.uint64(column)))
    if code == _UNIFORM:
        value = np.float32(first + (second - first) * unit(bits))
        # Rounding to float32 may reach the open end; step back inside.
        return value if value < second or first == second else np.float32(first)
    radius = math.sqrt(-2.0 * math.log(1.0 - unit(bits)))
    angle = 2.0 * math.pi * unit(mix64(np.uint64(bits ^ np.uint64(0xD1B54A32D192ED03))))
    return np.float32(first + second * radius * math.cos(angle))


@kernel
def fill_rows(
    code: int, first: float, second: float, seed: np.uint64, first_column: int, keys: Int64s, slots: Int32s,
    weights: Weights, dim: int, dtype_code: int,
) -> None:  # fmt: skip
    """Initial weights of ``keys`` into ``slots``; see ``Initializer.fill``."""
    seed_bits = mix64(seed)
    for i in range(keys.shape[0]):
        if i + AHEAD < keys.shape[0]:
            prefetch_item(weights, (np.int64(slots[i + AHEAD]), 0))
        row_bits = mix64(np.uint64(seed_bits ^ np.uint64(keys[i])))
        slot = slots[i]
        for column in range(dim):
            store(weights, slot, column, _value(code, first, second, row_bits, first_column + column), dtype_code, 1)
        weights[slot, dim:] = 0
