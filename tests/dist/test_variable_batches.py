"""Features with different numbers of samples over ranks."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.nn.test_variable_batches import even, make, uneven
from tierstore.dist import ShardedTieredEmbeddingBagCollection, TowerTieredEmbeddingBagCollection, open_sharded

from .ranks import run

TOWERS = [["user"], ["item", "shop"]]


def results(exchange: str) -> list[tuple[Tensor, Tensor]]:
    """Of batches with different numbers of samples, and of those where every sample has its own lists."""
    with open_sharded(None, cold="memory", ddr="1MiB", threads=1) as store:
        make(store, lambda _: None, exchange=exchange)
        module = ShardedTieredEmbeddingBagCollection(store)
        return [
            (module(uneven(seed)).values().detach(), module(even(seed)).values().detach())
            for seed in (store.ranks.rank, 5 + store.ranks.rank)
        ]


def test_results_are_those_of_samples_with_lists_of_their_own(tmp_path: Path) -> None:
    for exchange in ("rows", "pooled"):
        for own in run(results, 2, tmp_path, exchange):
            for found, expected in own:
                assert torch.equal(found, expected)


def refused_by_towers() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with open_sharded(None, cold="memory", ddr="1MiB", threads=1, towers=TOWERS) as store:
        make(store, lambda _: None)
        module = TowerTieredEmbeddingBagCollection(store)
        with pytest.raises(ValueError, match="features of the same samples"):
            module(uneven())
        assert module(even()).values().shape == (6, 12)


def test_towers_refuse_them(tmp_path: Path) -> None:
    run(refused_by_towers, 2, tmp_path)
