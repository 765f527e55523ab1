"""The kernels on the CPU, the oracle of ``launches`` and called alike: over rows those of host memory, of the cache
plain torch. Docstrings are of both.

The bits are those of ``kernels`` and ``optim.rules`` (but for the sign and payload of a NaN, which devices choose).

Shape legend: N positions (ids of the batch), U unique rows, K = F * B bags, C output columns, S slots, D dim, T tables.
"""

from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.base import DIRTY, LOADING, RESIDENT
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s
from ..kernels.floats import code_of_dtype
from ..optim.rules import merge_and_update, scratch
from ..pool.joined import NO_ARG_MAX, NO_FLOATS
from . import kernel_types as types
from .kernel_types import PIN, STAMP_BITS, WAYS, Bags, CacheState, DeviceIds, Groups, Plan, Status, mixed, sets_of

_NEVER: Final = torch.iinfo(torch.int64).max

# Rows


def number_bags(bag_starts: Tensor, bag_of: Tensor) -> None:
    """Fill ``bag_of``, int32 [N], with the bag of each position: those of bag ``k`` are ``bag_starts[k:k + 2]``."""
    numbers = torch.arange(len(bag_starts) - 1, dtype=torch.int32)
    bag_of.copy_(torch.repeat_interleave(numbers, bag_starts.diff().long()))


def join_ids(
    given: DeviceIds, firsts: Tensor, num_rows: Tensor, bags: Bags, joined: Tensor, is_right: Tensor, record: Tensor
) -> None:
    """Check ids and offsets, and join them: fill ``bag_starts``, ``bag_of`` and ``scale`` of ``bags``, and ``joined``.

    A wrong id is taken for row 0 of its table, and offsets are cut to [0, N], so that any may be used.

    Args:
        firsts: int64 [F], the slot or key of row 0 of each feature's table; num_rows: int64 [F].
        joined: int32 (slots) or int64 (keys) [N].
        is_right, record: of an ``IdCheck``; changed where something is wrong. Of several wrong ids of a feature, or
            wrong offsets, any is recorded. An offset is wrong outside [0, N], or if less than the one before.
    """
    count, num_bags = len(joined), len(bags.bag_starts) - 1
    starts = given.offsets.long()
    starts = torch.cat([starts, starts.new_full((num_bags + 1 - len(starts),), count)])
    is_off = (starts < torch.cat([starts.new_zeros(1), starts[:-1]])) | (starts > count)
    is_off[0] |= starts[0] != 0
    is_off[-1] |= starts[-1] != count
    bags.bag_starts.copy_(starts.clamp(0, count))
    bag = (torch.searchsorted(starts, torch.arange(count), right=True) - 1).clamp(0, num_bags - 1)
    bags.bag_of.copy_(bag)
    feature, ids = bag // bags.batch, given.ids.long()
    is_no_row = (ids < 0) | (ids >= num_rows[feature])
    joined.copy_(firsts[feature] + torch.where(is_no_row, torch.zeros_like(ids), ids))
    record[feature[is_no_row]] = ids[is_no_row]
    if is_off.any():
        record[len(firsts)] = is_off.int().argmax() + 1
    is_right.mul_((~(is_no_row.any() | is_off.any())).int())
    if given.scale is not None and bags.scale is not None:
        bags.scale.copy_(given.scale)


def pool_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, mode: int, weights: Tensor, dim: int,
    out: Tensor, arg_max: Tensor | None,
) -> None:  # fmt: skip
    """Sum the rows of the positions ``[first, last)`` by bag, each bag in id-list order.

    Calls with neighbouring ranges, in order, give the bits of one call.

    Args:
        slots: int32, the slot of each position, [last - first]; or of each distinct row, [>= U].
        inverse: int32 [last - first], the distinct row of each position; None if ``slots`` are the positions'.
        first: a call from position 0 on writes the result of every bag, once. One from a later position reads and
            writes only the bags that have positions in its range.
        mode: SUM, MEAN or MAX of ``kernels``; a mean is divided when its last position was added. MAX ignores scale.
        weights: float32, float16 or bfloat16 [S, >= D].
        out: float32 [B, C].
        arg_max: int32 [K, D], the first position of each maximum (MAX), -1 of an empty bag; else None.
    """
    kernels.pool_rows(
        0, len(bags.bag_starts) - 1, first, last, bags.bag_starts.long().numpy(), _slots_of(slots, inverse),
        _scale_of(bags), mode, _array(weights), dim, _code_of(weights), bags.columns.numpy(), bags.batch,
        out.numpy(), NO_ARG_MAX if arg_max is None else arg_max.numpy(),
    )  # fmt: skip


