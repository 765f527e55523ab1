"""A store of ranks with tables of every kind, trained by drawn batches, and what one process reads of it."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierstore
from tierstore import optim
from tierstore.dist import Plan, ShardedStore, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist import rebalance as dist_rebalance
from tierstore.exchange.rows import read_rows

ROWS = 301
SMALL: dict[str, Any] = {"ddr": "2MiB", "threads": 1}
CONFIGS = {
    name: tierstore.TableConfig(
        name=name, num_embeddings=ROWS, embedding_dim=12, init=tierstore.init.Normal(), **options
    ) for name, options in {
        "a": {"optimizer": optim.Adam(lr=0.1)},
        "b": {"optimizer": optim.RowWiseAdagrad(lr=0.1)},
        "c": {"optimizer": optim.Adam(lr=0.1), "dtype": "bfloat16"},
        "d": {"optimizer": optim.SGD(lr=0.1)},
        "e": {"optimizer": optim.Adam(lr=0.1), "dtype": "bfloat16"},
        "f": {"optimizer": optim.RowWiseAdagrad(lr=0.1)},  # the last: its gradients cannot be collected
    }.items()
}  # fmt: skip
BY_COLUMNS = Sharding("column_wise", (0, 1))
FIXED = {"d": Sharding("data_parallel", (0, 1)), "e": BY_COLUMNS, "f": BY_COLUMNS}
BEFORE = Plan(2, FIXED | {
    "a": Sharding("row_wise", (0, 1)), "b": Sharding("table_wise", (0,), "pooled"),
    "c": Sharding("table_wise", (1,)),
})  # fmt: skip
Bits = dict[str, tuple[bytes, bytes]]


def batch(seed: int, rank: int, names: Sequence[str]) -> tierstore.KeyedJaggedTensor:
    """Of one id a bag where owners pool: sums of several depend on who owns them."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    lengths = torch.tensor([1 if name == "b" else 3 for name in names]).repeat_interleave(12)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return tierstore.KeyedJaggedTensor(list(names), ids, lengths=lengths)


class Job:
    """A store with a module and, if gradients are collected, an optimizer that stay while rows move."""

    def __init__(self, store: ShardedStore, *, collected: bool = False) -> None:
        dist_rebalance.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
        self.store = store
        self.names = list(CONFIGS)[: -1 if collected else None]
        for name in self.names:
            store.create_table(CONFIGS[name])
        self.module = ShardedTieredEmbeddingBagCollection(store, tables=self.names)
        self.optimizer = store.optimizer() if collected else None

    def train(self, step: int) -> None:
        given = [batch(step, self.store.ranks.rank, self.names)]
        for each in tierstore.prefetch(given, self.module) if step % 2 else given:
            self.module(each).values().square().sum().backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def shardings(self) -> dict[str, Sharding]:
        return {name: table.sharding for name, table in self.store.tables.items()}


def opened(folder: Path, **options: Any) -> ShardedStore:
    return open_sharded(folder, plan=BEFORE if dist.get_world_size() == 2 else None, **SMALL | options)


def train(folder: Path, plans: list[Plan | None], options: dict[str, Any], collected: bool) -> Any:
    """A step and a commit for each plan, which says where rows are to go with the commit, if anywhere."""
    with opened(folder, **options) as store:
        job = Job(store, collected=collected)
        for plan in plans:
            step = store.extra.get("steps", 0)
            job.train(step)
            given: Any = {"extra": {"steps": step + 1, "rank": store.ranks.rank}, "tensors": {"w": torch.ones(3)}}
            store.commit(**given) if plan is None else store.rebalance(plan, **given)
        return job.shardings(), [load.num_rows for load in store.balance()]


def contents(source: Path | Any, **options: Any) -> Bits:
    """Of each table's rows and optimizer state, as one process reads them."""
    opened = tierstore.open(source, mode="r", **SMALL | options) if isinstance(source, Path) else None
    with contextlib.nullcontext(source) if opened is None else opened as store:
        rows = {name: read_rows(table, 0, ROWS) for name, table in store.tables.items()}
        return {name: (each.weights.tobytes(), each.state.tobytes()) for name, each in rows.items()}
