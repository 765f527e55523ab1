"""Ranks with different numbers of batches: those that end first go on with empty ones; what fails ends all loops."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, data_parallel, even, open_sharded
from tierstore.dist.modules import empty_of
from tierstore.errors import RankError

from .ranks import run

ROWS, COUNTS = 9, [3, 0, 5]
TABLE, FROZEN = (tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=4) for name in ("t", "frozen"))


class Batch(NamedTuple):
    dense: Tensor
    sparse: tierstore.KeyedJaggedTensor
    name: str = "clicks"


def batch_of(step: int, row: int = 0) -> Batch:
    lengths = torch.ones(4, dtype=torch.int64)
    ids = torch.tensor([row, 1, 2, 3])
    return Batch(torch.full((2, 4), float(step)), tierstore.KeyedJaggedTensor(["t", "frozen"], ids, lengths=lengths))


def opened() -> ShardedStore:
    store = open_sharded(cold="memory", ddr="1MiB", threads=1)
    store.create_table(TABLE)
    return store


class Model(torch.nn.Module):
    def __init__(self, plain: tierstore.Store, store: ShardedStore) -> None:
        super().__init__()
        self.frozen = tierstore.TieredEmbeddingBagCollection(plain).requires_grad_(False)
        self.bags, self.layer = ShardedTieredEmbeddingBagCollection(store), torch.nn.Linear(4, 1)
        torch.nn.init.ones_(self.layer.weight)

    def forward(self, batch: Batch) -> Tensor:
        pooled = self.bags(batch.sparse).values() + self.frozen(batch.sparse).values()
        found: Tensor = self.layer(batch.dense * pooled).sum()
        return found


def train(depth: int) -> tuple[list[int], Tensor, Tensor]:
    with tierstore.open(cold="memory", ddr="1MiB") as plain, opened() as store:
        plain.create_table(FROZEN)
        model, sizes = data_parallel(Model(plain, store)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        own = [batch_of(step) for step in range(COUNTS[store.ranks.rank])]
        for batch in tierstore.prefetch(even(own, store), model, depth=depth):
            assert batch.name == "clicks"
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            sizes.append(len(batch.dense))
            with torch.no_grad():
                for other in tierstore.prefetch([batch_of(1), batch_of(2)], model, depth=depth):
                    model.module(other)
        with torch.no_grad():
            rows = model.module.bags(batch_of(0).sparse).values()
        return sizes, model.module.layer.weight.detach(), rows


def test_ranks_with_fewer_batches_go_on_with_empty_ones(tmp_path: Path) -> None:
    found = {depth: run(train, len(COUNTS), tmp_path, depth) for depth in (0, 2)}
    for rank, (sizes, weights, rows) in enumerate(found[0]):
        assert sizes == [2] * COUNTS[rank] + [0] * (max(COUNTS) - COUNTS[rank])
        assert (weights != 1).all()
        for other in (found[0][0], found[2][rank]):
            assert torch.equal(weights, other[1])
            assert torch.equal(rows, other[2])


class Broken(Exception):
    pass


def failing(rank: int) -> Iterator[Batch]:
    yield batch_of(0)
    if rank == 1:
        raise Broken
    yield batch_of(1)


def train_until_it_fails(module: Any, batches: Any, depth: int) -> str:
    """The batches before the error, if there is one, and that."""
    given = 0
    try:
        for batch in tierstore.prefetch(batches, module, depth=depth) if depth else batches:
            module(batch.sparse).values().sum().backward()
            given += 1
    except (Broken, RankError, ValueError) as error:
        return f"{given}: {type(error).__name__} {error}"
    return f"{given}"


def go_wrong() -> list[str]:
    """What each rank meets: with ``even`` a source that fails in rank 1, at two depths; without, batches that end first
    in rank 0, and a wrong one in rank 1; a loop that rank 0 leaves. All but the last leave a store that serves."""
    with opened() as store:
        module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
        found = [train_until_it_fails(module, even(failing(rank), store), depth) for depth in (0, 2)]
        given = [batch_of(step) for step in range(5)]
        found.append(train_until_it_fails(module, given[: 4 + rank], 2))
        found.append(train_until_it_fails(module, [*given[:4], batch_of(4, ROWS if rank else 0)], 2))
        module(given[0].sparse).values().sum().backward()
        steps = iter(even(itertools.repeat(given[0]), store))
        next(steps)
        with pytest.raises(RankError) as raised:
            next(steps) if rank else store.balance()
        return [*found, str(raised.value)]


def test_what_goes_wrong_in_one_rank_ends_the_loop_on_all(tmp_path: Path) -> None:
    zero, one = run(go_wrong, 2, tmp_path)
    assert all(told.startswith("1: RankError") for told in zero[:2])
    assert "rank 1 cannot take part" in zero[0]
    assert one[:2] == ["1: Broken "] * 2
    assert zero[2:4] == ["4", "4: RankError rank 1 cannot take part in this step; its own error says why"]
    assert one[2].startswith("4: RankError ranks make different calls (rank 0: no more batches; rank 1: ")
    assert f"id {ROWS} is not a row of table" in one[3]
    assert all("rank 0: balance; rank 1: next batch" in told for told in (zero[4], one[4]))


@dataclasses.dataclass
class Fields:
    ids: Tensor
    more: dict[str, Any]


@dataclasses.dataclass
class Counted:
    ids: Tensor
    count: int = dataclasses.field(init=False, default=3)


def test_an_empty_batch_has_the_shape_of_a_full_one() -> None:
    made = empty_of(Fields(torch.ones(3, 2), {"one": [torch.tensor(1.0), 2], "all": (torch.ones(4), None)}))
    assert made.ids.shape == (0, 2)
    assert made.more["one"] == [torch.tensor(1.0), 2]
    assert made.more["all"][0].shape == (0,)
    jagged = empty_of(
        tierstore.KeyedJaggedTensor(["a", "b"], torch.arange(2), torch.ones(2), torch.tensor([1, 0, 1, 0]))
    )
    assert jagged.keys() == ["a", "b"]
    assert (jagged.stride(), len(jagged.values()), len(jagged.weights())) == (0, 0, 0)
    lists = empty_of(tierstore.JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])))
    assert (len(lists.values()), len(lists.lengths())) == (0, 0)
    for unknown in (object(), Counted(torch.ones(3))):
        with pytest.raises(TypeError, match="empty="):
            empty_of(unknown)
