"""Small pools over a cold tier that is slow, or fails: one in host memory, and one in device memory above it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tierstore import init, optim
from tierstore.cache.ddr import DdrCache
from tierstore.config import TableConfig
from tierstore.hbm.cache import HbmSize
from tierstore.hbm.pool import HbmPool
from tierstore.hbm.streams import Sender, Streams
from tierstore.kernels.threads import Workers
from tierstore.pool.pool import Pool

CAPACITY, ROWS, DIM = 64, 1000, 3
CACHED, OVERFLOW, STAGED = 32, 8, 4
"""In device memory: one set, so that more than 32 rows at once overflow."""
CONFIG = TableConfig(
    name="t", num_embeddings=ROWS, embedding_dim=DIM, init=init.Constant(1.0), optimizer=optim.RowWiseAdagrad()
)


def make_pool(tier: Any, policy: str = "lru") -> Pool:
    layout = CONFIG.layout(4096)
    tier.set_tables({0: (layout, ROWS)})
    rows = DdrCache(CAPACITY, policy=policy, weight_words=layout.weight_words, state_words=layout.state_words)
    made = Pool(layout, rows, tier, Workers(1), transaction_bytes=1 << 16, outbox_rows=8, epoch=1, readonly=False)
    made.leases.add_table(0, CONFIG)
    return made


def make_hot(tier: Any, policy: Any = "lru") -> HbmPool:
    size = HbmSize(cached_rows=CACHED, overflow_rows=OVERFLOW, staging_rows=STAGED)
    return HbmPool(make_pool(tier), size, Sender(Streams(), torch.device("cpu")), policy)


def keys(rows: Iterable[int]) -> Any:
    return np.array(list(rows), np.int64)


def read(tier: Any, rows: Iterable[int]) -> list[float]:
    found = tier.read(keys(rows))
    assert torch.equal(found, found[:, :1].expand(-1, DIM))
    return found[:, 0].tolist()  # type: ignore[no-any-return]


def write(tier: Any, rows: Iterable[int], value: float) -> None:
    written = keys(rows)
    tier.write(written, torch.full((len(written), DIM), value))
