"""Ranks that die or hang: the others' error names them, within the group's timeout, and every store opens again."""

import os
import time
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded

from .ranks import DIED, run

TABLE = tierstore.TableConfig(name="t", num_embeddings=100, embedding_dim=8)
TIMEOUT_S, RANKS, LOST = 2, 3, 1
IDS = tierstore.KeyedJaggedTensor(["t"], torch.arange(100), lengths=torch.ones(100, dtype=torch.int64))


def lose_one(folder: Path, *, hangs: bool) -> tuple[str, float]:
    """(the error, seconds until it came)."""
    store = open_sharded(folder, ddr="500KiB", threads=1)
    store.create_table(TABLE)
    module = ShardedTieredEmbeddingBagCollection(store)
    module(IDS).values().sum().backward()
    store.commit()
    begun = time.monotonic()
    if store.ranks.rank == LOST:
        if not hangs:
            os._exit(DIED)
        time.sleep(3 * TIMEOUT_S)
    with pytest.raises(RuntimeError) as caught:
        module(IDS)
    store.close()
    return str(caught.value), time.monotonic() - begun


def lose_hanging(folder: Path) -> tuple[str, float]:
    return lose_one(folder, hangs=True)


def lose_dying(folder: Path) -> tuple[str, float]:
    return lose_one(folder, hangs=False)


def reopen(folder: Path) -> int:
    with open_sharded(folder, ddr="500KiB", threads=1) as store:
        ShardedTieredEmbeddingBagCollection(store)(IDS)
        return store.version


@pytest.mark.parametrize(
    ("lose", "status", "limit_s"), [(lose_dying, DIED, 3 * TIMEOUT_S), (lose_hanging, 0, 3 * TIMEOUT_S)]
)
def test_a_lost_rank_is_named(lose: object, status: int, limit_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    statuses = [status if rank == LOST else 0 for rank in range(RANKS)]
    found = run(lose, RANKS, tmp_path, folder, statuses=statuses, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    for told, seconds in (found[rank] for rank in range(RANKS) if rank != LOST):
        assert told.startswith(f"rank {LOST} ended, or did not answer")
        assert seconds < limit_s
    assert run(reopen, RANKS, tmp_path, folder) == [1] * RANKS
