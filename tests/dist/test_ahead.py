"""Prefetch over ranks: the same bits at any depth, and ends that leave nobody waiting."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, open_sharded

from .ranks import run

ROWS, DIM, STEPS, SAMPLES = 2_000, 16, 6, 64
RULE = optim.RowWiseAdagrad(lr=0.3)
Batch = tuple[tierstore.KeyedJaggedTensor, Tensor]


def batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            tierstore.KeyedJaggedTensor(
                ["a", "b", "c"],
                torch.randint(0, ROWS, (3 * SAMPLES,), generator=generator),
                lengths=torch.ones(3 * SAMPLES, dtype=torch.int64),
            ),
            torch.randn(SAMPLES, 3 * DIM, generator=generator),
        )
        for _ in range(STEPS)
    ]


def opened(group: Any = None) -> tuple[ShardedStore, ShardedTieredEmbeddingBagCollection]:
    store = open_sharded(None, cold="memory", ddr="500KiB", group=group)
    for name, kind, exchange in (
        ("a", "row_wise", "rows"),
        ("b", "table_wise", "pooled"),
        ("c", "data_parallel", "rows"),
    ):
        config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=RULE)
        store.create_table(config, sharding_type=kind, exchange=exchange)
    return store, ShardedTieredEmbeddingBagCollection(store)


def prefetched(module: Any, given: list[Batch], depth: int) -> Any:
    return tierstore.prefetch(given, module, depth=depth, features=lambda batch: batch[0])


def train(module: Any, batch: Batch) -> Tensor:
    out: Tensor = module(batch[0]).values()
    out.backward(batch[1])  # type: ignore[no-untyped-call]
    return out.detach()


def at_depths() -> list[list[Tensor]]:
    """Results of each depth; an evaluation in the middle looks the same batches up, prefetched too."""
    found = []
    for depth in (0, 1, 3):
        store, module = opened()
        with store:
            results = []
            for step, batch in enumerate(prefetched(module, batches(store.ranks.rank), depth)):
                results.append(train(module, batch))
                if step == 2:
                    with torch.no_grad():
                        others = prefetched(module, batches(7 + store.ranks.rank), depth)
                        results += [module(other[0]).values() for other in others]
            found.append(results)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_depth_gives_the_same_bits(ranks: int, tmp_path: Path) -> None:
    for plain, *ahead in run(at_depths, ranks, tmp_path):
        for results in ahead:
            assert len(results) == 2 * STEPS
            assert all(torch.equal(one, other) for one, other in zip(results, plain, strict=True))


def ended_early() -> list[str]:
    """What goes wrong, in order; after each the store serves."""
    store, module = opened()
    rank, errors = store.ranks.rank, []
    with store:
        for batch in itertools.islice(prefetched(module, batches(rank), 2), 2):
            train(module, batch)
        wrong = batches(rank)
        if rank == 1:
            wrong[3][0].values()[0] = ROWS
        for given in (batches(rank)[: 4 + rank], wrong):
            count = 0
            try:
                for batch in prefetched(module, given, 2):
                    train(module, batch)
                    count += 1
            except (RuntimeError, ValueError) as error:
                errors.append(f"{count}: {error}")
            train(module, batches(rank)[0])
    return errors


def test_ranks_that_end_or_fail_are_named(tmp_path: Path) -> None:
    zero, one = run(ended_early, 2, tmp_path)
    assert zero == ["3: rank 1 cannot take part in this step; its own error says why"]
    assert len(one) == 2
    assert one[0].startswith("4: ranks make different calls (rank 0: no more batches; rank 1: lookup of a).")
    assert one[1].startswith(f"3: id {ROWS} is not a row of table 'a'")
