"""The kernels of ``grouping`` in plain torch: they run on any device, and are the oracle of ``grouping_triton``."""

import torch
from torch import Tensor

from .books import mixed


def mix_keys(keys: Tensor) -> Tensor:
    """int64 [N]: see ``books.mixed``."""
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
