"""The state that the device cache and its kernels share: sets of slots, and a batch's plan.

A key's set is ``(upper half of its mixed key * sets) >> 32``: it ascends with the mixed key, and mixing loses nothing.
So one sort of a batch's mixed keys brings equal keys together and the keys of a set together.

Sources: mixer and range reduction as in ``index``.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

WAYS: Final = 32
"""Slots of a set: as many as a warp has threads, and 256 bytes of keys."""

PIN: Final = 16
"""One pin of a slot; a slot's flags are at least this while it is pinned."""
STAMP_BITS: Final = 40
"""Of a rank, see ``CacheState``."""
NO_SUCH_SLOT: Final = 1 << 30
"""Flags of a way that the last set does not have: for ever pinned."""

_MIX_A: Final = 0xBF58476D1CE4E5B9 - 2**64
_MIX_B: Final = 0x94D049BB133111EB - 2**64
_TOP: Final = -(2**63)


class Status(IntEnum):
    """What the plan has for a key."""

    HIT = 0
    TAKEN = 1
    """It lies elsewhere and takes no slot."""
    FREE_SLOT = 2
    CLEAN_VICTIM = 3
    DIRTY_VICTIM = 4
    """The row that leaves is dirty: write it back before the plan is carried out."""
    CONFLICT = 5
    """Every slot of the set is pinned."""
    NO_KEY = 7
    """There are fewer keys."""


NUM_STATUSES: Final = 8
"""A power of two, as Triton's ranges are."""


SUMMARY_ROWS: Final = 32
"""Of a plan's summary: so that not all programs add to the same few bytes."""


class CacheState(NamedTuple):
    """Bookkeeping of slots, set after set, 32 a set."""

    keys: Tensor
    """int64 [sets * WAYS]."""
    ranks: Tensor
    """int64 [sets * WAYS]: the victim is the unpinned row of least rank. Least recently used: the number of the last
    access. Least frequently used: ``accesses << STAMP_BITS | number of the last access`` (after 2**40 accesses the
    least used is not always found)."""
    flags: Tensor
    """int32 [sets * WAYS]: those of ``flags``, plus ``PIN`` for each pin; 0 is a free slot."""

    @classmethod
    def empty(cls, capacity: int, device: torch.device) -> "CacheState":
        size = -(-capacity // WAYS) * WAYS
        flags = torch.zeros(size, dtype=torch.int32, device=device)
        flags[capacity:] = NO_SUCH_SLOT
        keys, ranks = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        return cls(keys, ranks, flags)


class Plan(NamedTuple):
    """Where the first U of N distinct keys would lie."""

    keys: Tensor
    """int64 [N]."""
    slots: Tensor
    """int32 [N]; where a key lies if that is elsewhere; -1 for a conflict miss, and from U on."""
    statuses: Tensor
    """int8 [N]: Status; from U on NO_KEY."""
    summary: Tensor
    """int32 [SUMMARY_ROWS, NUM_STATUSES]: the column sums are how many keys have each status. It is overwritten after
    the next plan's commit."""


def mixed(keys: Tensor) -> Tensor:
    """int64 [n]: the keys mixed, one to one; in signed order, which is the order of their sets."""
    mix = (keys ^ _shifted(keys, 30)) * _MIX_A
    mix = (mix ^ _shifted(mix, 27)) * _MIX_B
    return mix ^ _TOP


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def sets_of(mixed_keys: Tensor, num_sets: int) -> Tensor:
    """int32 [n]: the set of each mixed key."""
    upper = (mixed_keys >> 32) + (1 << 31)
    return ((upper * num_sets) >> 32).to(torch.int32)
