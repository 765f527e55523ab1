"""Kernels over rows of the HBM tier in Triton; what they compute is told, and checked, by their twins in ``rows_twin``.

All are bound by memory. Bytes a row of D float32 columns, beside 4 to 24 bytes of indices a position:

- pooling reads the row of each position (4 D) and reads and writes each bag's result once (8 D);
- a dot product reads a row and a gradient (8 D);
- an update reads the gradient of each position (4 D), and reads and writes each row (8 D) and its state once.

Rows lie anywhere, so what counts is how many are in flight. A program has two warps and a tile of TILE elements, four a
thread (16 bytes, the widest access): with D = 16, a row is read by four threads and a program works on 16 rows side by
side; with D = 64 a warp reads two rows; above D = 128 a program has one row, and above 256 more warps for it. At
48 to 72 registers a thread, as compiled for an H200, 14 to 21 programs share a multiprocessor: 14 to 21 KiB of rows on
their way at each step, and loops are unrolled to have up to four steps under way, where the latency of memory times its
bandwidth asks for about 25 KiB (reckoned, not measured). Small programs also lose little when one row of a tile has
more positions than its neighbours. Strides of rows are constants, so that the compiler sees how rows are aligned.

The sums that have an order follow it by loops over positions and by explicit trees over columns; programs share no
sum. Nothing here waits for the device.

Shape legend: N positions (ids of the batch), U unique rows, K = F * B bags, C output columns, S slots, D dim, T tables.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

import functools
import math
from collections.abc import Callable
from typing import Any, Final, ParamSpec

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import kernels
from ..optim.configs import NUM_HYPER, SGD, Adagrad, RowWiseAdagrad
from ..optim.kernels import RUN
from .batch import Bags, Groups

P = ParamSpec("P")

TILE: Final = 256
UNROLL: Final = tl.constexpr(4)

# Where the factor of a position's gradient comes from.
PLAIN: Final = tl.constexpr(0)
SCALED: Final = tl.constexpr(1)
AVERAGED: Final = tl.constexpr(2)
CHOSEN: Final = tl.constexpr(3)

_RUN: Final = tl.constexpr(RUN)
_MEAN: Final = tl.constexpr(kernels.MEAN)
_MAX: Final = tl.constexpr(kernels.MAX)
_NUM_HYPER: Final = tl.constexpr(NUM_HYPER)
_SGD: Final = tl.constexpr(SGD.code)
_ROWWISE_ADAGRAD: Final = tl.constexpr(RowWiseAdagrad.code)
_ADAGRAD: Final = tl.constexpr(Adagrad.code)

LAUNCH: Final = {"enable_fp_fusion": False}
"""A product and a sum contracted to one instruction round once instead of twice: other bits than the CPU's."""


