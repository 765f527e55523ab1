"""Kernels that ``rows_triton`` launches: those that join, pool and move rows, and what they share with its own."""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import triton
import triton.language as tl

from ..kernels import slots as kernels

AT_ONCE: Final = tl.constexpr(4)  # positions of a row that a step of a loop takes; kernels name each of the four

_MEAN: Final = tl.constexpr(kernels.MEAN)
_MAX: Final = tl.constexpr(kernels.MAX)

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
