"""The device tier over all pools of a store: one budget, one side stream, one account."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch

from ..config import TableConfig
from ..errors import BudgetError, TableError
from ..layout import QuantizedName, RowLayout
from ..optim.configs import RowWiseAdagradOfColumns
from ..pool.pool import Pool
from ..pool.stats import TierStats, of_counters
from ..system.sizes import format_size
from .base import rows_of
from .cache import HbmSize, PolicyName
from .full import FullRows
from .pool import HbmPool
from .streams import Sender, open_streams


def add_hbm(
    pools: Iterable[Pool], sizes: Mapping[RowLayout, HbmSize], tables: Sequence[Any], *, device: torch.device,
    policy: str, readonly: bool, given: object,
) -> None:  # fmt: skip
    """Give each pool its part of device memory, for some ``Table``s. BudgetError, which names the budget as ``given``:
    the device has less memory free."""
    sender = Sender(open_streams(device), device)
    own: PolicyName = "lfu" if policy.endswith("lfu") else "lru"
    try:
        for pool in pools:
            ranges = {table.index: table.rows for table in tables if table.layout == pool.layout}
            size = sizes[pool.layout]
            if size.overflow_rows:
                pool.tier = HbmPool(pool, size, sender, own)
            else:
                pool.tier = FullRows(pool, ranges, size, sender, readonly=readonly)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise BudgetError(
            f"hbm={given!r}: {device} has {format_size(free)} free of {format_size(total)}; give less"
        ) from error


def require_supported(config: TableConfig, *, readonly: bool) -> None:
    """TableError for a table that the device tier has no kernels for. ``readonly``: nothing will be trained."""
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
            f"table {config.name!r} is sharded by columns with row-wise Adagrad, which is not supported with hbm: "
            'shard it "row_wise", or open the store with hbm=0'
        )


def hbm_stats(pools: Iterable[Pool]) -> TierStats:
    hot = [rows_of(pool) for pool in pools if pool.tier.on_device]
    return of_counters([rows.counters for rows in hot])._replace(
        capacity_rows=sum(rows.capacity_rows for rows in hot),
        bytes=sum(rows.size_bytes for rows in hot),
        seconds=sum(rows.fill_seconds for rows in hot),
        split_batches=sum(rows.split_batches for rows in hot),
        conflict_misses=sum(rows.conflict_misses for rows in hot),
    )
