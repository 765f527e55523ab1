"""A model whose tables are sharded and whose other layers are replicated, against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.models import DLRM

from .ranks import run

ROWS, DIM, RANKS, SAMPLES = 200, 8, 2, 16
TABLES = [
    tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.SGD(lr=0.5))
    for name in "ab"
]


def batch(rank: int, step: int) -> tuple[Tensor, tierstore.KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, ROWS, (2 * SAMPLES * 3,), generator=generator)
    jagged = tierstore.KeyedJaggedTensor(["a", "b"], ids, offsets=torch.arange(0, len(ids) + 1, 3))
    return torch.rand(SAMPLES, 13, generator=generator), jagged, torch.rand(SAMPLES, generator=generator).round()


def model_over(embeddings: nn.Module) -> DLRM:
    torch.manual_seed(1)
    return DLRM(embeddings, num_features=2, embedding_dim=DIM, bottom_mlp=(16,), top_mlp=(16,))


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    dense, jagged, labels = batch(rank, step)
    loss: Tensor = nn.functional.binary_cross_entropy_with_logits(model(dense, jagged), labels)
    return loss


def train_rank() -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights of the other layers)."""
    losses = []
    with open_sharded(None, cold="memory", ddr="1MiB") as store:
        for table in TABLES:
            store.create_table(table, sharding_type="table_wise")
        model = model_over(ShardedTieredEmbeddingBagCollection(store))
        replica = data_parallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for step in range(6):
            loss = loss_of(replica, store.ranks.rank, step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with pytest.raises(RuntimeError, match="lookahead= does not serve"):
            next(iter(tierstore.prefetch([batch(0, 0)[1]], model.embeddings, lookahead=1)))
        return losses, {name: each.detach().clone() for name, each in model.dense_parameters().items()}


def test_a_model_trains_as_in_one_process(tmp_path: Path) -> None:
    found = run(train_rank, RANKS, tmp_path)
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        for table in TABLES:
            store.create_table(table)
        model = model_over(tierstore.TieredEmbeddingBagCollection(store))
        row_optimizer, optimizer = store.optimizer(), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            for rank in range(RANKS):
                loss = loss_of(model, rank, step)
                (loss / RANKS).backward()  # type: ignore[no-untyped-call]
                losses[rank].append(loss.item())
            for each in (row_optimizer, optimizer):
                each.step()
                each.zero_grad()
        for rank in range(RANKS):
            torch.testing.assert_close(found[rank][0], losses[rank])
            torch.testing.assert_close(found[rank][1], {k: v.detach() for k, v in model.dense_parameters().items()})
