"""Kernels over rows in Triton: launches of all, and the kernels that merge gradients and update rows; the others are in
``pooling_triton``. Their twins in ``rows_twin`` say and check what they compute.

All are bound by memory: pooling reads 4 D bytes a position and writes 4 D a bag, a dot product reads 8 D a position, an
update reads 4 D a position and reads and writes a row and its state once.

Rows lie anywhere, so what counts is how many are in flight. A program has two warps and a tile of TILE elements, four a
thread (16 bytes, the widest access); above D = 128 it has one row, and above 256 more warps for it. A step of a loop
loads the indices of four positions of each row, then their rows, 4 KiB a program, and then adds these in order. Latency
times bandwidth of an H100's memory asks for 25 KiB a multiprocessor, seven programs; registers leave room for more
(``tests/hbm/machine_code.py`` has the numbers). Loops have no barriers. Strides of rows are constants, so that the
compiler sees how rows are aligned.

Sums that have an order follow it by loops over positions and by explicit trees over columns; programs share no sum. The
host does not know U: grids are bounded by what it knows, and kernels read U. Nothing here waits for the device.

Shape legend: N positions (ids of the batch), U unique rows, K = F * B bags, C output columns, S slots, D dim, T tables.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..optim.configs import NUM_HYPER, SGD, Adagrad, RowWiseAdagrad
from ..optim.rules import RUN, SUPER_RUN
from . import pooling_triton as pooling
from .kernel_types import Bags, DeviceIds, Groups, launch
from .pooling_triton import AT_ONCE, INDICES, as_float32, halve, result_places, store_rows, tree_sum

TILE: Final = 256
NUMBER_TILE: Final = 256
MOVED_WORDS: Final = 512  # of 64 bits, that a program moves

# Where the factor of a position's gradient comes from.
PLAIN, SCALED, AVERAGED, CHOSEN = (tl.constexpr(source) for source in range(4))

_RUN: Final = tl.constexpr(RUN)
_SUPER_RUN: Final = tl.constexpr(SUPER_RUN)
_RUNS: Final = tl.constexpr(SUPER_RUN // RUN)
_NUM_HYPER: Final = tl.constexpr(NUM_HYPER)
_SGD: Final = tl.constexpr(SGD.code)
_ROWWISE_ADAGRAD: Final = tl.constexpr(RowWiseAdagrad.code)
_ADAGRAD: Final = tl.constexpr(Adagrad.code)


def number_bags(bag_starts: Tensor, bag_of: Tensor) -> None:
    num_bags = len(bag_starts) - 1
    launch(
        pooling.number_positions, (triton.cdiv(len(bag_of), NUMBER_TILE),), bag_starts, bag_of, len(bag_of), num_bags,
        num_bags.bit_length(), BLOCK=NUMBER_TILE,
    )  # fmt: skip


def join_ids(
    given: DeviceIds, firsts: Tensor, num_rows: Tensor, bags: Bags, rows: Tensor, is_right: Tensor, record: Tensor
) -> None:
    num_bags = len(bags.bag_starts) - 1
    launch(
        pooling.join_tile, (triton.cdiv(max(len(rows), num_bags + 1), NUMBER_TILE),), given.ids, given.offsets,
        _or_any(given.scale, rows), firsts, num_rows, bags.bag_starts, bags.bag_of, rows, _or_any(bags.scale, rows),
        is_right, record, len(rows), len(given.offsets), num_bags, len(firsts), bags.batch, num_bags.bit_length(),
        HAS_SCALE=given.scale is not None, BLOCK=NUMBER_TILE,
    )  # fmt: skip


def pool_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, mode: int, weights: Tensor, dim: int,
    out: Tensor, arg_max: Tensor | None,
) -> None:  # fmt: skip
    num_bags, tile = len(bags.bag_starts) - 1, _tile("BAGS", dim, bags, out)
    if first == last != 0:
        return
    launch(
        pooling.pool_bags, (triton.cdiv(num_bags, tile["BAGS"]),), bags.bag_starts, bags.columns,
        _or_any(bags.scale, out), slots, _or_any(inverse, slots), _plain(weights), out, _or_any(arg_max, slots), first,
        last, num_bags, bags.batch, out.stride(0), MODE=mode, HAS_SCALE=bags.scale is not None,
        HAS_INVERSE=inverse is not None, FRESH=first == 0, **_layout(weights), **tile,
    )  # fmt: skip


def dot_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, weights: Tensor, dim: int,
    grad_out: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    tile = _tile("ROWS", dim, bags, grad_out)
    launch(
        pooling.dot_positions, (triton.cdiv(last - first, tile["ROWS"]),), bags.bag_of, bags.columns, slots,
        _or_any(inverse, slots), _plain(weights), grad_out, grad_scale, first, last, bags.batch, grad_out.stride(0),
        HAS_INVERSE=inverse is not None, **_layout(weights), **tile,
    )  # fmt: skip


def update_rows(
    bags: Bags, groups: Groups, slots: Tensor, first_unique: int, *, grad_out: Tensor, arg_max: Tensor | None,
    mean: bool, codes: tuple[int, ...], code_of: Tensor, hyper: Tensor, weights: Tensor, state: Tensor, dim: int,
    dirty: Tensor | None,
) -> None:  # fmt: skip
    """As ``rows_twin.update_rows``. Rows of different optimizers are updated by launches of their own."""
    if arg_max is not None:
        source = CHOSEN
    elif mean:
        source = AVERAGED
    else:
        source = PLAIN if bags.scale is None else SCALED
    length, count, tile = len(groups.order), len(slots), _tile("ROWS", dim, bags, grad_out)
    if not count:
        return
    runs = grad_out.new_empty(triton.cdiv(length, RUN) if length > RUN else 0, dim)
    places = groups.starts, groups.num_unique
    gradients = (
        groups.order, *places, bags.bag_of, bags.bag_starts, bags.columns, _or_any(bags.scale, grad_out),
        _or_any(arg_max, slots), grad_out, runs,
    )  # fmt: skip
    if length > RUN:
        launch(
            sum_runs, (triton.cdiv(len(runs), tile["ROWS"]),), *gradients, first_unique, count, bags.batch,
            grad_out.stride(0), SOURCE=source.value, **tile,
        )  # fmt: skip
    if length > SUPER_RUN:
        launch(
            sum_super_runs, (triton.cdiv(length, SUPER_RUN),), *places, runs, first_unique, count,
            DIM=dim, WIDTH=tile["WIDTH"], ROWS=1, num_warps=tile["num_warps"] // 2, maxnreg=tile["maxnreg"],
        )  # fmt: skip
    rules = sorted(set(codes))
    for code in rules:
        launch(
            update_tile, (triton.cdiv(count, tile["ROWS"]),), *gradients, slots, bags.table_of, code_of, hyper,
            _plain(weights), state, _or_any(dirty, slots), first_unique, count, bags.batch, grad_out.stride(0),
            CODE=code, MIXED=len(rules) > 1, HAS_DIRTY=dirty is not None, SOURCE=source.value,
            STATE_STRIDE=state.stride(0), **_layout(weights), **tile,
        )  # fmt: skip


def move_rows(arenas: tuple[Tensor, ...], buffers: tuple[Tensor, ...], slots: Tensor, *, up: bool) -> None:
    words = [arena.shape[1] for arena in arenas]
    widths = [triton.next_power_of_2(max(width, 1)) for width in words]
    rows = max(1, MOVED_WORDS // max(widths))
    launch(
        pooling.move_tile, (triton.cdiv(len(slots), rows),), *arenas, *buffers, slots, len(slots), *words, *widths,
        UP=up, ROWS=rows,
    )  # fmt: skip


def _tile(rows: str, dim: int, bags: Bags, results: Tensor) -> dict[str, int]:
    """Constants and options to launch a kernel whose tile has as many ``rows`` as make TILE elements, over results
    [B, C].

    Of registers, the compiler takes no more than leave the multiprocessor full of programs, if it is not told how many
    it may take. It then has a step's first rows added before the last ones are loaded.
    """
    width, step = triton.next_power_of_2(dim), math.gcd(bags.column_step, results.stride(0))
    warps, registers = min(max(width // 128, 2), 8), min(max(width // 16, 64), 255)
    tile = {"STEP": step, "DIM": dim, "WIDTH": width, rows: max(1, TILE // width)}
    return tile | {"num_warps": warps, "maxnreg": registers}


def _layout(weights: Tensor) -> dict[str, Any]:
    return {"BFLOAT16": weights.dtype == torch.bfloat16, "WEIGHT_STRIDE": weights.stride(0)}


def _plain(weights: Tensor) -> Tensor:
    return weights.view(torch.int16) if weights.dtype == torch.bfloat16 else weights


def _or_any(tensor: Tensor | None, other: Tensor) -> Tensor:
    """``other`` in place of a tensor that the kernel will not touch."""
    return other if tensor is None else tensor


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
    gradient, state, hyper, table, active, slot,
    CODE: tl.constexpr, DIM: tl.constexpr, STATE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What an optimizer subtracts from each row, [ROWS, WIDTH]; ``state`` is updated. See ``optim.configs``."""
    column = tl.arange(0, WIDTH)[None, :]
    lanes = active[:, None] & (column < DIM)
    lr, eps = hyper_column(hyper, table, active, 0), hyper_column(hyper, table, active, 2)
    place = slot * STATE_STRIDE
    places = state + place[:, None] + column
    if CODE == _SGD:
        step = lr * gradient
    elif CODE == _ROWWISE_ADAGRAD:
        squares = tree_sum(tl.where(lanes, gradient * gradient, 0.0), ROWS, WIDTH)
        mean = tl.div_rn(squares, tl.full([ROWS], DIM, tl.float32))
        accumulator = tl.load(state + place, mask=active, other=0) + mean
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
    """A tile of ROWS unique rows, those ruled by optimizer CODE: merge, update, store.

    MIXED: other rows may be ruled otherwise.
    """
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = first_unique + number
    num_rows = tl.minimum(count, tl.load(num_unique) - first_unique)
    if tl.program_id(0) * ROWS < num_rows:
        active = number < num_rows
        start = tl.load(starts + row, mask=active, other=0)
        stop = tl.load(starts + row + 1, mask=active, other=0)
        bag = tl.load(bag_of + tl.load(order + start, mask=active, other=0), mask=active, other=0)
        table = tl.load(table_of + bag // batch, mask=active, other=0)
        if MIXED:
            active = active & (tl.load(code_of + table, mask=active, other=-1) == CODE)
        gradient = merge_gradients(
            start, tl.where(active, stop, start), order, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs,
            batch, grad_stride, SOURCE, DIM, STEP, WIDTH, ROWS,
        )  # fmt: skip
        column = tl.arange(0, WIDTH)[None, :]
        lanes = active[:, None] & (column < DIM)
        slot = tl.load(slots + number, mask=active, other=0).to(tl.int64)
        targets = weights + slot[:, None] * WEIGHT_STRIDE + column
        value = as_float32(tl.load(targets, mask=lanes, other=0), BFLOAT16)
        weight_decay = hyper_column(hyper, table, active, 1)
        gradient = tl.where(weight_decay != 0, gradient + weight_decay * value, gradient)
        step = step_of_rows(gradient, state, hyper, table, active, slot, CODE, DIM, STATE_STRIDE, WIDTH, ROWS)
        kept = hyper_column(hyper, table, active, 7) * value
        store_rows(targets, kept - step, lanes, BFLOAT16)
        if HAS_DIRTY:
            tl.store(dirty + slot, tl.full([ROWS], 1, tl.uint8), mask=active)
