"""Equal ids brought together on the device: one stable sort of a batch, and two kernels that find where groups begin.

The host never learns how many distinct ids there are: results have room for N, of which the first U are valid.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import backend
from .batch import Groups


class Grouping(NamedTuple):
    """A batch of N keys, U distinct.

    Attributes:
        keys: int64 [N]; the first U are the distinct keys, in order of their cache sets.
        inverse: int32 [N], which of the distinct keys each position has.
        groups: the positions of each distinct key.
    """

    keys: Tensor
    inverse: Tensor
    groups: Groups


def group_keys(keys: Tensor) -> Grouping:
    """Group int64 [N] by key, N > 0. Keys are sorted by ``books.mixed``, so keys of a set are neighbours."""
    kernels = backend.cache_kernels(keys.device)
    ordered, order = torch.sort(kernels.mix_keys(keys), stable=True)
    distinct, starts, num_unique, inverse = kernels.place_starts(ordered, order, keys)
    return Grouping(distinct, inverse, Groups(order, starts, num_unique))


def group_slots(slots: Tensor) -> tuple[Tensor, Groups]:
    """Group int32 [N] by slot, N > 0: int32 [N], whose first U are the distinct slots, ascending; and the groups."""
    kernels = backend.cache_kernels(slots.device)
    ordered, order = torch.sort(slots, stable=True)
    distinct, starts, num_unique, _ = kernels.place_starts(ordered, order, None)
    return distinct, Groups(order, starts, num_unique)


def warm_up(device: torch.device) -> None:
    group_keys(torch.zeros(1, dtype=torch.int64, device=device))
    group_slots(torch.zeros(1, dtype=torch.int32, device=device))
