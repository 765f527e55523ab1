"""A model sharded as it stands trains as one whose sharded modules were written by hand, to the same bits."""

import copy
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import tierstore
from tests.dist.placement.support import costs_of
from tierstore import optim
from tierstore.dist import (
    Plan,
    ShardedTieredEmbedding,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    Sharding,
    data_parallel,
    open_sharded,
    shard,
)
from tierstore.errors import RankError, TableError
from tierstore.exchange.rows import read_rows
from tierstore.models import DLRM

from .ranks import run

ROWS, DIM, SAMPLES, STEPS = 60, 8, 16, 3
RULE = optim.Adam(lr=0.1)
SMALL: dict[str, Any] = {"cold": "memory", "ddr": "2MiB", "threads": 1}


class Words(nn.Module):
    """Bags and single rows, which share a weight, and a bag of its own."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", device=device)
        self.row = nn.Embedding(ROWS, DIM, device=device)
        self.row.weight = self.bag.weight
        self.other = nn.ModuleDict({"mean": nn.EmbeddingBag(ROWS + 1, DIM, padding_idx=2, device=device)})
        self.dense = nn.Linear(3 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Of int64 [samples, 4]."""
        found: Tensor = self.dense(torch.cat([self.bag(ids), self.row(ids[:, 0]), self.other["mean"](ids)], 1))
        return found


def words(seed: int = 0, device: str = "cpu") -> Words:
    torch.manual_seed(seed)
    return Words(device)


def by_hand(store: Any, model: Words) -> nn.Module:
    """Words over two tables of a sharded store."""
    for name, rows, pooling in (("item", ROWS, "sum"), ("other", ROWS + 1, "mean")):
        init = tierstore.init.Normal(std=1.0)
        config: Any = {"name": name, "num_embeddings": rows, "embedding_dim": DIM, "pooling": pooling}
        store.create_table(tierstore.TableConfig(**config, optimizer=RULE, init=init))
    model.bag = ShardedTieredEmbeddingBag(store, "item")  # type: ignore[assignment]
    model.row = ShardedTieredEmbedding(store, "item")  # type: ignore[assignment]
    model.other["mean"] = ShardedTieredEmbeddingBag(store, "other", padding_idx=2)
    return data_parallel(model)


def write(store: Any, weights: dict[str, Tensor]) -> None:
    """What this rank owns of them."""
    for name, weight in weights.items():
        table = store[name]
        if len(table.rows):
            rows = torch.arange(table.rows.start, table.rows.stop)
            table.local.write(rows, weight.detach()[rows][:, table.columns.start : table.columns.stop])


NAMES = {"bag": "item", "other.mean": "other"}


def train(store: Any, model: Any, batch: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """Bits of this rank's losses, the dense weights, and its rows with their optimizer state, in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(10 * step + dist.get_rank())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dense = [each.detach().numpy().tobytes() for each in model.parameters()]
    rows = {name: read_rows(each.local, each.rows.start, each.rows.stop) for name, each in store.tables.items()}
    return [losses, dense, {name: (each.weights.tobytes(), each.state.tobytes()) for name, each in rows.items()}]


def ids(seed: int) -> tuple[Tensor]:
    return (torch.randint(0, ROWS, (SAMPLES, 4), generator=torch.Generator().manual_seed(seed)),)


def torchs_modules(folder: Path) -> None:
    """Modules of torch's: on "meta", with weights, from files, from stores; each to the bits of those by hand."""
    given = words(seed=1)
    weights = {"item": given.bag.weight, "other": given.other["mean"].weight}
    path, rank = folder / f"weights-{dist.get_rank()}.safetensors", dist.get_rank()
    save_file({key: each.contiguous() for key, each in given.state_dict().items() if "row" not in key}, path)
    with tierstore.open(folder / f"plain-{rank}", ddr="2MiB") as plain:
        for name, weight in weights.items():
            pooling: Any = "sum" if name == "item" else "mean"
            shape: Any = {"name": name, "num_embeddings": len(weight), "embedding_dim": DIM, "pooling": pooling}
            plain.create_table(tierstore.TableConfig(**shape, optimizer=RULE)).write(torch.arange(len(weight)), weight)
        plain.commit()
    with open_sharded(**SMALL) as store:
        on_meta = train(store, by_hand(store, words()), ids)
    with open_sharded(**SMALL) as store:
        model = by_hand(store, words())
        write(store, weights)
        copied = train(store, model, ids)
    assert on_meta[0] != copied[0]
    for expected, model, source in (
        (on_meta, words(device="meta"), None),
        (copied, words(), given),
        (copied, words(device="meta"), path),
        (copied, words(device="meta"), folder / f"plain-{rank}"),
        (copied, words(), path),
    ):
        if source is given:
            model.bag.weight.data.copy_(given.bag.weight)
            model.other["mean"].weight.data.copy_(given.other["mean"].weight)
        if model.bag.weight.is_meta:
            model.row.weight = model.bag.weight
            torch.manual_seed(0)
            model.dense = words().dense
        with open_sharded(**SMALL) as store:
            sharded = shard(model, store, tables=NAMES, optimizer=RULE, source=None if source is given else source)
            assert sharded.module is model
            assert list(store.tables) == ["item", "other"]
            assert train(store, sharded, ids) == expected


def test_torchs_modules_are_sharded_as_by_hand(tmp_path: Path) -> None:
    run(torchs_modules, 2, tmp_path, tmp_path)