def dot_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, weights: Tensor, dim: int,
    grad_out: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    """Gradient of per-sample weights: ``grad_scale[p] = row(p) . grad_out[bag of p]``, positions ``[first, last)``.

    Args:
        slots, inverse, weights: as for ``pool_rows``.
        grad_out: float32 [B, C]; grad_scale: float32 [N].
    """
    kernels.dot_rows(
        0, len(bags.bag_starts) - 1, first, last, bags.bag_starts.long().numpy(), _slots_of(slots, inverse),
        _array(weights), dim, _code_of(weights), bags.columns.numpy(), bags.batch, grad_out.detach().numpy(),
        grad_scale.numpy(),
    )  # fmt: skip


def update_rows(
    bags: Bags, groups: Groups, slots: Tensor, first_unique: int, *, grad_out: Tensor, arg_max: Tensor | None,
    mean: bool, codes: tuple[int, ...], code_of: Tensor, hyper: Tensor, weights: Tensor, state: Tensor,  # noqa: ARG001
    dim: int, dirty: Tensor | None,
) -> None:  # fmt: skip
    """Merge the gradients of distinct rows, and update each once: those from ``first_unique`` up to
    ``min(first_unique + len(slots), U)``.

    Args:
        slots: int32, the slot of each of these rows, all different; those behind U mean nothing.
        grad_out: float32 [B, C].
        arg_max: int32 [K, D], what ``pool_rows`` left (MAX), or None.
        mean: gradients are divided by the length of their bag; else scaled by ``bags.scale``, if there is one.
        codes: the optimizer of each table; code_of: int32 [T], the same on the device; hyper: float32 [T, NUM_HYPER].
        weights: float32, float16 or bfloat16 [S, >= D]; state: float32 [S, >= state_dim]. Both are changed.
        dirty: uint8 [S], set to 1 for each updated row, or None.
    """
    stop = min(first_unique + len(slots), int(groups.num_unique))
    if first_unique >= stop:
        return
    # Each row is given as a table of its own, of one row.
    count, order = stop - first_unique, groups.order.numpy()
    starts, bag_of = groups.starts[first_unique : stop + 1].long().numpy(), bags.bag_of.numpy()[order]
    tables = bags.table_of[torch.from_numpy(bag_of[starts[:-1]] // bags.batch)]
    factors = NO_FLOATS if bags.scale is None else _scale_of(bags)[order]
    if mean:
        factors = np.float32(1) / np.diff(bags.bag_starts.numpy())[bag_of].astype(np.float32)
    sources = bag_of % bags.batch * np.int64(grad_out.shape[1]) + bags.columns.numpy()[bag_of // bags.batch]
    flags = np.empty(0, np.uint8) if dirty is None else dirty.numpy()
    merge_and_update(
        0, 0, count, 0, np.zeros(count, np.int64), np.arange(count), slots.numpy(), np.ones(count, np.int64),
        np.stack([starts[:-1], starts[1:]], axis=1).ravel(), sources, factors, order.astype(np.int32), bag_of,
        NO_ARG_MAX if arg_max is None else arg_max.numpy(), grad_out.detach().reshape(1, -1).numpy(),
        code_of[tables].long().numpy(), hyper[tables].numpy(), _array(weights), _array(state), dim,
        _code_of(weights), flags, 1, None, None, scratch(dim),
    )  # fmt: skip


def move_rows(arenas: tuple[Tensor, ...], buffers: tuple[Tensor, ...], slots: Tensor, *, up: bool) -> None:
    """Copy whole rows between the device and page-locked memory of the host: ``arenas[slots[i]]`` from (``up``) or to
    ``buffers[i]``.

    Args:
        arenas, buffers: weights and state, int64 [rows, words] each.
        slots: int32 [n], distinct.
    """
    for arena, buffer in zip(arenas, buffers, strict=True):
        if up:
            arena[slots] = buffer[: len(slots)]
        else:
            torch.index_select(arena, 0, slots, out=buffer[: len(slots)])


def _slots_of(slots: Tensor, inverse: Tensor | None) -> Int32s:
    """int32, the slot of each position of a call."""
    found: Int32s = (slots if inverse is None else slots[inverse.long()]).numpy()
    return found


def _array(rows: Tensor) -> NDArray[Any]:
    """Rows as kernels see them: float32, or uint16 for the dtypes of 16 bits. After ``Tensor.numpy`` their memory could
    not be freed by ``resize_``."""
    kind = "<f4" if rows.dtype == torch.float32 else "<u2"
    memory = {"data": (rows.data_ptr(), False), "shape": tuple(rows.shape), "typestr": kind, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=memory))


def _scale_of(bags: Bags) -> Floats:
    return NO_FLOATS if bags.scale is None else bags.scale.detach().numpy()


def _code_of(weights: Tensor) -> int:
    return code_of_dtype(str(weights.dtype).removeprefix("torch."))


# The cache


def plan(
    cache_state: CacheState, keys: Tensor, num_unique: Tensor, lying: Tensor | None, summary: Tensor
) -> tuple[Tensor, Tensor]:
    """(slots, statuses), see ``HbmCache.plan``: the first key of every set, then the second of every set, and so on.
    The number of keys of each status is added to the column sums of ``summary``, int32 [SUMMARY_ROWS, NUM_STATUSES]."""
    device = keys.device
    slots = torch.full((len(keys),), -1, dtype=torch.int32, device=device)
    statuses = torch.full((len(keys),), int(Status.NO_KEY), dtype=torch.int8, device=device)
    keys = keys[: int(num_unique)]
    statuses[: len(keys)] = int(Status.TAKEN)
    sets = sets_of(mixed(keys), len(cache_state.flags) // WAYS)
    distinct, run, length = torch.unique_consecutive(sets, return_inverse=True, return_counts=True)
    place_in_run = torch.arange(len(sets), device=device) - (length.cumsum(0) - length)[run]
    ways = distinct.long()[:, None] * WAYS + torch.arange(WAYS, device=device)
    set_keys, set_flags = cache_state.keys[ways], cache_state.flags[ways].clone()
    set_ranks = torch.where(set_flags & RESIDENT != 0, cache_state.ranks[ways], -1)
    if lying is not None:
        slots[: len(keys)] = lying[: len(keys)]
    for place in range(int(length.max()) if len(length) else 0):
        number = torch.nonzero((place_in_run == place) & (slots[: len(keys)] < 0)).flatten()
        row, key = run[number], keys[number]
        same = (set_flags[row] & RESIDENT != 0) & (set_keys[row] == key[:, None])
        is_hit = same.any(1)
        cost = torch.where(set_flags[row] >= PIN, _NEVER, set_ranks[row])
        least = cost.min(1).values
        way = torch.where(is_hit, same.to(torch.int8).argmax(1), (cost == least[:, None]).to(torch.int8).argmax(1))
        flags = set_flags[row, way]
        status = torch.full_like(way, int(Status.CLEAN_VICTIM))
        status[flags & DIRTY != 0] = int(Status.DIRTY_VICTIM)
        status[flags == 0] = int(Status.FREE_SLOT)
        status[least == _NEVER] = int(Status.CONFLICT)
        status[is_hit] = int(Status.HIT)
        fits = status < int(Status.CONFLICT)
        statuses[number] = status.to(torch.int8)
        slots[number[fits]] = (distinct.long()[row] * WAYS + way)[fits].to(torch.int32)
        set_keys[row[fits], way[fits]] = key[fits]
        set_flags[row[fits], way[fits]] = RESIDENT | PIN
    summary[0] += torch.bincount(statuses[: len(keys)].long(), minlength=types.NUM_STATUSES).to(torch.int32)
    return slots, statuses


def commit(cache_state: CacheState, plan: Plan, following: Tensor, clock: int, lfu: bool, forced: bool) -> None:
    """See ``HbmCache.commit``; key ``i`` is access number ``clock + 1 + i``. ``following``: the summary that the next
    plan will add to; set to 0."""
    following.zero_()
    if not forced and plan.summary[:, Status.DIRTY_VICTIM : Status.NO_KEY].any():
        return
    chosen = torch.nonzero((plan.slots >= 0) & (plan.statuses != int(Status.TAKEN))).flatten()
    slots = plan.slots[chosen].long()
    stamps = clock + 1 + chosen
    is_hit = plan.statuses[chosen] == int(Status.HIT)
    ranks = stamps
    if lfu:
        old = torch.where(is_hit, cache_state.ranks[slots], 0)
        ranks = ((old >> STAMP_BITS) + 1).clamp(max=types.MAX_COUNT) << STAMP_BITS | stamps
    cache_state.flags[slots[~is_hit]] = 0  # first: a key is never seen at another's row, even if this is cut short
    cache_state.keys[slots] = plan.keys[chosen]
    cache_state.ranks[slots] = ranks
    cache_state.flags[slots] = torch.where(is_hit, cache_state.flags[slots] + PIN, RESIDENT | LOADING | PIN)


def list_keys(cache_state: CacheState, plan: Plan, places: Tensor, capacity: int, listed: Tensor) -> Tensor:
    slots = plan.slots[places]
    listed[0] = plan.keys[places]
    listed[1] = torch.where((slots >= 0) & (slots < capacity), cache_state.keys[slots.clamp(0, capacity - 1)], slots)
    return slots


def find_sorted(ordered: Tensor, order: Tensor, keys: Tensor, behind: int) -> Tensor:
    """int32 [n]: where each key (int64 [n]) was before the sort, plus ``behind``, or -1. ``ordered``: int64 [m],
    sorted, those that a key may equal once; ``order``: int64 [m], where each was before."""
    place = torch.searchsorted(ordered, keys).clamp(max=len(ordered) - 1)
    return torch.where(ordered[place] == keys, order[place] + behind, -1).to(torch.int32)


def age(ranks: Tensor) -> None:
    counts = (ranks >> (STAMP_BITS + 1)).clamp(min=1)
    ranks.copy_((counts << STAMP_BITS) | (ranks & types.STAMP_MASK))


def edit_flags(flags: Tensor, slots: Tensor, capacity: int, *, unpin: bool, keep: int, add: int) -> None:
    """Change the flags of slots (int32 [n], distinct), but of none below 0 or from ``capacity`` on: undo one pin if
    ``unpin``, keep the bits in ``keep``, and set those in ``add``."""
    slots = slots[(slots >= 0) & (slots < capacity)]
    flags[slots] = (flags[slots] - (PIN if unpin else 0)) & keep | add


def mix_keys(keys: Tensor) -> Tensor:
    return mixed(keys)


def place_starts(ordered: Tensor, order: Tensor, keys: Tensor | None) -> Groups:
    """Groups of equal values, which may be mixed keys.

    Args:
        ordered: int64 or int32 [N], sorted, N > 0; order: int64 [N], where each value was before.
        keys: int64 [N], of which ``distinct`` are then some, in their order before the sort; None for the sorted
            values themselves, and no inverse.
    """
    begins = ordered.new_ones(len(ordered), dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    places, inverse = torch.nonzero(begins).flatten(), None
    distinct, starts = torch.empty_like(ordered), ordered.new_empty(len(ordered) + 1, dtype=torch.int32)
    distinct[: len(places)] = ordered[places] if keys is None else keys[order[places]]
    starts[: len(places)] = places.to(torch.int32)
    starts[len(places)] = len(ordered)
    if keys is not None:
        inverse = starts.new_empty(len(ordered))
        inverse[order] = torch.cumsum(begins, 0, dtype=torch.int32) - 1
    return Groups(order, starts, begins.sum(dtype=torch.int32).view(1), distinct, inverse)
