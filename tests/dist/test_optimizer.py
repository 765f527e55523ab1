"""Gradients of rows collected over ranks, added up and clipped, and Hessian-free steps, against one process."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.optim.test_dense import Job, bag_of, batches, table
from tierstore import optim
from tierstore.dist import (
    ShardedStore,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    average,
    open_sharded,
)

from .ranks import run

ROWS, DIM, STEPS, SAMPLES, RANKS = 100, 8, 3, 8, 2
KINDS: list[dict[str, Any]] = [
    {"sharding_type": "row_wise"},
    {"sharding_type": "column_wise"},
    {"sharding_type": "data_parallel"},
    {"sharding_type": "table_wise", "exchange": "pooled"},
]
Trained = tuple[list[float], dict[str, Tensor]]


def with_tables(store: Any, **kind: Any) -> Any:
    rule = optim.Adagrad(lr=0.3)
    for name in "ab":
        config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule)
        store.create_table(config, **kind)
    is_sharded = isinstance(store, ShardedStore)
    return (ShardedTieredEmbeddingBagCollection if is_sharded else tierstore.TieredEmbeddingBagCollection)(store)


def jagged_of(ids: Tensor) -> tierstore.KeyedJaggedTensor:
    return tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def rows_of(module: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        found = module(jagged_of(torch.arange(ROWS).repeat(2)))
        return {name: found[name] for name in "ab"}


def train(
    module: Any, optimizer: Any, ranks: Sequence[int], divisor: int, average: Callable[[Tensor], None]
) -> Trained:
    """(norms, rows of each table as a lookup gives them) after steps over these ranks' batches, clipped."""
    dense, norms = torch.ones(2 * DIM, requires_grad=True), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        for part, rank in itertools.product(range(2), ranks):
            generator = torch.Generator().manual_seed(20 * step + 10 * part + rank)
            jagged = jagged_of(torch.randint(0, ROWS, (2 * SAMPLES,), generator=generator))
            target = torch.rand(SAMPLES, 2 * DIM, generator=generator)
            (((module(jagged).values() * dense - target) ** 2).mean() / 2 / divisor).backward()
        assert dense.grad is not None
        average(dense.grad)
        norms.append(float(optimizer.clip_grad_norm_([dense], 0.01)))
        optimizer.step()
        optimizer.zero_grad()
        dense.grad = None
        schedule.step()
    return norms, rows_of(module)


def accumulate(module: Any, optimizer: Any, ranks: Sequence[int], divisor: int, *, clips: bool) -> dict[str, Tensor]:
    """Rows after steps of three passes each, by many samples of few rows."""
    for step in range(STEPS):
        for part, rank in itertools.product(range(3), ranks):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            out = module(jagged_of(torch.randint(0, 20, (2 * SAMPLES,), generator=generator))).values()
            (out * torch.randn(out.shape, generator=generator) / divisor).sum().backward()
        if clips:
            optimizer.clip_grad_norm_(max_norm=1e9)
        optimizer.step()
        optimizer.zero_grad()
    return rows_of(module)


def train_ranks() -> list[tuple[Trained, list[dict[str, Tensor]]]]:
    """Of each kind, clipped; and with several passes a step, where gradients are read between these or not."""

    def average(gradient: Tensor) -> None:
        torch.distributed.all_reduce(gradient, torch.distributed.ReduceOp.SUM)
        gradient /= RANKS

    found = []
    for kind in KINDS:
        with open_sharded(None, cold="memory", ddr="1MiB") as store:
            module = with_tables(store, **kind)
            trained = train(module, store.optimizer(), [store.ranks.rank], 1, average)
        sums = []
        for clips in (False, True) if "exchange" not in kind else ():
            with open_sharded(None, cold="memory", ddr="1MiB") as store:
                module = with_tables(store, **kind)
                sums.append(accumulate(module, store.optimizer(), [store.ranks.rank], 1, clips=clips))
        found.append((trained, sums))
    return found


def test_gradients_are_added_up_and_clipped_as_in_one_process(tmp_path: Path) -> None:
    """As docs/distributed.md says, passes before a step give the bits of one process that runs them in turn."""
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        trained = train(with_tables(store), store.optimizer(), range(RANKS), RANKS, lambda _: None)
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        rows = accumulate(with_tables(store), store.optimizer(), range(RANKS), RANKS, clips=False)
    assert min(trained[0]) > 0.01, "there is something to clip"
    for found in run(train_ranks, RANKS, tmp_path):
        for kind, (clipped, sums) in zip(KINDS, found, strict=True):
            torch.testing.assert_close(clipped, trained)
            for each in sums:
                assert all(torch.equal(each[name], rows[name]) for name in "ab"), kind


# Hessian-free steps

PARTS = [slice(0, 5), slice(5, 16)]


def take_free_steps(curvature: str) -> list[Tensor]:
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
        first, second = run(take_free_steps, 2, tmp_path, curvature)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        torch.testing.assert_close(first, job.weights(), rtol=1e-3, atol=1e-4)
