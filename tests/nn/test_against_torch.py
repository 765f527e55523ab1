"""Modules and fused optimizers against torch's own, on tables kept whole in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.oracle import jagged
from tierstore import optim

ROWS, DIM = 60, 5


def make_table(
    store: tierstore.Store, optimizer: optim.Optimizer, dim: int = DIM, pooling: Any = "sum"
) -> tierstore.Table:
    return store.create_table(
        tierstore.TableConfig(
            name="items",
            num_embeddings=ROWS,
            embedding_dim=dim,
            pooling=pooling,
            init=tierstore.init.Uniform(-1.0, 1.0, seed=3),
            optimizer=optimizer,
        )
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_half_tables_pool_in_float32(store_dir: Path, dtype: Any, mode: Any) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        config = tierstore.TableConfig(
            name="half", num_embeddings=ROWS, embedding_dim=DIM, dtype=dtype, init=tierstore.init.Normal(std=2.0)
        )
        table = store.create_table(config)
        rows = table.read(torch.arange(ROWS))
        assert rows.dtype == getattr(torch, dtype)
        ids, offsets = jagged(torch.Generator().manual_seed(0), bags=9, rows=ROWS, longest=6)
        expected = torch.nn.functional.embedding_bag(ids, rows.float(), offsets, mode=mode, include_last_offset=True)
        pooled = table.pooled(ids, offsets, mode=mode)
        assert pooled.dtype == torch.float32
        torch.testing.assert_close(pooled, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_tables_round_the_float32_update(store_dir: Path, dtype: Any) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        config = tierstore.TableConfig(
            name="half", num_embeddings=ROWS, embedding_dim=DIM, dtype=dtype,
            init=tierstore.init.Uniform(-1, 1), optimizer=optim.SGD(lr=0.3),
        )  # fmt: skip
        table = store.create_table(config)
        before = table.read(torch.arange(ROWS))
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        factor = torch.randn(ROWS, DIM)
        (bag(torch.arange(ROWS), torch.arange(ROWS)) * factor).sum().backward()
        expected = (before.float() - torch.tensor(0.3) * factor).to(before.dtype)
        assert torch.equal(table.read(torch.arange(ROWS)), expected)


def test_a_bag_is_called_as_nn_embedding_bag(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        table = make_table(store, optim.SGD(lr=0.1), pooling="mean")
        twin = torch.nn.EmbeddingBag.from_pretrained(table.read(torch.arange(ROWS)))
        bag = tierstore.TieredEmbeddingBag(table)
        flat = torch.tensor([4, 4, 9, 0, 59])
        torch.testing.assert_close(bag(flat, torch.tensor([0, 2, 2])), twin(flat, torch.tensor([0, 2, 2])))
        torch.testing.assert_close(bag(flat, torch.tensor([0])), twin(flat, torch.tensor([0])))
        square = torch.tensor([[1, 2, 3], [3, 3, 0]])
        torch.testing.assert_close(bag(square), twin(square))
        assert bag(square.to(torch.int32)).requires_grad
        with torch.no_grad():
            assert not bag(square).requires_grad


def test_a_batch_without_samples_and_a_batch_without_ids(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        table = make_table(store, optim.Adam())
        collection = tierstore.TieredEmbeddingBagCollection(store)
        before = table.read(torch.arange(ROWS))
        for bags in (0, 3):
            empty = tierstore.KeyedJaggedTensor(
                ["items"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(bags, dtype=torch.int64)
            )
            out = collection(empty)["items"]
            assert out.shape == (bags, DIM)
            assert not out.any()
            out.sum().backward()
        assert torch.equal(table.read(torch.arange(ROWS)), before)
