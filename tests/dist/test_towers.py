"""Towers with modules: the gradients of the whole model in one process. Without modules: see test_exact."""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tierstore import optim
from tierstore.dist import Plan, ShardedStore, Sharding, TowerTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.errors import RankError

from .ranks import run

STEPS, ROWS = 3, 90
DIMS = {"a": 20, "b": 20, "c": 12}
FEATURES = ["a1", "a2", "b1", "b2", "c1", "c2"]
TOWERS = [["c", "a"], ["b"]]
CONFIGS = [
    tierstore.TableConfig(
        name=name, feature_names=[f"{name}1", f"{name}2"], num_embeddings=ROWS, embedding_dim=dim,
        optimizer=optim.SGD(lr=0.5), pooling="mean",
    ) for name, dim in DIMS.items()
]  # fmt: skip


def open_hosts(hosts: int, **options: Any) -> ShardedStore:
    os.environ["LOCAL_WORLD_SIZE"] = f"{dist.get_world_size() // hosts}"
    return open_sharded(**{"cold": "memory", "ddr": "1MiB", "threads": 1} | options)


def batches(rank: int) -> Iterator[tuple[tierstore.KeyedJaggedTensor, Tensor]]:
    """Of each step ids, and a target of each sample; ranks have other numbers of samples, and one has none once."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        samples = 0 if (rank, step) == (1, 2) else 5 + rank
        lengths = torch.randint(0, 5, (len(FEATURES) * samples,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        jagged = tierstore.KeyedJaggedTensor(FEATURES, ids, lengths=lengths)
        yield jagged, torch.randn((samples, 1), generator=generator)


HIDDEN = [8, 5]
"""Columns that towers 0 and 1 give."""


class Tower(nn.Sequential):
    def __init__(self, columns: int, out_features: int) -> None:
        super().__init__(nn.Linear(columns, out_features), nn.Tanh())
        self.out_features = out_features


def towers_of_two() -> list[nn.Module]:
    return [Tower(sum(2 * DIMS[name] for name in names), out) for names, out in zip(TOWERS, HIDDEN, strict=True)]


class Model(nn.Module):
    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.over = nn.Linear(sum(HIDDEN), 1)

    def forward(self, jagged: Any) -> Tensor:
        found: Tensor = self.over(self.embeddings(jagged).values())
        return found


class Whole(nn.Module):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers_of_two())
        self.bags = nn.ModuleDict({name: nn.EmbeddingBag.from_pretrained(each, freeze=False, mode="mean")
                                   for name, each in weights.items()})  # fmt: skip

    def forward(self, jagged: Any) -> tierstore.KeyedTensor:
        bags = {name: self.bags[name[0]](jagged[name].values(), jagged[name].offsets()[:-1]) for name in FEATURES}
        parts = [torch.cat([bags[name] for name in FEATURES if name[0] in names], dim=1) for names in TOWERS]
        given = [tower(part) for tower, part in zip(self.towers, parts, strict=True)]
        return tierstore.KeyedTensor(["0", "1"], HIDDEN, torch.cat(given, dim=1))


def loss_of(model: nn.Module, batch: tuple[tierstore.KeyedJaggedTensor, Tensor]) -> Tensor:
    jagged, targets = batch
    return (model(jagged) - targets).square().sum() / max(len(targets), 1)


def train_both() -> list[dict[str, Any]]:
    return [train_model(prefetches=each) for each in (False, True)]


def train_model(*, prefetches: bool) -> dict[str, Any]:
    """First and last rows that this rank has, by table, with their range; the last weights."""
    torch.manual_seed(dist.get_rank())
    with open_hosts(2, towers=TOWERS) as store:
        for config in CONFIGS:
            store.create_table(config)
        embeddings = TowerTieredEmbeddingBagCollection(store, towers_of_two())
        assert (embeddings.out_features, embeddings.widths) == (sum(HIDDEN), HIDDEN)
        model = data_parallel(Model(embeddings))
        first = {name: each.clone() for name, each in model.module.state_dict().items()}
        optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.5), [own_rows(store)]
        made = list(batches(dist.get_rank()))
        jagged = [each for each, _ in made]
        taken = tierstore.prefetch(jagged, embeddings) if prefetches else jagged
        for each, (_, targets) in zip(taken, made, strict=True):
            optimizer.zero_grad()
            loss_of(model, (each, targets)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        embeddings.gather([])
        return {"first": first, "last": model.module.state_dict(), "rows": [*rows, own_rows(store)]}


def own_rows(store: ShardedStore) -> dict[str, tuple[range, Tensor]]:
    tables = store.tables.values()
    return {each.name: (each.rows, each.local.read(torch.arange(each.rows.start, each.rows.stop))) for each in tables}


def whole_rows(found: Sequence[dict[str, tuple[range, Tensor]]]) -> dict[str, Tensor]:
    whole = {name: torch.full((ROWS, dim), torch.nan) for name, dim in DIMS.items()}
    for name, (rows, values) in itertools.chain(*(each.items() for each in found)):
        whole[name][rows.start : rows.stop] = values[: len(rows)]
    return whole


def test_rows_and_weights_train_as_in_one_process_with_the_whole_model(tmp_path: Path) -> None:
    ranks = 4
    found, ahead = zip(*run(train_both, ranks, tmp_path), strict=True)
    for one, other in zip(found, ahead, strict=True):
        torch.testing.assert_close(one["rows"], other["rows"], rtol=0, atol=0)
        torch.testing.assert_close(one["last"], other["last"], rtol=0, atol=0)
    before, after = (whole_rows([each["rows"][place] for each in found]) for place in (0, 1))
    whole = Model(Whole(before))
    whole.load_state_dict(found[0]["first"], strict=False)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for parts in zip(*(batches(rank) for rank in range(ranks)), strict=True):
        optimizer.zero_grad()
        torch.stack([loss_of(whole, part) for part in parts]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, rows in after.items():
        assert not torch.equal(rows, before[name])
        torch.testing.assert_close(rows, whole.embeddings.bags[name].weight.detach(), rtol=0, atol=1e-6)
    expected = {name: each for name, each in whole.state_dict().items() if "bags" not in name}
    for each in found:
        assert all(not torch.equal(each["last"][name], each["first"][name]) for name in expected)
        torch.testing.assert_close(each["last"], expected, rtol=0, atol=1e-6)


A, B, C = (tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=4) for name in "abc")


class Half(Tower):
    def forward(self, pooled: Tensor) -> Tensor:
        found: Tensor = super().forward(pooled).bfloat16()
        return found


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises((ValueError, TypeError, RankError)) as caught:
        work()
    return str(caught.value)


def refused() -> list[str]:
    rank, two = dist.get_rank(), [["a"], ["b"]]
    told = []

    def opening(hosts: int = 2, **options: Any) -> None:
        told.append(error_of(lambda: open_hosts(hosts, **options)))

    opening(towers=[["a"], ["b"] if rank else ["c"]])
    opening(4 if rank < 2 else 2, towers=two)
    opening(towers=[["a"], ["b"], ["c"]])
    opening(towers=two, plan=Plan(4, {"b": Sharding("table_wise", (1,))}))
    with open_hosts(2, towers=two) as store:
        told.append(error_of(lambda: store.create_table(A, sharding_type="data_parallel")))
        store.create_table(A, exchange="rows")
        store.create_table(B, sharding_type="table_wise")
        assert store["b"].sharding == Sharding("table_wise", (2,), "pooled")
        told.append(error_of(lambda: TowerTieredEmbeddingBagCollection(store)))
        store.create_table(C)
        told.append(error_of(lambda: TowerTieredEmbeddingBagCollection(store)))
    with open_hosts(2, towers=two) as store:
        store.create_table(replace(A, ids=tierstore.DynamicIds(unseen="init")))
        told.append(error_of(lambda: TowerTieredEmbeddingBagCollection(store, tables=["a"])))
    with open_hosts(2, towers=two) as store:
        store.create_table(A)
        store.create_table(B)
        told.append(error_of(lambda: TowerTieredEmbeddingBagCollection(store, [nn.Identity(), nn.Linear(4, 3)])))
        wrong = [nn.Linear(4, 3), Tower(4, 3)]
        wrong[1].out_features = 2
        module = TowerTieredEmbeddingBagCollection(store, wrong)
        ids = tierstore.KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
        told.append(error_of(lambda: module(ids)))
        half: Any = TowerTieredEmbeddingBagCollection(store, [Half(4, 3), Tower(4, 3)])
        values = half(ids).values()  # of one type, as under autocast they may not be
        assert values.dtype == torch.float32
        values.sum().backward()
        as_one: Any = store
        told.append(error_of(lambda: tierstore.checkpoint.save_async(as_one, half)))
        total: Any = TowerTieredEmbeddingBagCollection(store, [nn.Linear(4, 3), nn.Linear(4, 3)])(ids).values().sum()
        told.append(error_of(store.commit if rank else total.backward))
    with open_hosts(2, towers=two) as store:
        store.create_table(A)
        store.create_table(B)
        out, towers = TowerTieredEmbeddingBagCollection(store)(ids).values(), store.owners.towers
        assert out.shape == (2, 8)
        sent = towers.peers.traffic.bytes_sent
        assert sent == 2 * 8 + 2 * 4 * 4, "to one peer: how a call begins, and results of two samples"
        assert store.balance()[rank].traffic.bytes_sent > sent
    return told


def test_wrong_towers_are_refused_by_all_ranks(tmp_path: Path) -> None:
    expected = [
        r"towers of ranks 0 and 1 differs: .*'c'.* and .*'b'.*; give all ranks the same",
        "equally many ranks on each host; LOCAL_WORLD_SIZE of the 4 ranks is 1, 2",
        "expected the tables of each host, and there are 2 hosts",
        r"table 'b' is table_wise over ranks \[1\], but its tower's host has ranks \[2, 3\]",
        r"table 'a' is data_parallel over ranks \[0, 1, 2, 3\], but its tower's host has ranks \[0, 1\]",
        "table 'a' has exchange=\"rows\": towers pool",
        r"table 'c' is in no tower of \[\['a'\], \['b'\]\]",
        'table .a. has DynamicIds.unseen="init".*: take "zeros", or Sharded',
        "Identity has no out_features",
        r"tower 1 gives \[4, 3\], and is to give \[4, 2\]|rank [23] cannot take part in this step",
        r"tierstore\.checkpoint\.save",
        r"ranks make different calls \(rank 0: backward of towers; ranks 1, 2, 3: commit 1\)",
    ]
    for told in run(refused, 4, tmp_path):
        for text, pattern in zip(told, expected, strict=True):
            assert re.search(pattern, text), (pattern, text)
