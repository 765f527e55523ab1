"""The device tier over all pools of a store: one budget, one side stream, one account."""

from collections.abc import Iterable, Mapping
from typing import Final, get_args

import torch

from ..cache.hbm import PolicyName
from ..config import TableConfig
from ..errors import BudgetError, TableError
from ..optim.configs import RowWiseAdagradOfColumns
from ..pool import Pool
from ..pool.stats import TierStats, of_counters
from ..rows import QuantizedName, RowLayout
from ..system.sizes import format_size
from .lanes import open_lane
from .pool import HbmPool, HbmSize

POLICIES: Final[dict[str, PolicyName]] = {
    "auto": "lru", "lru": "lru", "lfu": "lfu", "tinylfu": "lfu", "lookahead": "lru"
}  # fmt: skip
"""The device's policy for each of the host's. Its LFU asks a sketch before it lets a row in, as TinyLFU does."""


def add_hbm(
    pools: Iterable[Pool], sizes: Mapping[RowLayout, HbmSize], *, device: torch.device, policy: str, given: object
) -> None:
    """Give each pool its part of device memory.

    Args:
        policy: of the store; the device's nearest is used (``POLICIES``).
        given: the budget as its owner wrote it, for messages.

    Raises:
        BudgetError: the device has less memory free.
    """
    lane = open_lane(device)
    own = POLICIES[policy.removeprefix("reference-")]
    try:
        for pool in pools:
            pool.hot = HbmPool(pool, sizes[pool.layout], lane, device, own)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise BudgetError(
            f"hbm={given!r}: {device} has {format_size(free)} free of {format_size(total)}; give less"
        ) from error


def require_supported(config: TableConfig, *, readonly: bool) -> None:
    """TableError for a table that the device tier has no kernels for.

    Args:
        readonly: nothing will be trained.
    """
    if config.dtype in get_args(QuantizedName):
        raise TableError(
            f"table {config.name!r} has {config.dtype} rows, which are not supported with hbm; open the store "
            'with hbm=0 and device="cpu", or quantize to float16 or bfloat16'
        )
    if config.rounding != "nearest" and not readonly:
        raise TableError(
            f"table {config.name!r} has rounding={config.rounding!r}, which is not supported with hbm; open the store "
            'with hbm=0 and device="cpu", or with mode="r" for lookups alone, or make a table with rounding="nearest"'
        )
    if isinstance(config.optimizer, RowWiseAdagradOfColumns):
        raise TableError(
            f"table {config.name!r} is sharded column_wise with row-wise Adagrad, which is not supported with hbm: "
            'shard it "row_wise", or open the store with hbm=0'
        )


def hbm_stats(pools: Iterable[Pool]) -> TierStats:
    """What the device tier over these pools did."""
    hot = [pool.hot for pool in pools if isinstance(pool.hot, HbmPool)]
    return of_counters([pool.counters for pool in hot])._replace(
        capacity_rows=sum(pool.cache.capacity + pool.overflow.capacity for pool in hot),
        bytes=sum(pool.size_bytes for pool in hot),
        seconds=sum(pool.fill_seconds for pool in hot),
        split_batches=sum(pool.split_batches for pool in hot),
        conflict_misses=sum(pool.conflict_misses for pool in hot),
    )
