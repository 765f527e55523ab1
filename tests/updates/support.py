"""Stores to publish from, and what their rows are by other means than the code under test."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tierstore
from tierstore import optim

SMALL: dict[str, Any] = {"ddr": "4MiB", "threads": 1}
ROWS = 900


def table_config(name: str, **fields: Any) -> tierstore.TableConfig:
    fields = {"num_embeddings": ROWS, "embedding_dim": 6, "optimizer": optim.RowWiseAdagrad(lr=0.1)} | fields
    return tierstore.TableConfig(name=name, init=tierstore.init.Normal(std=0.5, seed=7), **fields)


def change(
    directory: Path, seed: int, *, keep: int = 1, names: tuple[str, ...] = ("item", "user")
) -> dict[str, set[int]]:
    """Write some rows, most of them new values, some the bits they had, and commit; the rows whose bits changed."""
    generator = torch.Generator().manual_seed(seed)
    changed: dict[str, set[int]] = {}
    with tierstore.open(directory, keep=keep, **SMALL) as store:
        for name in names:
            config = {"dtype": "bfloat16", "embedding_dim": 5} if name == "user" else {}
            table = store.create_table(table_config(name, **config))
            ids = torch.randperm(ROWS, generator=generator)[:60]
            rows = torch.randn(60, table.config.embedding_dim, generator=generator).to(table.layout.torch_dtype)
            table.write(ids, rows)
            changed[name] = set(ids.tolist())
        extra, tensors = {"step": seed}, {"model.w": torch.full((3,), float(seed)), "optimizer.w": torch.ones(500)}
        store.commit(extra=extra, tensors=tensors)
    return changed


def contents(directory: Path) -> dict[str, Tensor]:
    """Every row of every table, as bits."""
    with tierstore.open(directory, mode="r", **SMALL) as store:
        return {name: table.read(torch.arange(ROWS)).view(torch.uint8) for name, table in store.tables.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def extra_of(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with tierstore.open(directory, mode="r", **SMALL) as store:
        return store.extra, store.tensors()
