"""Stores to export from, and what is in them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tierstore
from tierstore.exchange.rows import read_rows

DTYPES = ("float32", "float16", "bfloat16")
OPTIMIZERS = {
    "sgd": tierstore.optim.SGD(lr=0.3),
    "rowwise_adagrad": tierstore.optim.RowWiseAdagrad(lr=0.2, initial_accumulator_value=0.5),
    "adagrad": tierstore.optim.Adagrad(lr=0.1, weight_decay=0.01),
    "adam": tierstore.optim.Adam(betas=(0.8, 0.99)),
}
STATES = {"sgd": [], "rowwise_adagrad": ["sum"], "adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"]}


def config(name: str = "item", rows: int = 500, dim: int = 5, **fields: Any) -> tierstore.TableConfig:
    return tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=dim, **fields)


def make_store(directory: Path, *configs: tierstore.TableConfig) -> Path:
    """A store whose tables were trained for three steps on some of their rows, and committed."""
    with tierstore.open(directory, ddr="8MiB", threads=1) as store:
        for each in configs:
            bag = tierstore.TieredEmbeddingBag(store.create_table(each))
            for step in range(3):
                ids = torch.arange(step, each.num_embeddings, 7)
                bag(ids, torch.arange(0, len(ids), 2)).square().sum().backward()
            store[each.name].learning_rate = 0.0625
        store.commit(extra={"step": 3}, tensors={"dense.weight": torch.ones(2, 3), "count": torch.tensor(7)})
    return directory


def contents(directory: Path) -> dict[str, Any]:
    with tierstore.open(directory, mode="r", ddr="8MiB", threads=1) as store:
        found: dict[str, Any] = {}
        for name, table in store.tables.items():
            rows = read_rows(table, 0, table.config.num_embeddings)
            found[name] = (table.config, table.state, rows.weights.tobytes(), rows.state.tobytes())
        return found


def weights(directory: Path, table: str = "item") -> Tensor:
    with tierstore.open(directory, mode="r", ddr="8MiB", threads=1) as store:
        return store[table].read(torch.arange(store[table].config.num_embeddings))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