@triton.jit
def load_rows(pointers, mask, BFLOAT16: tl.constexpr):
    """Elements as float32; bfloat16 comes as int16, because Triton's interpreter rounds it in another way."""
    value = tl.load(pointers, mask=mask, other=0)
    if BFLOAT16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def store_rows(pointers, value, mask, BFLOAT16: tl.constexpr):
    """Inverse of ``load_rows``, to nearest, ties to even; see ``floats.float_to_bits``."""
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
def result_places(bag, columns, mask, batch, stride, STEP: tl.constexpr):
    """int64, multiples of STEP: where the results of bags begin in a matrix [B, C] of that stride."""
    column = tl.load(columns + bag // batch, mask=mask, other=0)
    return tl.multiple_of((bag % batch).to(tl.int64) * stride + column, STEP)


@triton.jit(do_not_specialize=["first", "last", "num_bags", "batch"])
def pool_bags(
    bag_starts, columns, scale, slots, weights, out, arg_max, first, last, num_bags, batch, out_stride,
    MODE: tl.constexpr, HAS_SCALE: tl.constexpr, BFLOAT16: tl.constexpr, DIM: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, BAGS: tl.constexpr,
):  # fmt: skip
    """A tile of BAGS bags; each step of the loop adds the next row of every bag that has one."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    inside = bag < num_bags
    start = tl.load(bag_starts + bag, mask=inside, other=0)
    stop = tl.load(bag_starts + bag + 1, mask=inside, other=0)
    low, high = tl.maximum(start, first), tl.minimum(stop, last)
    touched = low < high
    column = tl.arange(0, WIDTH)[None, :]
    cells = touched[:, None] & (column < DIM)
    targets = out + result_places(bag, columns, touched, batch, out_stride, STEP)[:, None] + column
    pooled = tl.load(targets, mask=cells, other=0)
    if MODE == _MAX:
        bests = arg_max + bag.to(tl.int64)[:, None] * DIM + column
        best = tl.load(bests, mask=cells, other=0)
    for step in tl.range(0, tl.max(high - low), loop_unroll_factor=UNROLL):
        position = low + step
        active = position < high
        lanes = active[:, None] & cells
        slot = tl.load(slots + (position - first), mask=active, other=0).to(tl.int64)
        value = load_rows(weights + slot[:, None] * WEIGHT_STRIDE + column, lanes, BFLOAT16)
        if MODE == _MAX:
            wins = lanes & ((best < 0) | (value > pooled))
            pooled = tl.where(wins, value, pooled)
            best = tl.where(wins, position.to(tl.int32)[:, None], best)
        else:
            if HAS_SCALE:
                value = tl.load(scale + position, mask=active, other=0)[:, None] * value
            pooled = tl.where(lanes, pooled + value, pooled)
    if MODE == _MAX:
        tl.store(bests, best, mask=cells)
    if MODE == _MEAN:
        count = tl.maximum(stop - start, 1).to(tl.float32)[:, None]
        pooled = tl.where((high == stop)[:, None], tl.div_rn(pooled, count), pooled)
    tl.store(targets, pooled, mask=cells)


@triton.jit(do_not_specialize=["first", "last", "batch"])
def dot_positions(
    bag_of, columns, slots, weights, grad_out, grad_scale, first, last, batch, grad_stride,
    BFLOAT16: tl.constexpr, DIM: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS positions."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    active = place < last - first
    column = tl.arange(0, WIDTH)[None, :]
    lanes = active[:, None] & (column < DIM)
    bag = tl.load(bag_of + first + place, mask=active, other=0)
    source = tl.load(
        grad_out + result_places(bag, columns, active, batch, grad_stride, STEP)[:, None] + column, mask=lanes, other=0
    )
    slot = tl.load(slots + place, mask=active, other=0).to(tl.int64)
    value = load_rows(weights + slot[:, None] * WEIGHT_STRIDE + column, lanes, BFLOAT16)
    tl.store(grad_scale + first + place, tree_sum(value * source, ROWS, WIDTH), mask=active)


@triton.jit
def sum_gradients(
    low, high, order, bag_of, bag_starts, columns, scale, arg_max, grad_out, batch, grad_stride,
    SOURCE: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, WIDTH]: the gradients of the positions ``order[low:high]`` of each row, one after another."""
    column = tl.arange(0, WIDTH)[None, :]
    gradient = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in tl.range(0, tl.max(high - low), loop_unroll_factor=UNROLL):
        place = low + step
        active = place < high
        lanes = active[:, None] & (column < DIM)
        position = tl.load(order + place, mask=active, other=0)
        bag = tl.load(bag_of + position, mask=active, other=0)
        places = result_places(bag, columns, active, batch, grad_stride, STEP)[:, None] + column
        source = tl.load(grad_out + places, mask=lanes, other=0)
        if SOURCE == CHOSEN:
            best = tl.load(arg_max + bag.to(tl.int64)[:, None] * DIM + column, mask=lanes, other=-1)
            lanes = lanes & (best == position[:, None])
        if SOURCE == SCALED:
            source = tl.load(scale + position, mask=active, other=0)[:, None] * source
        if SOURCE == AVERAGED:
            start = tl.load(bag_starts + bag, mask=active, other=0)
            count = tl.load(bag_starts + bag + 1, mask=active, other=1) - start
            source = tl.div_rn(1.0, count.to(tl.float32))[:, None] * source
        gradient = tl.where(lanes, gradient + source, gradient)
    return gradient


@triton.jit(do_not_specialize=["first_unique", "stop_unique", "search_steps", "num_blocks", "batch"])
def sum_later_runs(
    order, starts, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs, first_unique, stop_unique,
    search_steps, num_blocks, batch, grad_stride,
    SOURCE: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the runs of each row but its first, for ``update_tile``, which adds them in order.

    ``order`` is cut into blocks of RUN places. In each begins one such run at most, for they begin RUN places or more
    apart, so a run's sum goes to ``runs[its first place // RUN]`` and no program need know what others found. The row
    of a run that begins in a block also has the block's first place, which a search in ``starts`` finds.
    """
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    corner = block.to(tl.int64) * _RUN
    active = (block < num_blocks) & (corner > tl.load(starts + first_unique)) & (corner < tl.load(starts + stop_unique))
    row, above = tl.zeros([ROWS], tl.int32) + first_unique, tl.zeros([ROWS], tl.int32) + stop_unique
    for _ in tl.range(0, search_steps):
        middle = (row + above) // 2
        before = tl.load(starts + middle) <= corner
        row, above = tl.where(before, middle, row), tl.where(before, above, middle)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    low = start + (corner - start + _RUN - 1) // _RUN * _RUN
    active = active & (corner > start) & (low < stop)
    high = tl.where(active, tl.minimum(low + _RUN, stop), low)
    total = sum_gradients(
        low, high, order, bag_of, bag_starts, columns, scale, arg_max, grad_out, batch, grad_stride,
        SOURCE, DIM, STEP, WIDTH, ROWS,
    )  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(runs + block.to(tl.int64)[:, None] * DIM + column, total, mask=active[:, None] & (column < DIM))


@triton.jit
def add_later_runs(gradient, start, stop, runs, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """``gradient``, the sums of rows' first runs, plus those of their later runs in order."""
    column = tl.arange(0, WIDTH)[None, :]
    num_later = tl.maximum(stop - start - 1, 0) // _RUN
    for number in tl.range(0, tl.max(num_later), loop_unroll_factor=UNROLL):
        block = (start + (number + 1) * _RUN) // _RUN
        lanes = (number < num_later)[:, None] & (column < DIM)
        later = tl.load(runs + block[:, None] * DIM + column, mask=lanes, other=0)
        gradient = tl.where(lanes, gradient + later, gradient)
    return gradient


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


@triton.jit(do_not_specialize=["first_unique", "stop_unique", "batch"])
def update_tile(
    order, starts, bag_of, bag_starts, columns, scale, arg_max, grad_out, runs, slots, table_of, code_of, hyper,
    weights, state, first_unique, stop_unique, batch, grad_stride,
    CODE: tl.constexpr, MIXED: tl.constexpr, HOT: tl.constexpr, SOURCE: tl.constexpr, BFLOAT16: tl.constexpr,
    DIM: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS unique rows, those ruled by optimizer CODE: merge, update, store.

    MIXED: other rows may be ruled otherwise. HOT: rows may have more than RUN positions.
    """
    row = first_unique + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    active = row < stop_unique
    table = tl.load(table_of + row, mask=active, other=0)
    if MIXED:
        active = active & (tl.load(code_of + table, mask=active, other=-1) == CODE)
    start = tl.load(starts + row, mask=active, other=0)
    stop = tl.load(starts + row + 1, mask=active, other=0)
    gradient = sum_gradients(
        start, tl.minimum(start + _RUN, stop), order, bag_of, bag_starts, columns, scale, arg_max, grad_out, batch,
        grad_stride, SOURCE, DIM, STEP, WIDTH, ROWS,
    )  # fmt: skip
    if HOT:
        gradient = add_later_runs(gradient, start, stop, runs, DIM, WIDTH)
    column = tl.arange(0, WIDTH)[None, :]
    lanes = active[:, None] & (column < DIM)
    slot = tl.load(slots + (row - first_unique), mask=active, other=0).to(tl.int64)
    targets = weights + slot[:, None] * WEIGHT_STRIDE + column
    value = load_rows(targets, lanes, BFLOAT16)
    weight_decay = hyper_column(hyper, table, active, 1)
    gradient = tl.where(weight_decay != 0, gradient + weight_decay * value, gradient)
    step = step_of_rows(gradient, state, hyper, table, active, slot, CODE, DIM, STATE_STRIDE, WIDTH, ROWS)
    store_rows(targets, value - step, lanes, BFLOAT16)


def _on_its_device(launch: Callable[P, None]) -> Callable[P, None]:
    """Triton launches on the current device: make it that of the rows."""

    @functools.wraps(launch)
    def launched(*arguments: P.args, **named: P.kwargs) -> None:
        rows: Any = named["weights"]
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            launch(*arguments, **named)

    return launched


@_on_its_device
def pool_rows(
    bags: Bags, slots: Tensor, first: int, last: int, *, mode: int, weights: Tensor, dim: int, out: Tensor,
    arg_max: Tensor | None,
) -> None:  # fmt: skip
    """As ``rows_twin.pool_rows``."""
    num_bags, tile = len(bags.bag_starts) - 1, _tile("BAGS", dim, bags, out)
    if first == last:
        return
    pool_bags[(triton.cdiv(num_bags, tile["BAGS"]),)](
        bags.bag_starts, bags.columns, _or_any(bags.scale, out), slots, _plain(weights), out, _or_any(arg_max, slots),
        first, last, num_bags, bags.batch, out.stride(0), MODE=mode, HAS_SCALE=bags.scale is not None,
        **_layout(weights), **tile, **LAUNCH,
    )  # fmt: skip


@_on_its_device
def dot_rows(
    bags: Bags, slots: Tensor, first: int, last: int, *, weights: Tensor, dim: int, grad_out: Tensor, grad_scale: Tensor
) -> None:
    """As ``rows_twin.dot_rows``."""
    tile = _tile("ROWS", dim, bags, grad_out)
    if first == last:
        return
    dot_positions[(triton.cdiv(last - first, tile["ROWS"]),)](
        bags.bag_of, bags.columns, slots, _plain(weights), grad_out, grad_scale, first, last, bags.batch,
        grad_out.stride(0), **_layout(weights), **tile, **LAUNCH,
    )  # fmt: skip


@_on_its_device
def update_rows(
    bags: Bags, groups: Groups, slots: Tensor, first_unique: int, *, grad_out: Tensor, arg_max: Tensor | None,
    mean: bool, table_of: Tensor, codes: tuple[int, ...], hyper: Tensor, weights: Tensor, state: Tensor, dim: int,
) -> None:  # fmt: skip
    """As ``rows_twin.update_rows``. Rows of different optimizers are updated by launches of their own."""
    if not len(slots):
        return
    if arg_max is not None:
        source = CHOSEN
    elif mean:
        source = AVERAGED
    else:
        source = PLAIN if bags.scale is None else SCALED
    stop_unique, tile = first_unique + len(slots), _tile("ROWS", dim, bags, grad_out)
    tile["SOURCE"] = source.value
    hot = len(groups.order) > RUN
    runs = grad_out.new_empty(triton.cdiv(len(groups.order), RUN) if hot else 0, dim)
    gradients = (
        groups.order, groups.starts, bags.bag_of, bags.bag_starts, bags.columns, _or_any(bags.scale, grad_out),
        _or_any(arg_max, slots), grad_out, runs,
    )  # fmt: skip
    if hot:
        sum_later_runs[(triton.cdiv(len(runs), tile["ROWS"]),)](
            *gradients, first_unique, stop_unique, len(slots).bit_length(), len(runs), bags.batch, grad_out.stride(0),
            **tile, **LAUNCH,
        )  # fmt: skip
    rules = sorted(set(codes))
    code_of = _to_device(codes, slots.device) if len(rules) > 1 else slots
    for code in rules:
        update_tile[(triton.cdiv(len(slots), tile["ROWS"]),)](
            *gradients, slots, table_of, code_of, hyper, _plain(weights), state, first_unique, stop_unique,
            bags.batch, grad_out.stride(0), CODE=code, MIXED=len(rules) > 1, HOT=hot, STATE_STRIDE=state.stride(0),
            **_layout(weights), **tile, **LAUNCH,
        )  # fmt: skip


def _tile(rows: str, dim: int, bags: Bags, results: Tensor) -> dict[str, int]:
    """How to launch a kernel whose tile has as many ``rows`` as make TILE elements, over results [B, C]."""
    width = triton.next_power_of_2(dim)
    step = math.gcd(bags.column_step, results.stride(0))
    warps = min(max(width // 128, 2), 8)
    return {"DIM": dim, "STEP": step, "WIDTH": width, rows: max(1, TILE // width), "num_warps": warps}


def _layout(weights: Tensor) -> dict[str, Any]:
    return {"BFLOAT16": weights.dtype == torch.bfloat16, "WEIGHT_STRIDE": weights.stride(0)}


def _plain(weights: Tensor) -> Tensor:
    return weights.view(torch.int16) if weights.dtype == torch.bfloat16 else weights


def _or_any(tensor: Tensor | None, other: Tensor) -> Tensor:
    """``other`` in place of a tensor that the kernel will not touch."""
    return other if tensor is None else tensor


def _to_device(codes: tuple[int, ...], device: torch.device) -> Tensor:
    """int32; from pinned memory, so that the copy waits for nothing that runs on the device."""
    pinned = torch.tensor(codes, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
