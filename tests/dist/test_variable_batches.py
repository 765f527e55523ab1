"""Features with different numbers of samples over ranks."""

from pathlib import Path

import torch
from torch import Tensor

from tests.nn.test_variable_batches import NAMES, even, make, uneven
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded

from .ranks import run


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
    assert len(NAMES) == 3
    for exchange in ("rows", "pooled"):
        for own in run(results, 2, tmp_path, exchange):
            for found, expected in own:
                assert torch.equal(found, expected)
