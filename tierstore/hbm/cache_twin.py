"""The device cache's kernels in plain torch: they run on any device, and are the oracle of ``cache_triton``."""

from typing import Final

import torch
from torch import Tensor

from ..cache.base import DIRTY, LOADING, RESIDENT
from .kernel_types import (
    MAX_COUNT,
    NUM_STATUSES,
    PIN,
    STAMP_BITS,
    STAMP_MASK,
    WAYS,
    CacheState,
    Plan,
    Status,
    mixed,
    sets_of,
)

_NEVER: Final = torch.iinfo(torch.int64).max


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
        way = torch.where(is_hit, same.to(torch.int8).argmax(1), _first(cost == least[:, None]))
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
    summary[0] += torch.bincount(statuses[: len(keys)].long(), minlength=NUM_STATUSES).to(torch.int32)
    return slots, statuses


def _first(is_chosen: Tensor) -> Tensor:
    return is_chosen.to(torch.int8).argmax(1)


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
        ranks = ((old >> STAMP_BITS) + 1).clamp(max=MAX_COUNT) << STAMP_BITS | stamps
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
    ranks.copy_((counts << STAMP_BITS) | (ranks & STAMP_MASK))


def edit_flags(flags: Tensor, slots: Tensor, capacity: int, *, unpin: bool, keep: int, add: int) -> None:
    """Change the flags of slots (int32 [n], distinct), but of none below 0 or from ``capacity`` on: undo one pin if
    ``unpin``, keep the bits in ``keep``, and set those in ``add``."""
    slots = slots[(slots >= 0) & (slots < capacity)]
    flags[slots] = (flags[slots] - (PIN if unpin else 0)) & keep | add


def mix_keys(keys: Tensor) -> Tensor:
    return mixed(keys)


def place_starts(ordered: Tensor, order: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(distinct, starts, num_unique, inverse), as in ``Grouping`` and ``Groups``.

    Args:
        ordered: int64 or int32 [N], sorted, N > 0; order: int64 [N], where each value was before.
        keys: int64 [N], of which ``distinct`` are then some, in their order before the sort; None for the sorted
            values themselves, and no inverse.
    """
    begins = _begins(ordered)
    places = torch.nonzero(begins).flatten()
    distinct = torch.empty_like(ordered)
    distinct[: len(places)] = ordered[places] if keys is None else keys[order[places]]
    starts = torch.empty(len(ordered) + 1, dtype=torch.int32, device=ordered.device)
    starts[: len(places)] = places.to(torch.int32)
    starts[len(places)] = len(ordered)
    num_unique = begins.sum(dtype=torch.int32).view(1)
    if keys is None:
        return distinct, starts, num_unique, None
    inverse = torch.empty(len(ordered), dtype=torch.int32, device=ordered.device)
    inverse[order] = torch.cumsum(begins, 0, dtype=torch.int32) - 1
    return distinct, starts, num_unique, inverse


def _begins(ordered: Tensor) -> Tensor:
    begins = torch.ones(len(ordered), dtype=torch.bool, device=ordered.device)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    return begins
