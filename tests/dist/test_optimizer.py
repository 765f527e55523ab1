"""Gradients of rows collected over ranks, added up and clipped, against one process."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded

from .ranks import run

ROWS, DIM, STEPS, SAMPLES, RANKS = 100, 8, 3, 8, 2
KINDS: list[dict[str, Any]] = [
    {"sharding_type": "row_wise"},
    {"sharding_type": "table_wise", "exchange": "pooled"},
    {"sharding_type": "column_wise"},
    {"sharding_type": "data_parallel"},
]


def config(name: str) -> tierstore.TableConfig:
    return tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=optim.Adagrad(lr=0.3))


def loss_of(module: Any, dense: Tensor, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.randint(0, ROWS, (2 * SAMPLES,), generator=generator)
    jagged = tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(2 * SAMPLES, dtype=torch.int64))
    loss: Tensor = ((module(jagged).values() * dense - torch.rand(SAMPLES, 2 * DIM, generator=generator)) ** 2).mean()
    return loss


def train(
    module: Any, optimizer: Any, ranks: Sequence[int], divisor: int, average: Callable[[Tensor], None]
) -> tuple[list[float], dict[str, Tensor]]:
    """(norms, rows of each table as a lookup gives them) after steps over these ranks' batches."""
    dense, norms = torch.ones(2 * DIM, requires_grad=True), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        for part, rank in itertools.product(range(2), ranks):
            (loss_of(module, dense, rank, 2 * step + part) / 2 / divisor).backward()  # type: ignore[no-untyped-call]
        assert dense.grad is not None
        average(dense.grad)
        norms.append(float(optimizer.clip_grad_norm_([dense], 0.01)))
        optimizer.step()
        optimizer.zero_grad()
        dense.grad = None
        schedule.step()
    with torch.no_grad():
        return norms, rows_of(module)


def train_rank(kind: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    def average(gradient: Tensor) -> None:
        torch.distributed.all_reduce(gradient, torch.distributed.ReduceOp.SUM)
        gradient /= RANKS

    with open_sharded(None, cold="memory", ddr="1MiB") as store:
        for name in "ab":
            store.create_table(config(name), **kind)
        return train(ShardedTieredEmbeddingBagCollection(store), store.optimizer(), [store.ranks.rank], 1, average)


def rows_of(module: Any) -> dict[str, Tensor]:
    ids = torch.arange(ROWS).repeat(2)
    jagged = tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(2 * ROWS, dtype=torch.int64))
    found = module(jagged)
    return {name: found[name] for name in "ab"}


def expected() -> tuple[list[float], dict[str, Tensor]]:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        for name in "ab":
            store.create_table(config(name))
        module = tierstore.TieredEmbeddingBagCollection(store)
        return train(module, store.optimizer(), range(RANKS), RANKS, lambda _: None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["sharding_type"])
def test_gradients_are_added_up_and_clipped_as_in_one_process(kind: dict[str, Any], tmp_path: Path) -> None:
    norms, rows = expected()
    assert min(norms) > 0.01, "there is something to clip"
    for found_norms, found_rows in run(train_rank, RANKS, tmp_path, kind):
        torch.testing.assert_close(found_norms, norms)
        torch.testing.assert_close(found_rows, rows)


def accumulate(store: Any, module: Any, ranks: Sequence[int], *, clips: bool) -> dict[str, Tensor]:
    """Rows after steps of three passes each, by many samples of few rows."""
    optimizer = store.optimizer()
    for step in range(STEPS):
        for part, rank in itertools.product(range(3), ranks):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            ids = torch.randint(0, 20, (2 * SAMPLES,), generator=generator)
            jagged = tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(2 * SAMPLES, dtype=torch.int64))
            out = module(jagged).values()
            (out * torch.randn(out.shape, generator=generator) / (RANKS if len(ranks) > 1 else 1)).sum().backward()
        if clips:
            optimizer.clip_grad_norm_(max_norm=1e9)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return rows_of(module)


def accumulate_rank(kind: dict[str, Any], *flags: bool) -> list[dict[str, Tensor]]:
    found = []
    for clips in flags:
        with open_sharded(None, cold="memory", ddr="1MiB") as store:
            for name in "ab":
                store.create_table(config(name), **kind)
            found.append(accumulate(store, ShardedTieredEmbeddingBagCollection(store), [store.ranks.rank], clips=clips))
    return found


@pytest.mark.parametrize(
    "kind", [each for each in KINDS if "exchange" not in each], ids=lambda kind: kind["sharding_type"]
)
def test_passes_before_a_step_give_the_bits_of_one_process(kind: dict[str, Any], tmp_path: Path) -> None:
    """As docs/distributed.md says: of one process that runs the ranks' batches one after another."""
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        for name in "ab":
            store.create_table(config(name))
        rows = accumulate(store, tierstore.TieredEmbeddingBagCollection(store), range(RANKS), clips=False)
    for each in run(accumulate_rank, RANKS, tmp_path, kind, False, True):
        for found in each:
            assert all(torch.equal(found[name], rows[name]) for name in "ab")
