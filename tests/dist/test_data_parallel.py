"""Tables inside DistributedDataParallel: refused where ranks would diverge."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tierstore

from .ranks import run


class Model(nn.Module):
    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.tables = tierstore.TieredEmbeddingBagCollection(store)
        self.dense = nn.Linear(4, 1)

    def forward(self, features: tierstore.KeyedJaggedTensor, factor: Any = 1.0) -> Tensor:
        out: Tensor = self.dense(self.tables(features).values() * factor)
        return out


class TrainsTables(nn.Linear):
    """A module without tables, whose forward trains some."""

    tables: Any
    features: Any
    num_trained = 0

    def forward(self, x: Tensor) -> Tensor:
        self.tables(self.features).values().sum().backward()
        self.num_trained += 1
        return super().forward(x)


def train(folder: Path) -> list[str]:
    """What becomes of three ways to train the tables of a replicated module."""
    warnings.simplefilter("ignore")  # torch's own, of gradients that are not there
    rank, told = dist.get_rank(), []
    features = tierstore.KeyedJaggedTensor(["t"], torch.tensor([rank]), offsets=torch.tensor([0, 1]))

    def attempt(forward: Any) -> None:
        try:
            forward().sum().backward()
            told.append("trained")
        except RuntimeError as error:
            told.append(str(error))

    with tierstore.open(folder / str(rank), ddr="2MiB") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4))
        store.commit()
        model = DistributedDataParallel(Model(store))
        attempt(lambda: model(features))
        for reentrant in (False, True):
            ones = torch.ones(1, requires_grad=True)
            attempt(lambda: checkpoint(model, features, ones, use_reentrant=reentrant))  # noqa: B023 - called at once
        with torch.no_grad():
            model(features)
        outside = TrainsTables(4, 1)
        outside.__dict__ |= {"tables": tierstore.TieredEmbeddingBagCollection(store), "features": features}
        DistributedDataParallel(outside)(torch.ones(1, 4)).sum().backward()
        assert outside.num_trained == 1
        store["t"].pooled(features.values(), features.offsets())
    with tierstore.open(folder / str(rank), mode="r", ddr="2MiB") as store:
        DistributedDataParallel(Model(store))(features).sum().backward()
    return told


def test_a_replicated_module_does_not_train_rows(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
    assert run(train, 1, tmp_path, tmp_path / "one") == [["trained"] * 3]
    for first, *checkpoints in run(train, 2, tmp_path, tmp_path / "two"):
        assert "cannot be trained inside DistributedDataParallel by 2 processes" in first
        assert 'mode="r"' in first
        assert [each[: len("rows of the store")] for each in checkpoints] == ["rows of the store"] * 2
