"""The device cache's kernels in Triton. Their twins in ``hbm_twin`` specify and check what they compute.

Bytes a key: find reads 8 of the key, 256 of its set's keys and, of a hit, one 32-byte sector of flags. A plan reads
the set's keys, ranks and flags (640 bytes) once for all keys of the set.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .flags import DIRTY, LOADING, RESIDENT
from .hbm_books import PIN, STAMP_BITS, WAYS, Books, Plan, Status
from .hbm_twin import MAX_COUNT

_WAYS: Final = tl.constexpr(WAYS)
_RESIDENT: Final = tl.constexpr(RESIDENT)
_DIRTY: Final = tl.constexpr(DIRTY)
_PIN: Final = tl.constexpr(PIN)
_ENTERED: Final = tl.constexpr(RESIDENT | LOADING | PIN)
_STAMP_BITS: Final = tl.constexpr(STAMP_BITS)
_MAX_COUNT: Final = tl.constexpr(MAX_COUNT)
_NEVER: Final = tl.constexpr(2**63 - 1)
_HIT: Final = tl.constexpr(int(Status.HIT))
_FREE_SLOT: Final = tl.constexpr(int(Status.FREE_SLOT))
_CLEAN_VICTIM: Final = tl.constexpr(int(Status.CLEAN_VICTIM))
_TAKEN: Final = tl.constexpr(int(Status.TAKEN))
_DIRTY_VICTIM: Final = tl.constexpr(int(Status.DIRTY_VICTIM))
_CONFLICT: Final = tl.constexpr(int(Status.CONFLICT))
_REFUSED: Final = tl.constexpr(int(Status.REFUSED))

_OPTIONS: Final = {"enable_fp_fusion": False}
"""Integers only; said because what Triton does unsaid is about to change, and it warns of that."""
_FIND_BLOCK: Final = 32
_COMMIT_BLOCK: Final = 256


@triton.jit
def mix(key):
    """uint64: the keys (int64) mixed; see ``hbm_books.mixed``."""
    value = key.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    return (value ^ (value >> 27)) * 0x94D049BB133111EB


@triton.jit(do_not_specialize=["count"])
def find_keys(book_keys, flags, keys, sets, slots, count, BLOCK: tl.constexpr) -> None:
    """A tile of BLOCK keys by the ways of their sets; flags are read only where the key is the same."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    key = tl.load(keys + number, mask=inside, other=0)
    first = tl.load(sets + number, mask=inside, other=0).to(tl.int64) * _WAYS
    way = tl.arange(0, _WAYS)
    places = first[:, None] + way[None, :]
    same = (tl.load(book_keys + places, mask=inside[:, None], other=0) == key[:, None]) & inside[:, None]
    same = same & ((tl.load(flags + places, mask=same, other=0) & _RESIDENT) != 0)
    # A key lies in one slot at most, so the largest is the only one.
    found = tl.max(tl.where(same, places, -1), axis=1)
    tl.store(slots + number, found.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["count"])
def plan_sets(
    book_keys, ranks, flags, keys, sets, taken, counts, slots, statuses, count,
    HAS_TAKEN: tl.constexpr, HAS_COUNTS: tl.constexpr,
) -> None:  # fmt: skip
    """One warp a set: the program of a set's first key plans all its keys, with the set's state in registers."""
    number = tl.program_id(0)
    own = tl.load(sets + number)
    if tl.load(sets + number - 1, mask=number > 0, other=-1) != own:
        way = tl.arange(0, _WAYS)
        first = own.to(tl.int64) * _WAYS
        set_keys = tl.load(book_keys + first + way)
        set_flags = tl.load(flags + first + way)
        set_ranks = tl.where((set_flags & _RESIDENT) != 0, tl.load(ranks + first + way), -1)
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
            if HAS_COUNTS:
                status = tl.where(tl.load(counts + number) < (least >> _STAMP_BITS), _REFUSED, status)
            status = tl.where(was == 0, _FREE_SLOT, status)
            status = tl.where(least == _NEVER, _CONFLICT, status)
            status = tl.where(is_hit, _HIT, status)
            if HAS_TAKEN:
                status = tl.where(tl.load(taken + number) != 0, _TAKEN, status)
            fits = (status < _CONFLICT) & (status != _TAKEN)
            tl.store(slots + number, tl.where(fits, first + chosen, -1).to(tl.int32))
            tl.store(statuses + number, status.to(tl.int8))
            set_keys = tl.where(is_chosen & fits, key, set_keys)
            set_flags = tl.where(is_chosen & fits, _RESIDENT | _PIN, set_flags)
            following = tl.load(sets + number + 1, mask=number + 1 < count, other=-1)
            number = tl.where(following == own, number + 1, count)


@triton.jit(do_not_specialize=["count", "clock"])
def commit_slots(
    book_keys, ranks, flags, keys, slots, statuses, counts, count, clock,
    LFU: tl.constexpr, HAS_COUNTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK keys of a plan; their slots are distinct."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + number, mask=number < count, other=-1).to(tl.int64)
    fits = slot >= 0
    is_hit = fits & (tl.load(statuses + number, mask=fits, other=_CONFLICT) == _HIT)
    rank = number.to(tl.int64) + 1 + clock
    if LFU:
        accesses = tl.minimum((tl.load(ranks + slot, mask=is_hit, other=0) >> _STAMP_BITS) + 1, _MAX_COUNT)
        if HAS_COUNTS:
            accesses = tl.where(is_hit, accesses, tl.load(counts + number, mask=fits, other=0).to(tl.int64))
        rank = (accesses << _STAMP_BITS) | rank
    flag = tl.load(flags + slot, mask=is_hit, other=0)
    tl.store(book_keys + slot, tl.load(keys + number, mask=fits, other=0), mask=fits)
    tl.store(ranks + slot, rank, mask=fits)
    tl.store(flags + slot, tl.where(is_hit, flag + _PIN, _ENTERED), mask=fits)


def find(books: Books, keys: Tensor, sets: Tensor) -> Tensor:
    """See ``hbm_twin.find``."""
    slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    if len(keys):
        grid = (triton.cdiv(len(keys), _FIND_BLOCK),)
        find_keys[grid](books.keys, books.flags, keys, sets, slots, len(keys), BLOCK=_FIND_BLOCK, **_OPTIONS)
    return slots


def plan(books: Books, keys: Tensor, sets: Tensor, taken: Tensor | None, counts: Tensor | None) -> Plan:
    """See ``hbm_twin.plan``."""
    slots = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    statuses = torch.empty(len(keys), dtype=torch.int8, device=keys.device)
    if len(keys):
        marks = slots if taken is None else taken.view(torch.int8)
        known = slots if counts is None else counts
        plan_sets[(len(keys),)](
            books.keys, books.ranks, books.flags, keys, sets, marks, known, slots, statuses, len(keys),
            HAS_TAKEN=taken is not None, HAS_COUNTS=counts is not None, num_warps=1, **_OPTIONS,
        )  # fmt: skip
    return Plan(slots, statuses, counts)


def commit(books: Books, keys: Tensor, plan: Plan, clock: int, lfu: bool) -> None:
    """See ``hbm_twin.commit``."""
    count = len(keys)
    if count:
        grid = (triton.cdiv(count, _COMMIT_BLOCK),)
        known = plan.slots if plan.counts is None else plan.counts
        commit_slots[grid](
            books.keys, books.ranks, books.flags, keys, plan.slots, plan.statuses, known, count, clock,
            LFU=lfu, HAS_COUNTS=plan.counts is not None, BLOCK=_COMMIT_BLOCK, **_OPTIONS,
        )  # fmt: skip
