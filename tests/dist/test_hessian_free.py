"""Hessian-free steps over ranks: the same bits on all, and what one process makes of the whole batch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.optim.test_hessian_free import Job, bag_of, batches, table
from tests.train.runs import config_of
from tierstore.dist import ShardedTieredEmbeddingBag, average, open_sharded
from tierstore.train import RunConfig, train, trainer

from .ranks import run

PARTS = [slice(0, 5), slice(5, 16)]


def train_rank(curvature: str) -> list[Tensor]:
    with open_sharded(None, cold="memory", ddr="1MiB") as store:
        store.create_table(table())
        mean, part = partial(average, ranks=store.ranks), PARTS[store.ranks.rank]
        job = Job(ShardedTieredEmbeddingBag(store, "t"), curvature=curvature, average=mean)
        job.train([ids[part] for ids in batches(4)], part=16, share=(part.stop - part.start) * 2 / 16)
        return job.weights()


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_ranks_have_the_same_bits_and_take_the_steps_of_one_process(curvature: str, tmp_path: Path) -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store), curvature=curvature)
        job.train(batches(4), part=16)
        first, second = run(train_rank, 2, tmp_path, curvature)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        torch.testing.assert_close(first, job.weights(), rtol=1e-3, atol=1e-4)


def train_run(made: RunConfig) -> tuple[str | None, float | None]:
    trainer.warm_up = lambda _: None
    found = train(made, bits=True)
    return found.bits, found.loss


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_run_over_ranks_repeats_its_bits_with_parts_that_are_empty(curvature: str, tmp_path: Path) -> None:
    """300 rows in batches of 23: of the last one a part is empty."""
    keys: dict[str, Any] = {"optimizer__dense": "hessian-free", "optimizer__curvature": curvature, "train__epochs": 1}
    keys |= {"train__batch_size": 23, "optimizer__curvature_products": 6}
    runs = [run(train_run, 2, tmp_path, config_of(tmp_path, name, **keys)) for name in ("first", "again")]
    assert runs[0] == runs[1]
    assert runs[0][0][1] == runs[0][1][1] < 0.69
