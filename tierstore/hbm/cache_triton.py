"""The device cache's kernels in Triton. ``launches`` launches them, ``twin`` says and checks what they compute.

Bytes a key: a plan reads 8 of the key, and the set's keys, ranks and flags (640 bytes) once for all keys of the set.
Only a plan's own first U keys cost anything; programs beyond U end at once.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import triton
import triton.language as tl

from ..cache.base import DIRTY, LOADING, RESIDENT
from . import kernel_types as types
from .kernel_types import PIN, STAMP_BITS, STAMP_MASK, WAYS, Status

CLOCK_BITS: Final = tl.constexpr(30)  # a clock is passed in two halves: above 2**31 kernels would be compiled again
_WAYS: Final = tl.constexpr(WAYS)
_RESIDENT: Final = tl.constexpr(RESIDENT)
_DIRTY: Final = tl.constexpr(DIRTY)
_PIN: Final = tl.constexpr(PIN)
_ENTERED: Final = tl.constexpr(RESIDENT | LOADING | PIN)
_STAMP_BITS: Final = tl.constexpr(STAMP_BITS)
_STAMP_MASK: Final = tl.constexpr(STAMP_MASK)
_MAX_COUNT: Final = tl.constexpr(types.MAX_COUNT)
_MIX_A: Final = tl.constexpr(types.MIX_A)
_MIX_B: Final = tl.constexpr(types.MIX_B)
_NEVER: Final = tl.constexpr(2**63 - 1)
_HIT, _TAKEN, _FREE_SLOT, _CLEAN_VICTIM, _DIRTY_VICTIM, _CONFLICT, _NO_KEY = (tl.constexpr(int(s)) for s in Status)
_STATUSES: Final = tl.constexpr(types.NUM_STATUSES)
_SUMMARY_ROWS: Final = tl.constexpr(types.SUMMARY_ROWS)


@triton.jit
def mix(key):
    """uint64: the keys (int64) mixed; see ``kernel_types.mixed``."""
    value = key.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * _MIX_A
    return (value ^ (value >> 27)) * _MIX_B


@triton.jit
def set_of(key, num_sets):
    """int64: see ``kernel_types.sets_of``."""
    return (((mix(key) >> 32) * num_sets.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit(do_not_specialize=["num_sets"])
def plan_sets(
    book_keys, ranks, flags, keys, num_unique, lying, slots, statuses, summary, num_sets, HAS_LYING: tl.constexpr,
) -> None:  # fmt: skip
    """One warp a set: the program of a set's first key plans all its keys, with the set's state in registers."""
    number = tl.program_id(0)
    count = tl.load(num_unique)
    if number >= count:
        tl.store(slots + number, -1)
        tl.store(statuses + number, _NO_KEY)
    else:
        own = set_of(tl.load(keys + number), num_sets)
        if (number == 0) | (set_of(tl.load(keys + number - 1, mask=number > 0, other=0), num_sets) != own):
            way = tl.arange(0, _WAYS)
            kind = tl.arange(0, _STATUSES)
            first = own * _WAYS
            set_keys = tl.load(book_keys + first + way)
            set_flags = tl.load(flags + first + way)
            set_ranks = tl.where((set_flags & _RESIDENT) != 0, tl.load(ranks + first + way), -1)
            seen = tl.zeros([_STATUSES], tl.int32)
            row = number % _SUMMARY_ROWS
            while number < count:
                key = tl.load(keys + number)
                same = ((set_flags & _RESIDENT) != 0) & (set_keys == key)
                is_hit = tl.max(same.to(tl.int32), axis=0) != 0
                cost = tl.where(set_flags >= _PIN, _NEVER, set_ranks)
                chosen = tl.where(is_hit, tl.argmax(same.to(tl.int32), axis=0), tl.argmin(cost, axis=0))
                is_chosen = way == chosen
                was = tl.sum(tl.where(is_chosen, set_flags, 0), axis=0)
                status = tl.where((was & _DIRTY) != 0, _DIRTY_VICTIM, _CLEAN_VICTIM)
                least = tl.min(cost, axis=0)
                status = tl.where(was == 0, _FREE_SLOT, status)
                status = tl.where(least == _NEVER, _CONFLICT, status)
                status = tl.where(is_hit, _HIT, status)
                elsewhere = tl.full([], -1, tl.int32)
                if HAS_LYING:
                    elsewhere = tl.load(lying + number)
                    status = tl.where(elsewhere >= 0, _TAKEN, status)
                fits = (status < _CONFLICT) & (status != _TAKEN)
                tl.store(slots + number, tl.where(fits, (first + chosen).to(tl.int32), elsewhere))
                tl.store(statuses + number, status.to(tl.int8))
                seen += (kind == status).to(tl.int32)
                set_keys = tl.where(is_chosen & fits, key, set_keys)
                set_flags = tl.where(is_chosen & fits, _RESIDENT | _PIN, set_flags)
                number += 1
                following = tl.load(keys + number, mask=number < count, other=0)
                number = tl.where(set_of(following, num_sets) == own, number, count)
            tl.atomic_add(summary + row * _STATUSES + kind, seen, mask=seen != 0, sem="relaxed")


@triton.jit(do_not_specialize=["count", "clock_high", "clock_low", "forced"])
def commit_slots(
    book_keys, ranks, flags, keys, slots, statuses, summary, following, count, clock_high, clock_low, forced,
    LFU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    cell = tl.arange(0, _SUMMARY_ROWS * _STATUSES)
    if tl.program_id(0) == 0:
        tl.store(following + cell, cell * 0)
    kind = cell % _STATUSES
    hinders = (kind >= _DIRTY_VICTIM) & (kind < _NO_KEY)
    hindered = tl.sum(tl.load(summary + cell, mask=hinders, other=0), axis=0)
    stop = tl.where((forced != 0) | (hindered == 0), count, 0)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + number, mask=number < stop, other=-1).to(tl.int64)
    status = tl.load(statuses + number, mask=slot >= 0, other=_CONFLICT)
    fits = (slot >= 0) & (status != _TAKEN)
    is_hit = fits & (status == _HIT)
    rank = (clock_high.to(tl.int64) << CLOCK_BITS) + clock_low + number + 1
    if LFU:
        accesses = tl.minimum((tl.load(ranks + slot, mask=is_hit, other=0) >> _STAMP_BITS) + 1, _MAX_COUNT)
        rank = (accesses << _STAMP_BITS) | rank
    flag = tl.load(flags + slot, mask=is_hit, other=0)
    tl.store(book_keys + slot, tl.load(keys + number, mask=fits, other=0), mask=fits)
    tl.store(ranks + slot, rank, mask=fits)
    tl.store(flags + slot, tl.where(is_hit, flag + _PIN, _ENTERED), mask=fits)


@triton.jit(do_not_specialize=["count", "capacity"], do_not_specialize_on_alignment=["places", "told_others"])
def list_tile(book_keys, keys, slots, places, told_keys, told_others, listed, count, capacity, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    place = tl.load(places + number, mask=inside, other=0)
    slot = tl.load(slots + place, mask=inside, other=-1)
    tl.store(listed + number, slot, mask=inside)
    tl.store(told_keys + number, tl.load(keys + place, mask=inside, other=0), mask=inside)
    is_own = (slot >= 0) & (slot < capacity)
    other = tl.load(book_keys + slot, mask=is_own, other=0)
    tl.store(told_others + number, tl.where(is_own, other, slot.to(tl.int64)), mask=inside)


@triton.jit(do_not_specialize=["length", "count", "behind"])
def find_tile(ordered, order, keys, found, length, count, behind, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK keys, by bisection."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    key = tl.load(keys + number, mask=inside, other=0)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + length
    for _ in tl.static_range(STEPS):
        middle = (low + high) >> 1
        goes_on = low < high
        is_below = goes_on & (tl.load(ordered + middle, mask=goes_on, other=0) < key)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(goes_on & (is_below == 0), middle, high)
    is_there = (low < length) & (tl.load(ordered + low, mask=low < length, other=0) == key)
    place = tl.load(order + low, mask=is_there, other=0).to(tl.int32) + behind
    tl.store(found + number, tl.where(is_there, place, -1), mask=inside)


@triton.jit(do_not_specialize=["count"])
def age_tile(ranks, count, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks + number, mask=number < count, other=0)
    accesses = tl.maximum(rank >> (_STAMP_BITS + 1), 1)
    tl.store(ranks + number, (accesses << _STAMP_BITS) | (rank & _STAMP_MASK), mask=number < count)


@triton.jit(do_not_specialize=["count", "capacity", "unpin", "keep", "add"])
def edit_tile(flags, slots, count, capacity, unpin, keep, add, BLOCK: tl.constexpr) -> None:
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + number, mask=number < count, other=-1)
    inside = (slot >= 0) & (slot < capacity)
    left = tl.load(flags + slot, mask=inside, other=0) - unpin
    tl.store(flags + slot, (left & keep) | add, mask=inside)


@triton.jit(do_not_specialize=["count"])
def mix_tile(keys, mixed, count, BLOCK: tl.constexpr) -> None:
    """BLOCK keys, such that the order of the signed results is that of the unsigned mixes."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = mix(tl.load(keys + place, mask=inside, other=0)) ^ (1 << 63)
    tl.store(mixed + place, value.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def starts_of_tile(ordered, place, count):
    """int32: 1 where a value differs from the one before, 0 elsewhere and outside."""
    inside = place < count
    value = tl.load(ordered + place, mask=inside, other=0)
    before = tl.load(ordered + place - 1, mask=inside & (place > 0), other=0)
    return (inside & ((place == 0) | (value != before))).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def count_tile(ordered, counts, count, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(starts_of_tile(ordered, place, count), axis=0))


@triton.jit(do_not_specialize=["count"])
def place_tile(
    ordered, order, counts, keys, distinct, starts, num_unique, inverse, count,
    HAS_KEYS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of BLOCK sorted values, numbered from the sum of all earlier tiles' counts."""
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tile, BLOCK):
        earlier += tl.load(counts + first + lane, mask=first + lane < tile, other=0)
    place = tile * BLOCK + lane
    inside = place < count
    begins = starts_of_tile(ordered, place, count)
    number = tl.sum(earlier, axis=0) + tl.cumsum(begins, axis=0) - 1
    is_start = begins != 0
    if HAS_KEYS:
        position = tl.load(order + place, mask=inside, other=0)
        tl.store(inverse + position, number, mask=inside)
        value = tl.load(keys + position, mask=is_start, other=0)
    else:
        value = tl.load(ordered + place, mask=is_start, other=0)
    tl.store(distinct + number, value, mask=is_start)
    tl.store(starts + number, place, mask=is_start)
    is_last = place == count - 1
    tl.store(starts + number + 1, place + 1, mask=is_last)
    tl.store(num_unique + lane * 0, number + 1, mask=is_last)
