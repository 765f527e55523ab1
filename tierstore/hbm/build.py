"""The device tier over all pools of a store: one budget, one side stream, one account."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, get_args

import torch

from ..config import TableConfig
from ..errors import BudgetError, TableError
from ..kernels.slots import MODES
from ..layout import QuantizedName, RowLayout
from ..optim.configs import RowWiseAdagradOfColumns
from ..pool import Pool
from ..pool.stats import TierStats, of_counters
from ..system.sizes import format_size
from .base import rows_of
from .cache import PolicyName
from .full import FullSize
from .lanes import NOT_THERE, open_lane
from .pool import HbmSize
from .staging import Sender

POLICIES: Final[dict[str, PolicyName]] = {
    "auto": "lru", "lru": "lru", "lfu": "lfu", "tinylfu": "lfu", "lookahead": "lru"
}  # fmt: skip
"""The device's policy for each of the host's. Its LFU asks a sketch before it lets a row in, as TinyLFU does."""


DeviceSize = FullSize | HbmSize
"""How much device memory a pool has, and for what."""


class HbmTable(Protocol):
    config: TableConfig
    index: int
    layout: RowLayout
    rows: range


def add_hbm(
    pools: Iterable[Pool], sizes: Mapping[RowLayout, DeviceSize], tables: Sequence[HbmTable], *, device: torch.device,
    policy: str, readonly: bool, given: object,
) -> None:  # fmt: skip
    """Give each pool its part of device memory. BudgetError, which names ``given``, the budget as its owner wrote it:
    the device has less memory free."""
    sender = Sender(open_lane(device), device)
    sender.lane.require_no_capture(NOT_THERE)
    own = POLICIES[policy.removeprefix("reference-")]
    try:
        for pool in pools:
            size, its_tables = sizes[pool.layout], [table for table in tables if table.layout == pool.layout]
            ranges = {table.index: table.rows for table in its_tables}
            rows = size.make_rows(pool, ranges, sender, policy=own, readonly=readonly)
            configs = [table.config for table in its_tables]
            rows.warm_up({config.optimizer.code for config in configs}, {MODES[config.pooling] for config in configs})
            pool.tier = rows
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
    return of_counters([rows.all_counters for rows in hot])._replace(
        capacity_rows=sum(rows.capacity_rows for rows in hot),
        bytes=sum(rows.size_bytes for rows in hot),
        seconds=sum(rows.fill_seconds for rows in hot),
        split_batches=sum(rows.split_batches for rows in hot),
        conflict_misses=sum(rows.conflict_misses for rows in hot),
    )
