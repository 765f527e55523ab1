"""Kernels over rows of the HBM tier in Triton; what they compute is told, and checked, by their twins in ``rows_twin``.

All are bound by memory: pooling reads 4 D bytes a position and writes 4 D a bag, a dot product reads 8 D a position, an
update reads 4 D a position and reads and writes a row and its state once.

Rows lie anywhere, so what counts is how many are in flight. A program has two warps and a tile of TILE elements, four a
thread (16 bytes, the widest access); above D = 128 it has one row, and above 256 more warps for it. A step of a loop
takes four positions of each row: first their indices are loaded, then their rows, 4 KiB a program, and then they are
added in order. Latency times bandwidth of an H100's or H200's memory asks for about 25 KiB a multiprocessor, seven
programs; registers leave room for more (``tests/hbm/machine_code.py`` has the numbers). Loops have no barriers. Strides
of rows are constants, so that the compiler sees how rows are aligned.

Sums that have an order follow it by loops over positions and by explicit trees over columns; programs share no sum.
The host does not know U, how many rows are distinct: grids are bounded by what it knows, and kernels read U. Nothing
here waits for the device, and nothing is sent to it but arguments.

Shape legend: N positions (ids of the batch), U unique rows, K = F * B bags, C output columns, S slots, D dim, T tables.
"""

import math
from typing import Any, Final

import torch
import triton
from torch import Tensor

from ..optim.rules import RUN, SUPER_RUN
from .backend import launch
from .batch import Bags, DeviceIds, Groups
from .pooling_triton import dot_positions, join_tile, move_tile, number_positions, pool_bags
from .rows_twin import Pair
from .updating_triton import AVERAGED, CHOSEN, PLAIN, SCALED, sum_runs, sum_super_runs, update_tile

TILE: Final = 256
NUMBER_TILE: Final = 256
MOVED_WORDS: Final = 512
"""Of 64 bits, that a program moves."""


def number_bags(bag_starts: Tensor, bag_of: Tensor) -> None:
    num_bags = len(bag_starts) - 1
    launch(
        number_positions, (triton.cdiv(len(bag_of), NUMBER_TILE),), bag_starts, bag_of, len(bag_of), num_bags,
        num_bags.bit_length(), BLOCK=NUMBER_TILE,
    )  # fmt: skip


def join_ids(
    given: DeviceIds, firsts: Tensor, num_rows: Tensor, bags: Bags, rows: Tensor, is_right: Tensor, record: Tensor
) -> None:
    num_bags = len(bags.bag_starts) - 1
    launch(
        join_tile, (triton.cdiv(max(len(rows), num_bags + 1), NUMBER_TILE),), given.ids, given.offsets,
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
        pool_bags, (triton.cdiv(num_bags, tile["BAGS"]),), bags.bag_starts, bags.columns, _or_any(bags.scale, out),
        slots, _or_any(inverse, slots), _plain(weights), out, _or_any(arg_max, slots), first, last, num_bags,
        bags.batch, out.stride(0), MODE=mode, HAS_SCALE=bags.scale is not None, HAS_INVERSE=inverse is not None,
        FRESH=first == 0, **_layout(weights), **tile,
    )  # fmt: skip


def dot_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, weights: Tensor, dim: int,
    grad_out: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    tile = _tile("ROWS", dim, bags, grad_out)
    launch(
        dot_positions, (triton.cdiv(last - first, tile["ROWS"]),), bags.bag_of, bags.columns, slots,
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


def move_rows(arenas: Pair, buffers: Pair, slots: Tensor, *, up: bool) -> None:
    words = [arena.shape[1] for arena in arenas]
    widths = [triton.next_power_of_2(max(width, 1)) for width in words]
    rows = max(1, MOVED_WORDS // max(widths))
    launch(
        move_tile, (triton.cdiv(len(slots), rows),), *arenas, *buffers, slots, len(slots), *words, *widths, UP=up,
        ROWS=rows,
    )  # fmt: skip


def _tile(rows: str, dim: int, bags: Bags, results: Tensor) -> dict[str, int]:
    """How to launch a kernel whose tile has as many ``rows`` as make TILE elements, over results [B, C]."""
    step = math.gcd(bags.column_step, results.stride(0))
    return {"STEP": step, **tile_of(rows, dim)}


def tile_of(rows: str, dim: int) -> dict[str, int]:
    """Constants and options of a launch over rows of ``dim`` columns.

    Of registers, the compiler takes no more than leave the multiprocessor full of programs, if it is not told how many
    it may take. It then has a step's first rows added before the last ones are loaded.
    """
    width = triton.next_power_of_2(dim)
    warps, registers = min(max(width // 128, 2), 8), min(max(width // 16, 64), 255)
    return {"DIM": dim, "WIDTH": width, rows: max(1, TILE // width), "num_warps": warps, "maxnreg": registers}


def _layout(weights: Tensor) -> dict[str, Any]:
    return {"BFLOAT16": weights.dtype == torch.bfloat16, "WEIGHT_STRIDE": weights.stride(0)}


def _plain(weights: Tensor) -> Tensor:
    return weights.view(torch.int16) if weights.dtype == torch.bfloat16 else weights


def _or_any(tensor: Tensor | None, other: Tensor) -> Tensor:
    """``other`` in place of a tensor that the kernel will not touch."""
    return other if tensor is None else tensor
