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
        "f": {"optimizer": optim.RowWiseAdagrad(lr=0.1)},
    }.items()
}  # fmt: skip
BY_COLUMNS = Sharding("column_wise", (0, 1))
PLAN = Plan(2, {
    "a": Sharding("row_wise", (0, 1)), "b": Sharding("table_wise", (0,), "pooled"), "c": Sharding("table_wise", (1,)),
    "d": Sharding("data_parallel", (0, 1)), "e": BY_COLUMNS, "f": BY_COLUMNS,
})  # fmt: skip
Bits = dict[str, tuple[bytes, bytes]]


def batch(seed: int, rank: int, names: Sequence[str]) -> tierstore.KeyedJaggedTensor:
    """Of one id a bag where owners pool: sums of several depend on who owns them."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    lengths = torch.tensor([1 if name == "b" else 3 for name in names]).repeat_interleave(12)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return tierstore.KeyedJaggedTensor(list(names), ids, lengths=lengths)


class Job:
    def __init__(self, store: ShardedStore) -> None:
        self.store = store
        for config in CONFIGS.values():
            store.create_table(config)
        self.module = ShardedTieredEmbeddingBagCollection(store)

    def train(self, step: int) -> None:
        given = [batch(step, self.store.ranks.rank, list(CONFIGS))]
        for each in tierstore.prefetch(given, self.module) if step % 2 else given:
            self.module(each).values().square().sum().backward()


def opened(folder: Path, **options: Any) -> ShardedStore:
    return open_sharded(folder, plan=PLAN if dist.get_world_size() == 2 else None, **SMALL | options)


def train(folder: Path, steps: int = 1, keep: int = 2) -> None:
    with opened(folder, keep=keep) as store:
        job, first = Job(store), store.extra.get("steps", 0)
        for step in range(first, first + steps):
            job.train(step)
            store.commit(extra={"steps": step + 1, "rank": store.ranks.rank}, tensors={"w": torch.ones(3)})


def contents(source: Path | Any, **options: Any) -> Bits:
    opened = tierstore.open(source, mode="r", **SMALL | options) if isinstance(source, Path) else None
    with contextlib.nullcontext(source) if opened is None else opened as store:
        rows = {name: read_rows(table, 0, ROWS) for name, table in store.tables.items()}
        return {name: (each.weights.tobytes(), each.state.tobytes()) for name, each in rows.items()}
