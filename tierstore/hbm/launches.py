"""Launches of Triton's kernels: the functions of ``twin``, where their docstrings are, on a GPU. Nothing waits."""

import math
import threading
from typing import Any, Final

import torch
import triton
from torch import Tensor

from ..optim.rules import RUN, SUPER_RUN
from . import cache_triton as cache
from . import rows_triton as rows
from .kernel_types import PIN, WAYS, Bags, CacheState, DeviceIds, Groups, Plan

# A product and a sum contracted to one instruction round once instead of twice: other bits than the CPU's.
OPTIONS: Final = {"enable_fp_fusion": False}
TILE: Final = 256  # elements of rows that a program has at a time
NUMBER_TILE: Final = 256
SORTED_TILE: Final = 1024  # places of a sorted batch that one program looks at
MOVED_WORDS: Final = 512  # of 64 bits, that a program moves
PROGRAMS: Final = 1 << 15  # that update rows, at most; an H200 runs 2,112 of them at a time

_lock: Final = threading.RLock()


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch so many programs on the current stream of the first argument's device, a tensor; returns before they have
    run. None stands for a tensor that the kernel will not touch. One thread at a time: a kernel compiles when it is
    first launched with new constants, and Triton's interpreter runs one at all."""
    if programs:
        given = [arguments[0] if each is None else each for each in arguments]
        with _lock, torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
            kernel[(programs,)](*given, **(OPTIONS | options))


# Rows


def number_bags(bag_starts: Tensor, bag_of: Tensor) -> None:
    count, num_bags = len(bag_of), len(bag_starts) - 1
    launch(
        rows.number_positions, triton.cdiv(count, NUMBER_TILE), bag_starts, bag_of, count, num_bags,
        num_bags.bit_length(), BLOCK=NUMBER_TILE,
    )  # fmt: skip


def join_ids(
    given: DeviceIds, firsts: Tensor, num_rows: Tensor, bags: Bags, joined: Tensor, is_right: Tensor, record: Tensor
) -> None:
    num_bags = len(bags.bag_starts) - 1
    launch(
        rows.join_tile, triton.cdiv(max(len(joined), num_bags + 1), NUMBER_TILE), given.ids, given.offsets, given.scale,
        firsts, num_rows, bags.bag_starts, bags.bag_of, joined, bags.scale, is_right, record, len(joined),
        len(given.offsets), num_bags, len(firsts), bags.batch, num_bags.bit_length(), HAS_SCALE=given.scale is not None,
        BLOCK=NUMBER_TILE,
    )  # fmt: skip


def pool_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, mode: int, weights: Tensor, dim: int,
    out: Tensor, arg_max: Tensor | None,
) -> None:  # fmt: skip
    num_bags, tile = len(bags.bag_starts) - 1, _tile("BAGS", dim, bags, out)
    if first == last != 0:
        return
    launch(
        rows.pool_bags, triton.cdiv(num_bags, tile["BAGS"]), bags.bag_starts, bags.columns, bags.scale, slots, inverse,
        _plain(weights), out, arg_max, first, last, num_bags, bags.batch, out.stride(0), MODE=mode,
        HAS_SCALE=bags.scale is not None, HAS_INVERSE=inverse is not None, FRESH=first == 0, **_layout(weights), **tile,
    )  # fmt: skip


def dot_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, weights: Tensor, dim: int,
    grad_out: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    tile = _tile("ROWS", dim, bags, grad_out)
    launch(
        rows.dot_positions, triton.cdiv(last - first, tile["ROWS"]), bags.bag_of, bags.columns, slots, inverse,
        _plain(weights), grad_out, grad_scale, first, last, bags.batch, grad_out.stride(0),
        HAS_INVERSE=inverse is not None, **_layout(weights), **tile,
    )  # fmt: skip


def update_rows(
    bags: Bags, groups: Groups, slots: Tensor, first_unique: int, *, grad_out: Tensor, arg_max: Tensor | None,
    mean: bool, codes: tuple[int, ...], code_of: Tensor, hyper: Tensor, weights: Tensor, state: Tensor, dim: int,
    dirty: Tensor | None,
) -> None:  # fmt: skip
    """Rows of different optimizers are updated by launches of their own."""
    if arg_max is not None:
        source = rows.CHOSEN
    elif mean:
        source = rows.AVERAGED
    else:
        source = rows.PLAIN if bags.scale is None else rows.SCALED
    length, count, tile = len(groups.order), len(slots), _tile("ROWS", dim, bags, grad_out)
    if not count:
        return
    runs = grad_out.new_empty(triton.cdiv(length, RUN) if length > RUN else 0, dim)
    places = groups.starts, groups.num_unique
    gradients = (
        groups.order, *places, bags.bag_of, bags.bag_starts, bags.columns, bags.scale, arg_max, grad_out, runs,
    )  # fmt: skip
    if length > RUN:
        launch(
            rows.sum_runs, triton.cdiv(len(runs), tile["ROWS"]), *gradients, first_unique, count, bags.batch,
            grad_out.stride(0), SOURCE=source.value, **tile,
        )  # fmt: skip
    if length > SUPER_RUN:
        launch(
            rows.sum_super_runs, triton.cdiv(length, SUPER_RUN), *places, runs, first_unique, count, DIM=dim,
            WIDTH=tile["WIDTH"], ROWS=1, num_warps=tile["num_warps"] // 2, maxnreg=tile["maxnreg"],
        )  # fmt: skip
    rules, programs = sorted(set(codes)), min(triton.cdiv(count, tile["ROWS"]), PROGRAMS)
    for code in rules:
        launch(
            rows.update_tile, programs, *gradients, slots, bags.table_of, code_of, hyper, _plain(weights), state, dirty,
            first_unique, count, bags.batch, grad_out.stride(0), CODE=code, MIXED=len(rules) > 1,
            HAS_DIRTY=dirty is not None, SOURCE=source.value, STATE_STRIDE=state.stride(0), **_layout(weights), **tile,
        )  # fmt: skip


