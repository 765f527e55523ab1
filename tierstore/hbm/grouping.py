"""Equal ids brought together on the device: one stable sort of a batch's mixed keys.

It gives the distinct keys, in order of their cache sets; the positions of each, in id-list order; and so both what a
cache is asked for and what backward merges.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.hbm_books import mixed, sets_of
from .batch import Groups


class Grouping(NamedTuple):
    """A batch of N keys, U distinct.

    Attributes:
        keys: int64 [U], distinct, by set.
        sets: int32 [U], ascending: the cache set of each.
        inverse: int32 [N], which of the distinct keys each position has.
        groups: the positions of each distinct key.
    """

    keys: Tensor
    sets: Tensor
    inverse: Tensor
    groups: Groups


def group(keys: Tensor, num_sets: int) -> Grouping:
    """Group int64 [N], N > 0. Waits for the device once, for U."""
    ordered, order = torch.sort(mixed(keys), stable=True)
    begins = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    starts = torch.nonzero(begins).flatten()
    inverse = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    inverse[order] = torch.cumsum(begins, 0, dtype=torch.int32) - 1
    ends = torch.full((1,), len(keys), dtype=torch.int64, device=keys.device)
    groups = Groups(order.to(torch.int32), torch.cat([starts, ends]), len(starts))
    return Grouping(keys[order[starts]], sets_of(ordered[starts], num_sets), inverse, groups)
