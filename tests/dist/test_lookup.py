"""Sharded training against one process that works off the ranks' batches one after another: the same bits."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.dist import (
    ShardedStore,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    open_sharded,
)
from tierstore.rows import KEY_ROW_BITS
from tierstore.store import Table

from .ranks import run

ROWS, DIM, STEPS, SAMPLES = 300, 20, 4, 8
TIERS: dict[str, dict[str, Any]] = {
    "in place": {"ddr": "1MiB"},
    "evicting": {"ddr": "500KiB"},
    "hbm": {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"},
}


class Case(NamedTuple):
    """How tables are sharded, trained and looked up."""

    sharding_type: Any
    rule: optim.Optimizer
    pooling: Any
    is_pooled: bool = True
    is_weighted: bool = False
    dtype: Any = "float32"
    rounding: Any = "nearest"
    calls: int = 1  # of forward in a backward pass


CASES = [
    *itertools.starmap(
        Case,
        itertools.product(
            ["row_wise", "table_wise"], [optim.RowWiseAdagrad(lr=0.3), optim.Adam(lr=0.1)], ["sum", "mean"]
        ),
    ),
    Case("row_wise", optim.Adagrad(lr=0.3), "max"),
    Case("row_wise", optim.Adagrad(lr=0.3), "max", calls=2),
    Case("row_wise", optim.SGD(lr=0.3), "sum", is_weighted=True),
    Case("row_wise", optim.SGD(lr=0.3), "sum", is_pooled=False),
    Case("row_wise", optim.SGD(lr=0.3), "sum", dtype="bfloat16", rounding="stochastic"),
]


def config(case: Case, name: str) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, feature_names=[f"{name}1", f"{name}2"], num_embeddings=ROWS, embedding_dim=DIM, optimizer=case.rule,
        pooling=case.pooling, dtype=case.dtype, rounding=case.rounding,
    )  # fmt: skip


def batch(case: Case, rank: int, step: int) -> tuple[tierstore.KeyedJaggedTensor, Tensor]:
    """A rank's ids, and a gradient of each element of its results."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 6, (4 * SAMPLES,), generator=generator) * (rank != 0 or step != 2)  # one has no id
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator).requires_grad_() if case.is_weighted else None
    jagged = tierstore.KeyedJaggedTensor(["a1", "a2", "b1", "b2"], ids, weights, lengths=lengths)
    shape = (SAMPLES, 4 * DIM) if case.is_pooled else (len(ids), DIM)
    return jagged, torch.randn(shape, generator=generator)


def look_up(case: Case, module: Any, jagged: tierstore.KeyedJaggedTensor) -> Tensor:
    found = module(jagged)
    return found.values() if case.is_pooled else torch.cat([each.values() for each in found.values()])


def train_step(case: Case, module: Any, rank: int, step: int, divisor: int = 1) -> tuple[Tensor, Tensor | None]:
    """A backward pass of gradients divided; (results, the weights' gradient as if they were not)."""
    batches = [batch(case, rank, step + STEPS * call) for call in range(case.calls)]
    results = [look_up(case, module, jagged) for jagged, _ in batches]
    torch.autograd.backward(results, [gradient / divisor for _, gradient in batches])
    weights = batches[0][0].weights_or_none()
    grad = None if weights is None else weights.grad
    return torch.cat(results).detach(), None if grad is None else grad * divisor


def train_rank(case: Case, tiers: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(of each table the rows that this rank owns, and which; its results and gradients of weights)."""
    rank = dist.get_rank()
    with open_memory(tiers) as store:
        for name in "ab":
            store.create_table(config(case, name), sharding_type=case.sharding_type)
        kind = ShardedTieredEmbeddingBagCollection if case.is_pooled else ShardedTieredEmbeddingCollection
        module = kind(store)
        results = [train_step(case, module, rank, step) for step in range(STEPS)]
        return {table.name: owned(store, table) for table in store.tables.values()}, results


def open_memory(tiers: dict[str, Any]) -> ShardedStore:
    return open_sharded(None, cold="memory", **tiers)


def owned(store: ShardedStore, table: Table) -> tuple[Tensor, Tensor]:
    mine = store.owners.of(np.arange(table.config.num_embeddings) | (table.index << KEY_ROW_BITS)) == store.ranks.rank
    ids = torch.from_numpy(np.flatnonzero(mine))
    return ids, table.read(ids)


def cases(tiers: dict[str, Any]) -> list[Case]:
    return [case for case in CASES if case.rounding == "nearest" or "hbm" not in tiers]


def train_all(tiers: dict[str, Any]) -> list[Any]:
    return [train_rank(case, tiers) for case in cases(tiers)]


def expected(case: Case, ranks: int) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Rows in the end, and the results of each rank's batches."""
    results: list[list[Any]] = [[] for _ in range(ranks)]
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        for name in "ab":
            store.create_table(config(case, name))
        kind = tierstore.TieredEmbeddingBagCollection if case.is_pooled else tierstore.TieredEmbeddingCollection
        module, optimizer = kind(store), store.optimizer()
        for step in range(STEPS):
            for rank in range(ranks):
                results[rank].append(train_step(case, module, rank, step, ranks))
            optimizer.step()
            optimizer.zero_grad()
        return {table.name: table.read(torch.arange(ROWS)) for table in store.tables.values()}, results


@pytest.mark.parametrize(
    ("ranks", "tiers"), [(1, "in place"), (2, "in place"), (2, "evicting"), (4, "evicting"), (2, "hbm")]
)
def test_training_gives_the_bits_of_one_process(ranks: int, tiers: str, tmp_path: Path) -> None:
    found = run(train_all, ranks, tmp_path, TIERS[tiers])
    for number, case in enumerate(cases(TIERS[tiers])):
        rows, results = expected(case, ranks)
        for name, wanted in rows.items():
            ids = torch.cat([of_rank[number][0][name][0] for of_rank in found])
            assert torch.equal(ids.sort().values, torch.arange(ROWS)), "each row has one owner"
            trained = torch.cat([of_rank[number][0][name][1] for of_rank in found])
            assert torch.equal(trained, wanted[ids]), case
        for rank in range(ranks):
            for (out, of_weights), (wanted_out, wanted_of_weights) in zip(
                found[rank][number][1], results[rank], strict=True
            ):
                assert torch.equal(out, wanted_out), case
                assert of_weights is None or torch.allclose(of_weights, wanted_of_weights, rtol=1e-6), case
