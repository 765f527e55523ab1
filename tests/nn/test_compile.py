"""Models with tables under ``torch.compile``: the same bits of rows, a graph before each module and one behind."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tierstore

ROWS, DIM = 300, 20


class Model(nn.Module):
    """Rows' gradients are ``x`` to the bit, however a compiler orders the rest."""

    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.row, self.bag = tierstore.TieredEmbedding(store["t"]), tierstore.TieredEmbeddingBag(store["t"])
        self.features = tierstore.TieredEmbeddingBagCollection(store)

    def forward(self, ids: Tensor, jagged: tierstore.KeyedJaggedTensor, x: Tensor) -> Tensor:
        scaled = x * 2
        rows, bags = self.row(ids) * scaled[:, None], self.bag(ids) * scaled
        loss: Tensor = rows.sum() + bags.sum() + (self.features(jagged).values() * scaled).sum()
        return loss


def trained(compiled: Any) -> Tensor:
    random = torch.Generator().manual_seed(1)
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        rule = tierstore.optim.RowWiseAdagrad(lr=0.1)
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule))
        model = compiled(Model(store))
        for _ in range(30):
            ids, x = torch.randint(0, ROWS, (8, 4), generator=random), torch.randn(8, DIM, generator=random)
            jagged = tierstore.KeyedJaggedTensor(["t"], ids.flatten(), offsets=torch.arange(0, 33, 4))
            model(ids, jagged, x).backward()
        return store["t"].read(torch.arange(ROWS))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_training_gives_the_same_bits_without_a_warning(backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")  # torch hides some of its own where they are shown, not where they are raised
        rows = trained(lambda model: torch.compile(model, backend=counter))
    assert torch.equal(rows, trained(lambda model: model))
    assert counter.frame_count == 4, "graphs: one before, between and behind three modules"
    torchs_own = re.compile("torch.jit|Python 3.13.0|Skipping serialization of")
    assert [str(each.message) for each in warned if not torchs_own.search(str(each.message))] == []
