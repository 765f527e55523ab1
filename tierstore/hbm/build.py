"""The device tier over all pools of a store: one budget, one side stream."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import BudgetError
from ..pool import Pool
from ..rows import RowLayout
from ..sizes import format_size
from .lanes import open_lane
from .pool import HbmPool, HbmSize

__all__ = ["add_hbm"]


def add_hbm(
    pools: Iterable[Pool], sizes: Mapping[RowLayout, HbmSize], *, device: torch.device, policy: str, given: object
) -> None:
    """Give each pool its part of device memory.

    Args:
        policy: of the store; a reference policy's fast twin is used.
        given: the budget as its owner wrote it, for messages.

    Raises:
        BudgetError: the device has less memory free.
    """
    lane = open_lane(device)
    own: Any = policy.removeprefix("reference-")
    try:
        for pool in pools:
            pool.hot = HbmPool(pool, sizes[pool.layout], lane, device, own)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise BudgetError(
            f"hbm={given!r}: {device} has {format_size(free)} free of {format_size(total)}; give less"
        ) from error
