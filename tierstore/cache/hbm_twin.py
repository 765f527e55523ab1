"""The device cache's kernels in plain torch: they run on any device, and are the oracle of ``hbm_triton``."""

from typing import Final

import torch
from torch import Tensor

from .flags import DIRTY, LOADING, RESIDENT
from .hbm_books import PIN, STAMP_BITS, WAYS, Books, Plan, Status

STAMP_MASK: Final = (1 << STAMP_BITS) - 1
MAX_COUNT: Final = (1 << 22) - 1
"""Accesses are counted up to here."""
_NEVER: Final = torch.iinfo(torch.int64).max


def find(books: Books, keys: Tensor, sets: Tensor) -> Tensor:
    """int32 [n]: the slot of each key, or -1.

    Args:
        keys: int64 [n]; sets: int32 [n], the set of each.
    """
    slots = sets.long()[:, None] * WAYS + torch.arange(WAYS, device=keys.device)
    same = (books.flags[slots] & RESIDENT != 0) & (books.keys[slots] == keys[:, None])
    return torch.where(same.any(1), slots[:, 0] + same.to(torch.int8).argmax(1), -1).to(torch.int32)


def plan(books: Books, keys: Tensor, sets: Tensor, taken: Tensor | None, counts: Tensor | None) -> Plan:
    """See ``HbmCache.plan``: the first key of every set, then the second of every set, and so on."""
    device = keys.device
    slots = torch.full((len(keys),), -1, dtype=torch.int32, device=device)
    statuses = torch.full((len(keys),), int(Status.TAKEN), dtype=torch.int8, device=device)
    distinct, run, length = torch.unique_consecutive(sets, return_inverse=True, return_counts=True)
    place_in_run = torch.arange(len(sets), device=device) - (length.cumsum(0) - length)[run]
    ways = distinct.long()[:, None] * WAYS + torch.arange(WAYS, device=device)
    set_keys, set_flags = books.keys[ways], books.flags[ways].clone()
    set_ranks = torch.where(set_flags & RESIDENT != 0, books.ranks[ways], -1)
    for place in range(int(length.max()) if len(length) else 0):
        number = torch.nonzero(place_in_run == place).flatten()
        if taken is not None:
            number = number[~taken[number]]
        row, key = run[number], keys[number]
        same = (set_flags[row] & RESIDENT != 0) & (set_keys[row] == key[:, None])
        is_hit = same.any(1)
        cost = torch.where(set_flags[row] >= PIN, _NEVER, set_ranks[row])
        least = cost.min(1).values
        way = torch.where(is_hit, same.to(torch.int8).argmax(1), _first(cost == least[:, None]))
        flags = set_flags[row, way]
        status = torch.full_like(way, int(Status.CLEAN_VICTIM))
        status[flags & DIRTY != 0] = int(Status.DIRTY_VICTIM)
        if counts is not None:
            status[counts[number] < (least >> STAMP_BITS)] = int(Status.REFUSED)
        status[flags == 0] = int(Status.FREE_SLOT)
        status[least == _NEVER] = int(Status.CONFLICT)
        status[is_hit] = int(Status.HIT)
        fits = status < int(Status.CONFLICT)
        statuses[number] = status.to(torch.int8)
        slots[number[fits]] = (distinct.long()[row] * WAYS + way)[fits].to(torch.int32)
        set_keys[row[fits], way[fits]] = key[fits]
        set_flags[row[fits], way[fits]] = RESIDENT | PIN
    return Plan(slots, statuses, counts)


def _first(is_chosen: Tensor) -> Tensor:
    return is_chosen.to(torch.int8).argmax(1)


def commit(books: Books, keys: Tensor, plan: Plan, clock: int, lfu: bool) -> None:
    """See ``HbmCache.commit``; key ``i`` is access number ``clock + 1 + i``."""
    chosen = torch.nonzero(plan.slots >= 0).flatten()
    slots = plan.slots[chosen].long()
    stamps = clock + 1 + chosen
    is_hit = plan.statuses[chosen] == int(Status.HIT)
    ranks = stamps
    if lfu:
        old = torch.where(is_hit, books.ranks[slots], 0)
        counts = ((old >> STAMP_BITS) + 1).clamp(max=MAX_COUNT)
        if plan.counts is not None:
            counts = torch.where(is_hit, counts, plan.counts[chosen].long())
        ranks = (counts << STAMP_BITS) | stamps
    books.keys[slots] = keys[chosen]
    books.ranks[slots] = ranks
    books.flags[slots] = torch.where(is_hit, books.flags[slots] + PIN, RESIDENT | LOADING | PIN)
