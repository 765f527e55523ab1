"""Training on a device, small enough to run many times."""

from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, DIM, BAGS = 600, 8, 32
DDR = "2MiB"
WHOLE, TINY = "1MiB", "30KiB"
"""Of device memory: for every row, and for about as many as a batch needs."""
FEATURES = ["a", "b", "c", "d"]


class Ended(NamedTuple):
    """What training ended in, on the CPU: int32, the bits of every row, and of what each step's forward gave."""

    rows: Tensor
    outs: list[Tensor]
    stats: Any


def make_batches(steps: int, *, device: str = "cpu", scaled: bool = True, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        lengths = torch.randint(0, 5, (len(FEATURES) * BAGS,), generator=generator)
        count = int(lengths.sum())
        ids = (torch.rand(count, generator=generator) ** 2 * ROWS).long()
        scale = torch.rand(count, generator=generator).to(device) if scaled else None
        made.append(tierstore.KeyedJaggedTensor(FEATURES, ids.to(device), weights=scale, lengths=lengths.to(device)))
    return made


def make_tables(store: tierstore.Store, **config: Any) -> None:
    for seed, names in enumerate((("a", "b"), ("c", "d"))):
        init = tierstore.init.Uniform(-1, 1, seed=seed)
        given: dict[str, Any] = {"optimizer": optim.RowWiseAdagrad(lr=0.1), "init": init} | config
        store.create_table(
            tierstore.TableConfig(
                name=f"table {seed}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=names, **given
            )
        )


def train_on(store: tierstore.Store, batches: list[Any], *, depth: int) -> list[Tensor]:
    """Every step's forward, bits on the CPU. The gradients of the results are the same numbers on every device."""
    collection = tierstore.TieredEmbeddingBagCollection(store)
    gradient = torch.linspace(-1, 1, BAGS * len(FEATURES) * DIM).view(BAGS, -1).to(store.device)
    outs = []
    for features in tierstore.prefetch(batches, collection, depth=depth):
        out = collection(features).values()
        outs.append(out.detach().clone())
        out.backward(gradient)
    return [bits(out) for out in outs]


def bits(values: Tensor) -> Tensor:
    return values.detach().cpu().contiguous().view(torch.int32)


def read_all(store: tierstore.Store) -> Tensor:
    return torch.cat([bits(table.read(torch.arange(ROWS))) for table in store.tables.values()])


def train(
    directory: Path, batches: list[Any], *, depth: int = 0, config: Any = MappingProxyType({}), **settings: Any
) -> Ended:
    with tierstore.open(directory, **({"ddr": DDR} | settings)) as store:
        make_tables(store, **config)
        outs = train_on(store, batches, depth=depth)
        for pool in {table.pool for table in store.tables.values()}:
            pool.tier.check_integrity()
            assert not pool.in_use
        rows, stats = read_all(store), store.stats()
        store.commit()
    with tierstore.open(directory, mode="r", ddr=DDR) as store:
        assert torch.equal(read_all(store), rows)
    return Ended(rows, outs, stats)


def assert_same(ended: Ended, expected: Ended, told: object = None) -> None:
    for step, (out, wanted) in enumerate(zip(ended.outs, expected.outs, strict=True)):
        assert torch.equal(out, wanted), f"{told}: forward of step {step}"
    assert torch.equal(ended.rows, expected.rows), told
