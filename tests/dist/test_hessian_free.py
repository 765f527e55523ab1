"""Hessian-free steps over ranks: the same bits on all, and what one process makes of the whole batch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.train.runs import config_of
from tierstore.dist import ShardedTieredEmbeddingBagCollection, average, open_sharded
from tierstore.optim import SGD, HessianFree
from tierstore.train import RunConfig, train, trainer

from .ranks import run

ROWS, DIM, STEPS, RANKS = 100, 8, 4, 2
PARTS = [slice(0, 5), slice(5, 12)]
"""Of a batch: each rank's loss is its share of the mean."""
TABLE = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=SGD(lr=0.3))


def jagged(ids: Tensor) -> Any:
    lengths = torch.full((len(ids),), ids.shape[1])
    return tierstore.KeyedJaggedTensor(["t"], ids.reshape(-1), lengths=lengths)


def train_steps(module: Any, part: slice, share: float, **options: Any) -> list[Tensor]:
    """Rows and dense weights after steps over a part of each batch."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = HessianFree([*module.parameters(), *dense.parameters()], products=8, **options)
    for step in range(STEPS):
        ids = torch.randint(0, ROWS, (12, 3), generator=torch.Generator().manual_seed(step))[part]

        def evaluate(ids: Tensor = ids, features: Any = jagged(ids)) -> tuple[Tensor, Tensor]:  # noqa: B008
            outputs = dense(module(features).values())
            return (outputs[:, 0] - ids.float().mean(1) / ROWS).square().mean() * share, outputs

        optimizer.step(evaluate)
    with torch.no_grad():
        return [module(jagged(torch.arange(ROWS)[:, None])).values(), *(each.detach() for each in dense.parameters())]


def train_rank(curvature: str) -> list[Tensor]:
    with open_sharded(None, cold="memory", ddr="1MiB") as store:
        store.create_table(TABLE)
        module, part = ShardedTieredEmbeddingBagCollection(store), PARTS[store.ranks.rank]
        share, mean = (part.stop - part.start) * RANKS / 12, partial(average, ranks=store.ranks)
        return train_steps(module, part, share, curvature=curvature, average=mean)


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_ranks_have_the_same_bits_and_take_the_steps_of_one_process(curvature: str, tmp_path: Path) -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        store.create_table(TABLE)
        expected = train_steps(tierstore.TieredEmbeddingBagCollection(store), slice(12), 1.0, curvature=curvature)
    first, second = run(train_rank, RANKS, tmp_path, curvature)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-4)


def train_run(made: RunConfig) -> tuple[str | None, float | None]:
    trainer.warm_up = lambda _: None
    found = train(made, bits=True)
    return found.bits, found.loss


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_run_over_ranks_repeats_its_bits_with_parts_that_are_empty(curvature: str, tmp_path: Path) -> None:
    """300 rows in batches of 23: of the last one a part is empty."""
    keys: dict[str, Any] = {"optimizer__dense": "hessian-free", "optimizer__curvature": curvature, "train__epochs": 1}
    keys |= {"train__batch_size": 23, "optimizer__curvature_products": 6}
    runs = [run(train_run, RANKS, tmp_path, config_of(tmp_path, name, **keys)) for name in ("first", "again")]
    assert runs[0] == runs[1]
    assert runs[0][0][1] == runs[0][1][1] < 0.69
