"""Ranks with different numbers of batches: those that end first go on with empty ones, and train what one would."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.dist import (
    ShardedStore,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    data_parallel,
    even,
    open_sharded,
)
from tierstore.dist.uneven_batches import empty_of
from tierstore.errors import RankError

from .ranks import run

ROWS, DIM, SAMPLES = 60, 12, 5
TABLES = {
    "rows": ("row_wise", "rows"),
    "columns": ("column_wise", "rows"),
    "pooled": ("table_wise", "pooled"),
    "copies": ("data_parallel", "rows"),
    "ids": ("row_wise", "rows"),
}
COUNTS = [3, 0, 5]
"""Batches of each rank."""


class Batch(NamedTuple):
    dense: Tensor
    sparse: tierstore.KeyedJaggedTensor
    name: str = "clicks"


class Model(torch.nn.Module):
    """Embeddings, pooled with weights or not at all, and a layer after them."""

    def __init__(self, store: Any, bags: Any, lists: Any) -> None:
        super().__init__()
        self.bags, self.lists = bags(store), lists(store, tables=["rows", "ids"])
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2 + len(TABLES) * DIM, 3)

    def forward(self, dense: Tensor, sparse: tierstore.KeyedJaggedTensor) -> Tensor:
        lists = self.lists(sparse)
        each: Tensor = self.layer(torch.cat([dense, self.bags(sparse).values()], dim=1)).square().sum()
        return each + lists["rows"].values().square().sum() + lists["ids"].values().sin().sum()


def config_of(name: str) -> tierstore.TableConfig:
    ids = tierstore.DynamicIds() if name == "ids" else None
    rule = optim.RowWiseAdagrad(lr=0.1)
    return tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule, ids=ids)


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * rank + step)
    lengths = torch.randint(0, 4, (len(TABLES) * SAMPLES,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator)
    sparse = tierstore.KeyedJaggedTensor(list(TABLES), ids, weights, lengths=lengths)
    return Batch(torch.randn(SAMPLES, 2, generator=generator), sparse)


def batches(rank: int) -> Iterator[Batch]:
    return (batch_of(rank, step) for step in range(COUNTS[rank]))


def opened(folder: Path | None) -> ShardedStore:
    store = open_sharded(folder, ddr="1MiB", threads=1, cold="lmdb" if folder else "memory")
    for name, (kind, exchange) in TABLES.items():
        store.create_table(config_of(name), sharding_type=kind, exchange=exchange)  # type: ignore[arg-type]
    return store


def train(folder: Path, depth: int) -> tuple[list[int], list[Tensor]]:
    """(samples of each step, the layer's weights). In the middle an evaluation looks batches up, prefetched too."""
    with opened(folder) as store:
        model = data_parallel(Model(store, ShardedTieredEmbeddingBagCollection, ShardedTieredEmbeddingCollection))
        optimizer, sizes = torch.optim.SGD(model.parameters(), lr=0.01), []
        given: Any = even(batches(store.ranks.rank), store)
        for batch in tierstore.prefetch(given, model, depth=depth):
            assert batch.name == "clicks"
            model(batch.dense, batch.sparse).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(len(batch.dense))
            if len(sizes) == 2:
                model.eval()
                with torch.no_grad():
                    for other in tierstore.prefetch([batch_of(7, step) for step in range(3)], model, depth=depth):
                        model.module(other.dense, other.sparse)
                model.train()
        store.commit()
        return sizes, [each.detach() for each in model.module.layer.parameters()]


def trained_by_one(folder: Path) -> list[Tensor]:
    """By one process, whose losses are those of all ranks' batches over the number of ranks."""
    with tierstore.open(folder, ddr="1MiB", threads=1) as store:
        for name in TABLES:
            store.create_table(config_of(name))
        model = Model(store, tierstore.TieredEmbeddingBagCollection, tierstore.TieredEmbeddingCollection)
        optimizer = store.optimizer(torch.optim.SGD(model.layer.parameters(), lr=0.01))
        for step in range(max(COUNTS)):
            for rank, count in enumerate(COUNTS):
                if step < count:
                    batch = batch_of(rank, step)
                    (model(batch.dense, batch.sparse) / len(COUNTS)).backward()
            optimizer.step()
            optimizer.zero_grad()
        store.commit()
        return [each.detach() for each in model.layer.parameters()]


def rows_of(folder: Path) -> dict[str, Tensor]:
    with tierstore.open(folder, mode="r") as store:
        return {name: store[name].read(torch.arange(ROWS)) for name in TABLES}


def test_ranks_with_fewer_batches_train_what_one_process_would(tmp_path: Path) -> None:
    layer, expected = trained_by_one(tmp_path / "one"), rows_of(tmp_path / "one")
    found = {}
    for depth in (0, 2):
        folder = tmp_path / str(depth)
        for rank, (sizes, own) in enumerate(run(train, len(COUNTS), tmp_path, folder, depth)):
            assert sizes == [SAMPLES] * COUNTS[rank] + [0] * (max(COUNTS) - COUNTS[rank])
            for mine, one in zip(own, layer, strict=True):
                torch.testing.assert_close(mine, one)
        found[depth] = rows_of(folder)
    for name, rows in expected.items():
        torch.testing.assert_close(found[0][name], rows)
        assert torch.equal(found[2][name], found[0][name])


class Broken(Exception):
    pass


def failing(rank: int) -> Iterator[Batch]:
    yield batch_of(rank, 0)
    if rank == 1:
        raise Broken
    yield batch_of(rank, 1)


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
    found = []
    with opened(None) as store:
        module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
        found += [train_until_it_fails(module, even(failing(rank), store), depth) for depth in (0, 2)]
        given = [batch_of(rank, step) for step in range(5)]
        found.append(train_until_it_fails(module, given[: 4 + rank], 2))
        ids, each = torch.full((len(TABLES),), ROWS), torch.ones(len(TABLES))
        wrong = given[4]._replace(sparse=tierstore.KeyedJaggedTensor(list(TABLES), ids, each, lengths=each.long()))
        found.append(train_until_it_fails(module, [*given[:4], wrong if rank else given[4]], 2))
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


def beside_a_plain_module() -> int:
    with tierstore.open(cold="memory", ddr="1MiB") as plain, opened(None) as store:
        plain.create_table(tierstore.TableConfig(name="frozen", num_embeddings=9, embedding_dim=4))
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4))
        frozen = tierstore.TieredEmbeddingBagCollection(plain).requires_grad_(False)
        trained, rank = ShardedTieredEmbeddingBagCollection(store, tables=["t"]), store.ranks.rank
        each = tierstore.KeyedJaggedTensor(["t", "frozen"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
        own, seen = [each.to("cpu") for _ in range(3 + 2 * rank)], 0
        for batch in tierstore.prefetch(even(own, store), torch.nn.ModuleList([frozen, trained])):
            (trained(batch).values().sum() + frozen(batch).values().sum()).backward()
            seen += 1
        return seen


def test_the_pass_exchanges_for_the_sharded_module_though_a_plain_one_comes_first(tmp_path: Path) -> None:
    assert run(beside_a_plain_module, 2, tmp_path) == [5, 5]


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
    jagged = empty_of(batch_of(0, 0).sparse)
    assert jagged.keys() == list(TABLES)
    assert (jagged.stride(), len(jagged.values()), len(jagged.weights())) == (0, 0, 0)
    lists = empty_of(tierstore.JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])))
    assert (len(lists.values()), len(lists.lengths())) == (0, 0)
    for unknown in (object(), Counted(torch.ones(3))):
        with pytest.raises(TypeError, match="empty="):
            empty_of(unknown)