def move_rows(arenas: tuple[Tensor, ...], buffers: tuple[Tensor, ...], slots: Tensor, *, up: bool) -> None:
    words = [arena.shape[1] for arena in arenas]
    widths = [triton.next_power_of_2(max(width, 1)) for width in words]
    tile, count = max(1, MOVED_WORDS // max(widths)), len(slots)
    launch(
        rows.move_tile, triton.cdiv(count, tile), *arenas, *buffers, slots, count, *words, *widths, UP=up, ROWS=tile
    )  # fmt: skip


def _tile(name: str, dim: int, bags: Bags, results: Tensor) -> dict[str, int]:
    """Constants and options of a kernel whose tile has TILE elements, over results [B, C]; ``name``: of its rows.

    Of registers, the compiler takes no more than leave the multiprocessor full of programs, if it is not told how many
    it may take. It then has a step's first rows added before the last ones are loaded.
    """
    width, step = triton.next_power_of_2(dim), math.gcd(bags.column_step, results.stride(0))
    warps, registers = min(max(width // 128, 2), 8), min(max(width // 16, 64), 255)
    tile = {"STEP": step, "DIM": dim, "WIDTH": width, name: max(1, TILE // width)}
    return tile | {"num_warps": warps, "maxnreg": registers}


def _layout(weights: Tensor) -> dict[str, Any]:
    return {"BFLOAT16": weights.dtype == torch.bfloat16, "WEIGHT_STRIDE": weights.stride(0)}


def _plain(weights: Tensor) -> Tensor:
    return weights.view(torch.int16) if weights.dtype == torch.bfloat16 else weights


# The cache


def plan(
    cache_state: CacheState, keys: Tensor, num_unique: Tensor, lying: Tensor | None, summary: Tensor
) -> tuple[Tensor, Tensor]:
    slots, statuses = (torch.empty(len(keys), dtype=dtype, device=keys.device) for dtype in (torch.int32, torch.int8))
    launch(
        cache.plan_sets, len(keys), *cache_state, keys, num_unique, lying, slots, statuses, summary,
        len(cache_state.flags) // WAYS, HAS_LYING=lying is not None, num_warps=1,
    )  # fmt: skip
    return slots, statuses


def commit(cache_state: CacheState, plan: Plan, following: Tensor, clock: int, lfu: bool, forced: bool) -> None:
    count, (high, low) = len(plan.keys), divmod(clock, 1 << cache.CLOCK_BITS.value)
    launch(
        cache.commit_slots, triton.cdiv(count, NUMBER_TILE), *cache_state, plan.keys, plan.slots, plan.statuses,
        plan.summary, following, count, high, low, int(forced), LFU=lfu, BLOCK=NUMBER_TILE,
    )  # fmt: skip


def list_keys(cache_state: CacheState, plan: Plan, places: Tensor, capacity: int, listed: Tensor) -> Tensor:
    count, slots = len(places), torch.empty(len(places), dtype=torch.int32, device=places.device)
    launch(
        cache.list_tile, triton.cdiv(count, NUMBER_TILE), cache_state.keys, plan.keys, plan.slots, places, *listed,
        slots, count, capacity, BLOCK=NUMBER_TILE,
    )  # fmt: skip
    return slots


def find_sorted(ordered: Tensor, order: Tensor, keys: Tensor, behind: int) -> Tensor:
    count, found = len(keys), torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    launch(
        cache.find_tile, triton.cdiv(count, NUMBER_TILE), ordered, order, keys, found, len(ordered), count, behind,
        STEPS=len(ordered).bit_length(), BLOCK=NUMBER_TILE,
    )  # fmt: skip
    return found


def age(ranks: Tensor) -> None:
    launch(cache.age_tile, triton.cdiv(len(ranks), NUMBER_TILE), ranks, len(ranks), BLOCK=NUMBER_TILE)


def edit_flags(flags: Tensor, slots: Tensor, capacity: int, *, unpin: bool, keep: int, add: int) -> None:
    count, own = len(slots), PIN if unpin else 0
    launch(
        cache.edit_tile, triton.cdiv(count, NUMBER_TILE), flags, slots, count, capacity, own, keep, add,
        BLOCK=NUMBER_TILE,
    )  # fmt: skip


def mix_keys(keys: Tensor) -> Tensor:
    mixed, count = torch.empty_like(keys), len(keys)
    launch(cache.mix_tile, triton.cdiv(count, SORTED_TILE), keys, mixed, count, BLOCK=SORTED_TILE)
    return mixed


def place_starts(ordered: Tensor, order: Tensor, keys: Tensor | None) -> Groups:
    count = len(ordered)
    tiles = triton.cdiv(count, SORTED_TILE)
    counts, starts, num_unique = (ordered.new_empty(size, dtype=torch.int32) for size in (tiles, count + 1, 1))
    distinct, inverse = torch.empty_like(ordered), None if keys is None else starts.new_empty(count)
    launch(cache.count_tile, tiles, ordered, counts, count, BLOCK=SORTED_TILE)
    launch(
        cache.place_tile, tiles, ordered, order, counts, keys, distinct, starts, num_unique, inverse, count,
        HAS_KEYS=keys is not None, BLOCK=SORTED_TILE,
    )  # fmt: skip
    return Groups(order, starts, num_unique, distinct, inverse)
