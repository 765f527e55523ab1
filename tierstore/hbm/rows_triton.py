"""Kernels over rows in Triton: they join ids, pool and move rows, merge gradients and update rows. ``launches`` calls
them, ``twin`` says and checks what they compute.

All are bound by memory: pooling reads 4 D bytes a position and writes 4 D a bag, a dot product reads 8 D a position, an
update reads 4 D a position and reads and writes a row and its state once.

Rows lie anywhere, so what counts is how many are in flight. A program has two warps and a tile of TILE elements, four a
thread (16 bytes, the widest access); above D = 128 it has one row, and above 256 more warps for it. A step of a loop
loads the indices of four positions of each row, then their rows, 4 KiB a program, and then adds these in order, without
a barrier. Latency times bandwidth of an H100's memory asks for 25 KiB a multiprocessor, seven programs; registers leave
room for more (``tests/hbm/machine_code.py``). Strides are constants: so the compiler sees how rows are aligned.

Sums that have an order follow it by loops over positions and by explicit trees over columns; programs share no sum. The
host does not know U: grids are bounded by what it knows, and kernels read U. Nothing here waits for the device.

Shape legend: N positions (ids of the batch), U unique rows, K = F * B bags, C output columns, S slots, D dim, T tables.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import triton
import triton.language as tl

from ..kernels import slots as kernels
from ..optim.configs import NUM_HYPER, SGD, Adagrad, RowWiseAdagrad
from ..optim.rules import RUN, SUPER_RUN

# Where the factor of a position's gradient comes from.
PLAIN, SCALED, AVERAGED, CHOSEN = (tl.constexpr(source) for source in range(4))
AT_ONCE: Final = tl.constexpr(4)  # positions of a row that a step of a loop takes; kernels name each of the four

_MEAN: Final = tl.constexpr(kernels.MEAN)
_MAX: Final = tl.constexpr(kernels.MAX)
_RUN: Final = tl.constexpr(RUN)
_SUPER_RUN: Final = tl.constexpr(SUPER_RUN)
_RUNS: Final = tl.constexpr(SUPER_RUN // RUN)
_NUM_HYPER: Final = tl.constexpr(NUM_HYPER)
_SGD: Final = tl.constexpr(SGD.code)
_ROWWISE_ADAGRAD: Final = tl.constexpr(RowWiseAdagrad.code)
_ADAGRAD: Final = tl.constexpr(Adagrad.code)

INDICES: Final = [
    "bag_starts", "bag_of", "columns", "scale", "slots", "inverse", "order", "starts", "num_unique", "table_of",
    "code_of", "hyper", "dirty",
]  # fmt: skip
"""Tensors read a number at a time: wherever they begin, the machine code is the same."""


@triton.jit
def as_float32(value, BFLOAT16: tl.constexpr):
    """Elements of rows; bfloat16 comes as int16, because Triton's interpreter rounds it in another way."""
    if BFLOAT16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def store_rows(pointers, value, mask, BFLOAT16: tl.constexpr):
    """Inverse of ``as_float32``, to nearest, ties to even; see ``floats.float_to_bits``."""
    if BFLOAT16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        not_a_number = ((bits >> 16) & 0x8000) | 0x7FC0
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, not_a_number, rounded)
        tl.store(pointers, bits.to(tl.int16), mask=mask)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def tree_sum(terms, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``kernels.halving_sum`` of each row of [ROWS, WIDTH]. Only pairs are summed: the order is free."""
    if WIDTH == 1:
        return 0.0 + tl.reshape(terms, [ROWS])
    else:
        half: tl.constexpr = WIDTH // 2
        return tree_sum(tl.sum(tl.reshape(terms, [ROWS, 2, half]), axis=1), ROWS, half)


@triton.jit
def halve(starts, place, low, high):
    """(low, high): the half of each range ``[low, high)`` with the last number whose start is not behind the place."""
    middle = (low + high) // 2
    before = tl.load(starts + middle) <= place
    return tl.where(before, middle, low), tl.where(before, high, middle)


@triton.jit(do_not_specialize=["num_positions", "num_bags", "search_steps"], do_not_specialize_on_alignment=INDICES)
def number_positions(bag_starts, bag_of, num_positions, num_bags, search_steps, BLOCK: tl.constexpr):
    """The bag of each of BLOCK positions. ``search_steps``: bits of ``num_bags``."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bag, above = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_bags
    for _ in tl.range(0, search_steps):
        bag, above = halve(bag_starts, position, bag, above)
    tl.store(bag_of + position, bag, mask=position < num_positions)


@triton.jit(
    do_not_specialize=["num_ids", "num_offsets", "num_bags", "num_features", "batch", "search_steps"],
    do_not_specialize_on_alignment=[*INDICES, "ids", "offsets", "firsts", "num_rows", "rows", "own_scale", "is_right",
    "record"],
)  # fmt: skip
def join_tile(
    ids, offsets, scale, firsts, num_rows, bag_starts, bag_of, rows, own_scale, is_right, record,
    num_ids, num_offsets, num_bags, num_features, batch, search_steps, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK offsets and BLOCK positions, each of them checked. ``search_steps``: bits of ``num_bags``."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = place < num_offsets
    start = tl.load(offsets + place, mask=given, other=num_ids)
    before = tl.load(offsets + place - 1, mask=given & (place > 0), other=0)
    is_off = given & ((start < before) | (start > num_ids) | ((place == 0) & (start != 0)))
    is_off |= (place == num_bags) & (start != num_ids)
    inside = tl.minimum(tl.maximum(start, 0), num_ids).to(tl.int32)
    tl.store(bag_starts + place, inside, mask=place <= num_bags)
    active = place < num_ids
    bag, above = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_bags
    for _ in tl.range(0, search_steps):
        bag, above = halve(offsets, place, bag, above)
    feature = bag // batch
    row = tl.load(ids + place, mask=active, other=0).to(tl.int64)
    is_no_row = active & ((row < 0) | (row >= tl.load(num_rows + feature)))
    tl.store(record + feature, row, mask=is_no_row)
    tl.store(record + num_features + place * 0, place.to(tl.int64) + 1, mask=is_off)
    tl.store(is_right + place * 0, place * 0, mask=is_no_row | is_off)
    row = tl.where(is_no_row, 0, row) + tl.load(firsts + feature)
    tl.store(rows + place, row.to(rows.dtype.element_ty), mask=active)
    tl.store(bag_of + place, bag, mask=active)
    if HAS_SCALE:
        tl.store(own_scale + place, tl.load(scale + place, mask=active, other=0), mask=active)


@triton.jit
def result_places(bag, columns, mask, batch, stride, STEP: tl.constexpr):
    """int64, multiples of STEP: where the results of bags begin in a matrix [B, C] of that stride."""
    column = tl.load(columns + bag // batch, mask=mask, other=0)
    return tl.multiple_of((bag % batch).to(tl.int64) * stride + column, STEP)


@triton.jit
def slot_of(slots, inverse, place, mask, HAS_INVERSE: tl.constexpr):
    """int64; ``place`` is counted from the first position of the call."""
    if HAS_INVERSE:
        place = tl.load(inverse + place, mask=mask, other=0)
    return tl.load(slots + place, mask=mask, other=0).to(tl.int64)


@triton.jit
def scale_of(scale, position, mask, HAS_SCALE: tl.constexpr):
    if HAS_SCALE:
        return tl.load(scale + position, mask=mask, other=0)
    else:
        return position


@triton.jit
def add_row(
    pooled, best, value, factor, position, active, cells,
    MODE: tl.constexpr, HAS_SCALE: tl.constexpr, BFLOAT16: tl.constexpr,
):  # fmt: skip
    """(pooled, best) with a row added to each bag that is ``active``; ``cells`` are the columns there are."""
    lanes = active[:, None] & cells
    value = as_float32(value, BFLOAT16)
    if MODE == _MAX:
        wins = lanes & ((best < 0) | (value > pooled))
        pooled = tl.where(wins, value, pooled)
        best = tl.where(wins, position[:, None], best)
    else:
        if HAS_SCALE:
            value = factor[:, None] * value
        pooled = tl.where(lanes, pooled + value, pooled)
    return pooled, best


@triton.jit(
    do_not_specialize=["first", "last", "num_bags", "batch", "out_stride"], do_not_specialize_on_alignment=INDICES
)
def pool_bags(
    bag_starts, columns, scale, slots, inverse, weights, out, arg_max, first, last, num_bags, batch, out_stride,
    MODE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_INVERSE: tl.constexpr, FRESH: tl.constexpr,
    BFLOAT16: tl.constexpr, DIM: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    BAGS: tl.constexpr,
):  # fmt: skip
    """A tile of BAGS bags; each step of the loop adds the next rows of every bag that has some.

    FRESH: the range begins at position 0, so nothing is read of results, and all are written.
    """
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    written = bag < num_bags
    start = tl.load(bag_starts + bag, mask=written, other=0)
    stop = tl.load(bag_starts + bag + 1, mask=written, other=0)
    low, high = tl.maximum(start, first), tl.minimum(stop, last)
    if not FRESH:
        written = low < high
    column = tl.arange(0, WIDTH)[None, :]
    cells = column < DIM
    targets = out + result_places(bag, columns, written, batch, out_stride, STEP)[:, None] + column
    bests = arg_max + bag.to(tl.int64)[:, None] * DIM + column
    pooled = tl.zeros([BAGS, WIDTH], tl.float32)
    best = tl.full([BAGS, WIDTH], -1, tl.int32)
    if not FRESH:
        pooled = tl.load(targets, mask=written[:, None] & cells, other=0)
        if MODE == _MAX:
            best = tl.load(bests, mask=written[:, None] & cells, other=0)
    for step in tl.range(0, tl.max(high - low), AT_ONCE):
        position0 = low + step
        position1, position2, position3 = position0 + 1, position0 + 2, position0 + 3
        active0, active1, active2, active3 = position0 < high, position1 < high, position2 < high, position3 < high
        slot0 = slot_of(slots, inverse, position0 - first, active0, HAS_INVERSE)
        slot1 = slot_of(slots, inverse, position1 - first, active1, HAS_INVERSE)
        slot2 = slot_of(slots, inverse, position2 - first, active2, HAS_INVERSE)
        slot3 = slot_of(slots, inverse, position3 - first, active3, HAS_INVERSE)
        factor0 = scale_of(scale, position0, active0, HAS_SCALE)
        factor1 = scale_of(scale, position1, active1, HAS_SCALE)
        factor2 = scale_of(scale, position2, active2, HAS_SCALE)
        factor3 = scale_of(scale, position3, active3, HAS_SCALE)
        row0 = tl.load(weights + slot0[:, None] * WEIGHT_STRIDE + column, mask=active0[:, None] & cells, other=0)
        row1 = tl.load(weights + slot1[:, None] * WEIGHT_STRIDE + column, mask=active1[:, None] & cells, other=0)
        row2 = tl.load(weights + slot2[:, None] * WEIGHT_STRIDE + column, mask=active2[:, None] & cells, other=0)
        row3 = tl.load(weights + slot3[:, None] * WEIGHT_STRIDE + column, mask=active3[:, None] & cells, other=0)
        pooled, best = add_row(pooled, best, row0, factor0, position0, active0, cells, MODE, HAS_SCALE, BFLOAT16)
        pooled, best = add_row(pooled, best, row1, factor1, position1, active1, cells, MODE, HAS_SCALE, BFLOAT16)
        pooled, best = add_row(pooled, best, row2, factor2, position2, active2, cells, MODE, HAS_SCALE, BFLOAT16)
        pooled, best = add_row(pooled, best, row3, factor3, position3, active3, cells, MODE, HAS_SCALE, BFLOAT16)
    if MODE == _MAX:
        tl.store(bests, best, mask=written[:, None] & cells)
    if MODE == _MEAN:
        count = tl.maximum(stop - start, 1).to(tl.float32)[:, None]
        pooled = tl.where((high == stop)[:, None], tl.div_rn(pooled, count), pooled)
    tl.store(targets, pooled, mask=written[:, None] & cells)


@triton.jit(do_not_specialize=["first", "last", "batch", "grad_stride"], do_not_specialize_on_alignment=INDICES)
def dot_positions(
    bag_of, columns, slots, inverse, weights, grad_out, grad_scale, first, last, batch, grad_stride,
    HAS_INVERSE: tl.constexpr, BFLOAT16: tl.constexpr, DIM: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    active = place < last - first
    column = tl.arange(0, WIDTH)[None, :]
    lanes = active[:, None] & (column < DIM)
    bag = tl.load(bag_of + first + place, mask=active, other=0)
    slot = slot_of(slots, inverse, place, active, HAS_INVERSE)
    places = result_places(bag, columns, active, batch, grad_stride, STEP)[:, None] + column
    source = tl.load(grad_out + places, mask=lanes, other=0)
    value = tl.load(weights + slot[:, None] * WEIGHT_STRIDE + column, mask=lanes, other=0)
    total = tree_sum(as_float32(value, BFLOAT16) * source, ROWS, WIDTH)
    tl.store(grad_scale + first + place, total, mask=active)


@triton.jit
def move_words(arena, buffer, slot, row, inside, WORDS: tl.constexpr, WIDTH: tl.constexpr, UP: tl.constexpr):
    word = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (word < WORDS)
    on_device = arena + slot[:, None] * WORDS + word
    on_host = buffer + row[:, None] * WORDS + word
    if UP:
        tl.store(on_device, tl.load(on_host, mask=mask), mask=mask)
    else:
        tl.store(on_host, tl.load(on_device, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def move_tile(
    weights, state, host_weights, host_state, slots, count, WEIGHT_WORDS: tl.constexpr, STATE_WORDS: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr, STATE_WIDTH: tl.constexpr, UP: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    row = row.to(tl.int64)
    move_words(weights, host_weights, slot, row, inside, WEIGHT_WORDS, WEIGHT_WIDTH, UP)
    if STATE_WORDS:
        move_words(state, host_state, slot, row, inside, STATE_WORDS, STATE_WIDTH, UP)


@triton.jit
def factor_of(bag_starts, scale, position, bag, mask, SOURCE: tl.constexpr):
    if SOURCE == SCALED:
        return tl.load(scale + position, mask=mask, other=0)
    elif SOURCE == AVERAGED:
        start = tl.load(bag_starts + bag, mask=mask, other=0)
        return tl.div_rn(1.0, (tl.load(bag_starts + bag + 1, mask=mask, other=1) - start).to(tl.float32))
    else:
        return position


@triton.jit
def winner_of(arg_max, bag, lanes, DIM: tl.constexpr, WIDTH: tl.constexpr, SOURCE: tl.constexpr):
    if SOURCE == CHOSEN:
        return tl.load(arg_max + bag.to(tl.int64)[:, None] * DIM + tl.arange(0, WIDTH)[None, :], mask=lanes, other=-1)
    else:
        return lanes


@triton.jit
def add_gradient(gradient, source, factor, winner, position, lanes, SOURCE: tl.constexpr):
    if SOURCE == CHOSEN:
        lanes = lanes & (winner == position[:, None])
    elif SOURCE != PLAIN:
        source = factor[:, None] * source
    return tl.where(lanes, gradient + source, gradient)


@triton.jit
def sum_gradients(
    low, high, order, bag_of, bag_starts, columns, scale, arg_max, grad_out, batch, grad_stride,
    SOURCE: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, WIDTH]: the gradients of the positions ``order[low:high]`` of each row, one after another."""
    column = tl.arange(0, WIDTH)[None, :]
    cells = column < DIM
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in tl.range(0, tl.max(high - low), AT_ONCE):
        place = low + step
        active0, active1, active2, active3 = place < high, place + 1 < high, place + 2 < high, place + 3 < high
        position0 = tl.load(order + place, mask=active0, other=0).to(tl.int32)
        position1 = tl.load(order + place + 1, mask=active1, other=0).to(tl.int32)
        position2 = tl.load(order + place + 2, mask=active2, other=0).to(tl.int32)
        position3 = tl.load(order + place + 3, mask=active3, other=0).to(tl.int32)
        bag0 = tl.load(bag_of + position0, mask=active0, other=0)
        bag1 = tl.load(bag_of + position1, mask=active1, other=0)
        bag2 = tl.load(bag_of + position2, mask=active2, other=0)
        bag3 = tl.load(bag_of + position3, mask=active3, other=0)
        factor0 = factor_of(bag_starts, scale, position0, bag0, active0, SOURCE)
        factor1 = factor_of(bag_starts, scale, position1, bag1, active1, SOURCE)
        factor2 = factor_of(bag_starts, scale, position2, bag2, active2, SOURCE)
        factor3 = factor_of(bag_starts, scale, position3, bag3, active3, SOURCE)
        places0 = result_places(bag0, columns, active0, batch, grad_stride, STEP)[:, None] + column
        places1 = result_places(bag1, columns, active1, batch, grad_stride, STEP)[:, None] + column
        places2 = result_places(bag2, columns, active2, batch, grad_stride, STEP)[:, None] + column
        places3 = result_places(bag3, columns, active3, batch, grad_stride, STEP)[:, None] + column
        lanes0, lanes1 = active0[:, None] & cells, active1[:, None] & cells
        lanes2, lanes3 = active2[:, None] & cells, active3[:, None] & cells
        source0 = tl.load(grad_out + places0, mask=lanes0, other=0)
        source1 = tl.load(grad_out + places1, mask=lanes1, other=0)
        source2 = tl.load(grad_out + places2, mask=lanes2, other=0)
        source3 = tl.load(grad_out + places3, mask=lanes3, other=0)
        winner0 = winner_of(arg_max, bag0, lanes0, DIM, WIDTH, SOURCE)
        winner1 = winner_of(arg_max, bag1, lanes1, DIM, WIDTH, SOURCE)
        winner2 = winner_of(arg_max, bag2, lanes2, DIM, WIDTH, SOURCE)
        winner3 = winner_of(arg_max, bag3, lanes3, DIM, WIDTH, SOURCE)
        gradient = add_gradient(gradient, source0, factor0, winner0, position0, lanes0, SOURCE)
        gradient = add_gradient(gradient, source1, factor1, winner1, position1, lanes1, SOURCE)
        gradient = add_gradient(gradient, source2, factor2, winner2, position2, lanes2, SOURCE)
        gradient = add_gradient(gradient, source3, factor3, winner3, position3, lanes3, SOURCE)
    return gradient


@triton.jit
def add_runs(total, number, stop, runs, DIM: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr):
    """``total``, [ROWS, WIDTH], and then ``runs[number]``, ``runs[number + APART]`` and so on below ``stop``, of each
    row, one after another. ``number`` and ``stop`` are int32 [ROWS]."""
    column = tl.arange(0, WIDTH)[None, :]
    cells = column < DIM
    for step in tl.range(0, tl.max(stop - number), AT_ONCE * APART):
        place0 = number + step
        place1, place2, place3 = place0 + APART, place0 + 2 * APART, place0 + 3 * APART
        lanes0, lanes1 = (place0 < stop)[:, None] & cells, (place1 < stop)[:, None] & cells
        lanes2, lanes3 = (place2 < stop)[:, None] & cells, (place3 < stop)[:, None] & cells
        run0 = tl.load(runs + place0.to(tl.int64)[:, None] * DIM + column, mask=lanes0, other=0)
        run1 = tl.load(runs + place1.to(tl.int64)[:, None] * DIM + column, mask=lanes1, other=0)
        run2 = tl.load(runs + place2.to(tl.int64)[:, None] * DIM + column, mask=lanes2, other=0)
        run3 = tl.load(runs + place3.to(tl.int64)[:, None] * DIM + column, mask=lanes3, other=0)
        total = tl.where(lanes0, total + run0, total)
        total = tl.where(lanes1, total + run1, total)
        total = tl.where(lanes2, total + run2, total)
        total = tl.where(lanes3, total + run3, total)
    return total


@triton.jit
def begins_in(corner, starts, num_unique, first_unique, count, LENGTH: tl.constexpr):
    """(low, stop, active): of each block ``[corner, corner + LENGTH)`` of ``order`` the piece of LENGTH places, not
    the first of its row, that begins in it; where its row stops; and whether there is one.

    One at most, since such pieces begin LENGTH places or more apart. Its row also has the block's first place, which a
    search in ``starts`` finds.
    """
    bound = tl.minimum(first_unique + count, tl.load(num_unique))
    # Behind U, ``starts`` is undefined. Of no rows, the places are those before row 0.
    stop_unique = tl.where(first_unique < bound, bound, 0)
    first = tl.minimum(first_unique, stop_unique)
    active = (corner > tl.load(starts + first)) & (corner < tl.load(starts + stop_unique))
    row, above = tl.zeros_like(corner) + first, tl.zeros_like(corner) + stop_unique
    # As many steps as int32 has bits. Around a loop, the compiler would keep rows' numbers in another layout than the
    # loop over positions needs, which then has barriers.
    for _ in tl.static_range(31):
        row, above = halve(starts, corner, row, above)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    low = start + (corner - start + LENGTH - 1) // LENGTH * LENGTH
    return low, stop, active & (corner > start) & (low < stop)


@triton.jit(do_not_specialize=["first_unique", "count", "batch", "grad_stride"], do_not_specialize_on_alignment=INDICES)
def sum_runs(
    order, starts, num_unique, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs, first_unique, count,
    batch, grad_stride,
    SOURCE: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the runs of each row but its first: that of a run goes to ``runs[its first place // RUN]``.

    A tile of ROWS blocks of RUN places of ``order``. No program need know what others found.
    """
    corner = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * _RUN
    low, stop, active = begins_in(corner, starts, num_unique, first_unique, count, _RUN)
    high = tl.where(active, tl.minimum(low + _RUN, stop), low)
    total = sum_gradients(
        low, high, order, bag_of, bag_starts, columns, scale, arg_max, grad_out, batch, grad_stride,
        SOURCE, DIM, STEP, WIDTH, ROWS,
    )  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    targets = runs + (corner // _RUN).to(tl.int64)[:, None] * DIM + column
    tl.store(targets, total, mask=active[:, None] & (column < DIM))


@triton.jit(do_not_specialize=["first_unique", "count"], do_not_specialize_on_alignment=INDICES)
def sum_super_runs(
    starts, num_unique, runs, first_unique, count, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the super-runs of each row but its first, each in place of that of its first run.

    A tile of ROWS blocks of SUPER_RUN places of ``order``.
    """
    corner = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * _SUPER_RUN
    low, stop, active = begins_in(corner, starts, num_unique, first_unique, count, _SUPER_RUN)
    number = low // _RUN
    column = tl.arange(0, WIDTH)[None, :]
    lanes = active[:, None] & (column < DIM)
    targets = runs + number.to(tl.int64)[:, None] * DIM + column
    stop = number + (tl.minimum(low + _SUPER_RUN, stop) - low + _RUN - 1) // _RUN
    total = tl.load(targets, mask=lanes, other=0)
    total = add_runs(total, number + 1, tl.where(active, stop, 0), runs, DIM, WIDTH, 1)
    tl.store(targets, total, mask=lanes)


@triton.jit
def merge_gradients(
    start, stop, order, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs, batch, grad_stride,
    SOURCE: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, WIDTH]: the gradient of each row, in the canonical order of ``optim.rules``: its first run is
    summed here, the others have been summed, and so have all super-runs but the first."""
    gradient = sum_gradients(
        start, tl.minimum(start + _RUN, stop), order, bag_of, bag_starts, columns, scale, arg_max, grad_out, batch,
        grad_stride, SOURCE, DIM, STEP, WIDTH, ROWS,
    )  # fmt: skip
    # A row's runs all begin at the same place of their blocks.
    first = start // _RUN
    num_runs = (stop - start + _RUN - 1) // _RUN
    gradient = add_runs(gradient, first + 1, first + tl.minimum(num_runs, _RUNS), runs, DIM, WIDTH, 1)
    return add_runs(gradient, first + _RUNS, first + num_runs, runs, DIM, WIDTH, _RUNS)


@triton.jit
def hyper_column(hyper, table, mask, COLUMN: tl.constexpr):
    """[ROWS, 1]; where there is no row, one, by which division is harmless."""
    return tl.load(hyper + table * _NUM_HYPER + COLUMN, mask=mask, other=1.0)[:, None]


@triton.jit
def step_of_rows(
    gradient, accumulator, state, place, hyper, table, active,
    CODE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What an optimizer subtracts from each row, [ROWS, WIDTH]; ``state`` is updated. See ``optim.configs``."""
    column = tl.arange(0, WIDTH)[None, :]
    lanes = active[:, None] & (column < DIM)
    lr, eps = hyper_column(hyper, table, active, 0), hyper_column(hyper, table, active, 2)
    places = state + place[:, None] + column
    if CODE == _SGD:
        step = lr * gradient
    elif CODE == _ROWWISE_ADAGRAD:
        squares = tree_sum(tl.where(lanes, gradient * gradient, 0.0), ROWS, WIDTH)
        accumulator += tl.div_rn(squares, tl.full([ROWS], DIM, tl.float32))
        tl.store(state + place, accumulator, mask=active)
        step = tl.div_rn(lr, tl.sqrt_rn(accumulator)[:, None] + eps) * gradient
    elif CODE == _ADAGRAD:
        accumulators = tl.load(places, mask=lanes, other=0) + gradient * gradient
        tl.store(places, accumulators, mask=lanes)
        step = tl.div_rn(lr * gradient, tl.sqrt_rn(accumulators) + eps)
    else:
        beta1, beta2 = hyper_column(hyper, table, active, 3), hyper_column(hyper, table, active, 4)
        step_size, root_correction = hyper_column(hyper, table, active, 5), hyper_column(hyper, table, active, 6)
        first = beta1 * tl.load(places, mask=lanes, other=0) + (1.0 - beta1) * gradient
        second = beta2 * tl.load(places + DIM, mask=lanes, other=0) + (1.0 - beta2) * gradient * gradient
        tl.store(places, first, mask=lanes)
        tl.store(places + DIM, second, mask=lanes)
        step = tl.div_rn(step_size * first, tl.div_rn(tl.sqrt_rn(second), root_correction) + eps)
    return step


@triton.jit(do_not_specialize=["first_unique", "count", "batch", "grad_stride"], do_not_specialize_on_alignment=INDICES)
def update_tile(
    order, starts, num_unique, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs, slots, table_of, code_of,
    hyper, weights, state, dirty, first_unique, count, batch, grad_stride,
    CODE: tl.constexpr, MIXED: tl.constexpr, HAS_DIRTY: tl.constexpr, SOURCE: tl.constexpr, BFLOAT16: tl.constexpr,
    DIM: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS unique rows, those ruled by optimizer CODE (MIXED: others may be ruled otherwise): merge and store.

    Of more tiles than programs each takes several: U may be far below N, and programs without rows cost an H200 up to
    half of the time. A slot is read again behind the sum: held, it would take registers of rows in flight.
    """
    num_rows = tl.minimum(count, tl.load(num_unique) - first_unique)
    for corner in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        number = corner + tl.arange(0, ROWS)
        row, active = first_unique + number, number < num_rows
        start = tl.load(starts + row, mask=active, other=0)
        stop = tl.load(starts + row + 1, mask=active, other=0)
        bag = tl.load(bag_of + tl.load(order + start, mask=active, other=0), mask=active, other=0)
        table = tl.load(table_of + bag // batch, mask=active, other=0)
        if MIXED:
            active = active & (tl.load(code_of + table, mask=active, other=-1) == CODE)
        accumulator = table
        if CODE == _ROWWISE_ADAGRAD:
            place = slot_of(slots, slots, number, active, HAS_INVERSE=False) * STATE_STRIDE
            accumulator = tl.load(state + place, mask=active, other=0)  # on its way while gradients are summed
        gradient = merge_gradients(
            start, tl.where(active, stop, start), order, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs,
            batch, grad_stride, SOURCE, DIM, STEP, WIDTH, ROWS,
        )  # fmt: skip
        column, slot = tl.arange(0, WIDTH)[None, :], slot_of(slots, slots, number, active, HAS_INVERSE=False)
        lanes = active[:, None] & (column < DIM)
        targets = weights + slot[:, None] * WEIGHT_STRIDE + column
        value = as_float32(tl.load(targets, mask=lanes, other=0), BFLOAT16)
        weight_decay = hyper_column(hyper, table, active, 1)
        gradient = tl.where(weight_decay != 0, gradient + weight_decay * value, gradient)
        place, kept = slot * STATE_STRIDE, hyper_column(hyper, table, active, 7) * value
        step = step_of_rows(gradient, accumulator, state, place, hyper, table, active, CODE, DIM, WIDTH, ROWS)
        store_rows(targets, kept - step, lanes, BFLOAT16)
        if HAS_DIRTY:
            tl.store(dirty + slot, tl.full([ROWS], 1, tl.uint8), mask=active)
