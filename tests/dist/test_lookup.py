"""Sharded training against one process that works off the ranks' batches one after another: the same bits."""

import copy
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tests.nn.test_jagged import even, make, uneven
from tierstore import optim
from tierstore.dist import (
    ShardedStore,
    ShardedTieredEmbedding,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    open_sharded,
)
from tierstore.dist.plan import Shard
from tierstore.dist.ranks import Precision, Ranks, decoded, encoded
from tierstore.dist.table import ShardedTable

from .ranks import run

ROWS, DIM, STEPS, SAMPLES = 300, 20, 3, 8
FEATURES = ["a1", "a2", "b1", "b2"]
TIERS: dict[str, dict[str, Any]] = {
    "in place": {"ddr": "1MiB"},
    "evicting": {"ddr": "500KiB"},
    "hbm": {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"},
    "cuda": {"ddr": "2MiB", "hbm": "2MiB", "device": "cuda"},
}


class Case(NamedTuple):
    """How tables are sharded, trained and looked up."""

    sharding_type: Any
    rule: optim.Optimizer
    pooling: Any
    is_pooled: bool = True
    is_weighted: bool = False
    dtype: Any = "float32"
    rounding: Any = "nearest"
    calls: int = 1  # of forward in a backward pass
    exchange: Any = "rows"


CASES = [
    *itertools.starmap(
        Case,
        itertools.product(
            ["row_wise", "table_wise", "column_wise", "data_parallel"],
            [optim.RowWiseAdagrad(lr=0.3), optim.Adam(lr=0.1)],
            ["sum", "mean"],
        ),
    ),
    Case("column_wise", optim.RowWiseAdagrad(lr=0.3), "max", calls=2),
    Case("column_wise", optim.Adagrad(lr=0.3), "sum", is_weighted=True),
    Case("data_parallel", optim.Adagrad(lr=0.3), "mean", calls=2),
    Case("data_parallel", optim.SGD(lr=0.3), "sum", is_weighted=True),
    Case("data_parallel", optim.SGD(lr=0.3), "sum", is_pooled=False, dtype="bfloat16", rounding="stochastic"),
    *(
        Case(kind, rule, pooling, exchange="pooled", calls=calls)
        for kind in ("row_wise", "table_wise")
        for rule, pooling, calls in ((optim.RowWiseAdagrad(lr=0.3), "sum", 1), (optim.Adam(lr=0.1), "mean", 2))
    ),
    Case("column_wise", optim.Adagrad(lr=0.3), "mean", exchange="pooled"),
    Case("column_wise", optim.SGD(lr=0.3), "sum", exchange="pooled", is_weighted=True),
    Case("row_wise", optim.SGD(lr=0.3), "sum", exchange="pooled", is_weighted=True),
    Case("row_wise", optim.SGD(lr=0.3), "sum", exchange="pooled", is_pooled=False),
    Case("row_wise", optim.Adagrad(lr=0.3), "max"),
    Case("row_wise", optim.Adagrad(lr=0.3), "max", calls=2),
    Case("row_wise", optim.SGD(lr=0.3), "sum", is_weighted=True),
    Case("row_wise", optim.SGD(lr=0.3), "sum", is_pooled=False),
    Case("row_wise", optim.SGD(lr=0.3), "sum", dtype="bfloat16", rounding="stochastic"),
]
GRID = [
    Case("grid_shard", optim.RowWiseAdagrad(lr=0.3), "mean"),
    Case("grid_shard", optim.Adam(lr=0.1), "max", calls=2),
    Case("grid_shard", optim.SGD(lr=0.3), "sum", exchange="pooled", is_weighted=True),
]
"""Over four ranks of two hosts: two ranges of columns, each of two of rows."""


def config(case: Case, name: str) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, feature_names=[f"{name}1", f"{name}2"], num_embeddings=ROWS, embedding_dim=DIM, optimizer=case.rule,
        pooling=case.pooling, dtype=case.dtype, rounding=case.rounding,
    )  # fmt: skip


def batch(case: Case, rank: int, step: int) -> tuple[tierstore.KeyedJaggedTensor, Tensor]:
    """A rank's ids, and a gradient of each element of its results."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 6, (4 * SAMPLES,), generator=generator) * (rank != 0 or step != 2)  # one has no id
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator).requires_grad_() if case.is_weighted else None
    jagged = tierstore.KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths)
    shape = (SAMPLES, 4 * DIM) if case.is_pooled else (len(ids), DIM)
    return jagged, torch.randn(shape, generator=generator)


def look_up(case: Case, module: Any, jagged: tierstore.KeyedJaggedTensor) -> Tensor:
    found = module(jagged)
    return found.values() if case.is_pooled else torch.cat([each.values() for each in found.values()])


def train_step(case: Case, module: Any, rank: int, step: int, divisor: int = 1) -> tuple[Tensor, Tensor | None]:
    """A backward pass of gradients divided; (results, the weights' gradient as if they were not)."""
    batches = [batch(case, rank, step + STEPS * call) for call in range(case.calls)]
    results = [look_up(case, module, jagged) for jagged, _ in batches]
    torch.autograd.backward(
        results, [gradient.to(out.device) / divisor for out, (_, gradient) in zip(results, batches, strict=True)]
    )
    weights = batches[0][0].weights_or_none()
    grad = None if weights is None else weights.grad
    return torch.cat(results).detach().cpu(), None if grad is None else grad * divisor


def train_rank(case: Case, tiers: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(of each table the rows that this rank owns, and which; its results and gradients of weights)."""
    rank = dist.get_rank()
    with open_memory(tiers) as store:
        for name in "ab":
            store.create_table(config(case, name), sharding_type=case.sharding_type, exchange=case.exchange)
            assert store[name].num_parts == 2 or case not in GRID
        kind = ShardedTieredEmbeddingBagCollection if case.is_pooled else ShardedTieredEmbeddingCollection
        module = kind(store)
        results = [train_step(case, module, rank, step) for step in range(STEPS)]
        return {table.name: owned(store, table) for table in store.tables.values()}, results


def open_memory(tiers: dict[str, Any]) -> ShardedStore:
    """Of one rank on a GPU, values go by NCCL; several would need one each, so theirs go by gloo."""
    by_nccl = tiers.get("device") == "cuda" and dist.get_world_size() == 1
    group = dist.new_group(backend="cpu:gloo,cuda:nccl") if by_nccl else None
    return open_sharded(None, cold="memory", group=group, **tiers)


def owned(store: ShardedStore, table: ShardedTable) -> list[tuple[Shard, Tensor]]:
    """What this rank has of a table."""
    own = [shard for shard in table.shards if shard.rank == store.ranks.rank]
    return [(shard, table.local.read(torch.arange(shard.first_row, shard.first_row + shard.num_rows))) for shard in own]


def cases(tiers: dict[str, Any], ranks: int) -> list[Case]:
    if "device" in tiers:
        return [case for case in CASES if case.rounding == "nearest" and not is_rowwise_by_columns(case)]
    return CASES if (ranks, tiers) == (2, TIERS["evicting"]) else CASES[ranks % 3 :: 3] + GRID * (ranks == 4)


def is_rowwise_by_columns(case: Case) -> bool:
    return case.sharding_type == "column_wise" and isinstance(case.rule, optim.RowWiseAdagrad)


def train_all(tiers: dict[str, Any]) -> list[Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return [train_rank(case, tiers) for case in cases(tiers, dist.get_world_size())]


def expected(case: Case, ranks: int) -> tuple[dict[str, Tensor], list[list[Any]]]:
    """Rows in the end, and the results of each rank's batches: of a process that works off the batches one after
    another, or where owners pool, in one batch."""
    results: list[list[Any]] = [[] for _ in range(ranks)]
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        for name in "ab":
            store.create_table(config(case, name))
        kind = tierstore.TieredEmbeddingBagCollection if case.is_pooled else tierstore.TieredEmbeddingCollection
        module = kind(store)
        for step in range(STEPS):
            if case.exchange == "pooled" and case.is_pooled:
                train_together(case, module, ranks, step, results)
                continue
            optimizer = store.optimizer()
            for rank in range(ranks):
                results[rank].append(train_step(case, module, rank, step, ranks))
            optimizer.step()
        return {table.name: table.read(torch.arange(ROWS)) for table in store.tables.values()}, results


def train_together(case: Case, module: Any, ranks: int, step: int, results: list[list[Any]]) -> None:
    """A step whose calls are each given the samples of all ranks."""
    outs, gradients, weights = [], [], []
    for call in range(case.calls):
        batches = [batch(case, rank, step + STEPS * call) for rank in range(ranks)]
        pieces = [[(jagged[name].values(), jagged[name].lengths()) for jagged, _ in batches] for name in FEATURES]
        ids, lengths = (torch.cat([each[i] for of_feature in pieces for each in of_feature]) for i in range(2))
        scales = [jagged.weights_or_none() for jagged, _ in batches]
        scale = None if scales[0] is None else torch.cat(by_feature(batches)).detach().requires_grad_()
        weights.append(scale)
        outs.append(module(tierstore.KeyedJaggedTensor(FEATURES, ids, scale, lengths=lengths)).values())
        gradients.append(torch.cat([gradient for _, gradient in batches]) / ranks)
    torch.autograd.backward(outs, gradients)
    for rank in range(ranks):
        own = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
        results[rank].append((torch.cat([out[own] for out in outs]).detach(), None))


def by_feature(batches: Any) -> list[Tensor]:
    """Weights of each feature, in it of each rank."""
    return [jagged[name].weights() for name in FEATURES for jagged, _ in batches]


@pytest.mark.parametrize(
    ("ranks", "tiers"),
    [
        (1, "in place"),
        (2, "in place"),
        (2, "evicting"),
        (4, "evicting"),
        (2, "hbm"),
        pytest.param(1, "cuda", marks=pytest.mark.gpu),
        pytest.param(2, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_training_gives_the_bits_of_one_process(ranks: int, tiers: str, tmp_path: Path) -> None:
    found = run(train_all, ranks, tmp_path, TIERS[tiers])
    for number, case in enumerate(cases(TIERS[tiers], ranks)):
        rows, results = expected(case, ranks)
        for name, wanted in rows.items():
            seen = torch.zeros(ROWS, DIM)
            for shard, trained in (each for of_rank in found for each in of_rank[number][0][name]):
                own = slice(shard.first_row, shard.first_row + shard.num_rows)
                columns = slice(shard.first_column, shard.first_column + shard.num_columns)
                assert torch.equal(trained, wanted[own, columns]), case
                seen[own, columns] += 1
            assert (seen == (ranks if case.sharding_type == "data_parallel" else 1)).all(), "each value has one owner"
        for rank in range(ranks):
            for (out, of_weights), (wanted_out, wanted_of_weights) in zip(
                found[rank][number][1], results[rank], strict=True
            ):
                if case.exchange == "pooled" and case.sharding_type in ("row_wise", "grid_shard"):
                    assert torch.allclose(out, wanted_out, atol=1e-6), case  # sums of the owners' sums
                else:
                    assert torch.equal(out, wanted_out), case
                assert wanted_of_weights is None or torch.allclose(of_weights, wanted_of_weights, rtol=1e-6), case


def train_one(made: dict[str, Any], is_pooled: bool, is_single: bool, depth: int) -> tuple[Tensor, list[Tensor]]:
    """Results of a module of one table, or of a collection of that one; and the rows that this rank has."""
    table = replace(config(Case("row_wise", optim.Adagrad(lr=0.3), "sum"), "b"), feature_names=("b",))
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches: Any = [torch.randint(0, ROWS, (6, 4), generator=generator) for _ in range(STEPS)]
    with open_memory({"ddr": "1MiB"}) as store:
        store.create_table(table, **made)
        module: Any
        if is_single:
            module = (ShardedTieredEmbeddingBag if is_pooled else ShardedTieredEmbedding)(store, "b")
        else:
            module = (ShardedTieredEmbeddingBagCollection if is_pooled else ShardedTieredEmbeddingCollection)(store)
            offsets = torch.arange(0, 25, 4 if is_pooled else 1)
            batches = [tierstore.KeyedJaggedTensor(["b"], each.reshape(-1), offsets=offsets) for each in batches]

        def rows_of(out: Any) -> Tensor:
            found: Tensor = out if is_single else out["b"] if is_pooled else out["b"].values()
            return found

        results = []
        for each in tierstore.prefetch(batches, module, depth=depth):
            out = rows_of(module(each))
            results.append(out.detach().reshape(-1, DIM))
            out.square().sum().backward()
        with torch.no_grad():  # a copy is over the same tables
            assert torch.equal(*(rows_of(each(batches[0])) for each in (module, copy.deepcopy(module))))
        return torch.cat(results), [rows for _, rows in owned(store, store["b"])]


def one_table(kinds: list[tuple[str, str]]) -> None:
    """Modules of one table train as collections of that one do, prefetched or not."""
    for (sharding_type, exchange), is_pooled in itertools.product(kinds, [False, True]):
        made = {"sharding_type": sharding_type, "exchange": exchange}
        first, *others = [train_one(made, is_pooled, *each) for each in itertools.product([False, True], [0, 2])]
        for results, rows in others:
            assert torch.equal(results, first[0])
            assert all(map(torch.equal, rows, first[1]))


def test_modules_of_one_table_train_as_collections_do(tmp_path: Path) -> None:
    kinds = [("row_wise", "rows"), ("row_wise", "pooled"), ("column_wise", "rows"), ("data_parallel", "rows")]
    run(one_table, 2, tmp_path, kinds)


# Batches of several sizes


def of_variable_batches(exchange: str) -> list[tuple[Tensor, Tensor]]:
    """Of batches with different numbers of samples, and of those where every sample has its own lists."""
    with open_sharded(None, cold="memory", ddr="1MiB", threads=1) as store:
        make(store, lambda _: None, exchange=exchange)
        module = ShardedTieredEmbeddingBagCollection(store)
        return [
            (module(uneven(seed)).values().detach(), module(even(seed)).values().detach())
            for seed in (store.ranks.rank, 5 + store.ranks.rank)
        ]


def test_results_are_those_of_samples_with_lists_of_their_own(tmp_path: Path) -> None:
    for exchange in ("rows", "pooled"):
        for own in run(of_variable_batches, 2, tmp_path, exchange):
            for found, expected in own:
                assert torch.equal(found, expected)


# Values in fewer bits between ranks

WIDE = 64
RELATIVE = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127}
"""Of an element; of int8, of the largest of its row."""


@pytest.mark.parametrize("precision", get_args(Precision))
def test_values_come_back_as_near_as_their_bits_allow(precision: Any) -> None:
    rows = torch.randn(100, WIDE, generator=torch.Generator().manual_seed(1)) * 10
    rows[3] = 0
    unit = rows.abs().amax(1, keepdim=True) if precision == "int8" else rows.abs()
    sent = encoded(rows, precision)
    assert len(sent) == len(rows)
    assert ((decoded(sent, precision) - rows).abs() <= unit * RELATIVE[precision] * (1 + 1e-6)).all()
    assert decoded(encoded(rows[:0], precision), precision).shape == (0, WIDE)
    assert decoded(encoded(rows[:1, :6], precision), precision).shape == (1, 6)
    rows[5, 7] = torch.nan
    assert decoded(encoded(rows, precision), precision)[5].isnan().any(), "what went wrong stays seen"


def train_in(precision: Any) -> tuple[Tensor, int]:
    """(results of the last step, bytes sent)."""
    with open_sharded(
        None, cold="memory", ddr="1MiB", forward_precision=precision, backward_precision=precision
    ) as store:
        for name, exchange in (("a", "rows"), ("b", "pooled")):
            config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=WIDE)
            store.create_table(config, exchange=exchange)  # type: ignore[arg-type]
        module = ShardedTieredEmbeddingBagCollection(store)
        for step in range(3):
            ids = torch.randint(0, ROWS, (400,), generator=torch.Generator().manual_seed(2 * step + store.ranks.rank))
            out = module(
                tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(400, dtype=torch.int64))
            ).values()
            (out - 1).square().sum().backward()
        return out.detach(), store.balance()[store.ranks.rank].traffic.bytes_sent


def test_fewer_bits_are_fewer_bytes_and_nearly_the_same_training(tmp_path: Path) -> None:
    found = {precision: run(train_in, 2, tmp_path, precision)[0] for precision in get_args(Precision)}
    exact, most = found["fp32"]
    saved = {precision: most - size for precision, (_, size) in found.items()}
    assert saved["bf16"] == saved["fp16"] > most / 3, "two bytes of each value; the rest are ids"
    assert saved["int8"] / saved["bf16"] == (4 - (WIDE + 4) / WIDE) / 2
    assert all(0 < (found[each][0] - exact).abs().max() < 0.01 for each in ("fp16", "bf16", "int8"))


def carry() -> None:
    ranks = Ranks()
    carried = {device: ranks._carries(device) for device in ("cpu", "cuda", "mps")}
    assert carried == {"cpu": True, "cuda": False, "mps": False}
    with pytest.raises(ValueError, match=r"no backend for tensors on the CPU.*cpu:gloo,cuda:nccl"):
        open_sharded(None, group=dist.new_group(backend="cuda:gloo"), cold="memory", ddr="1MiB")


def test_gloo_is_given_what_is_on_the_host_and_must_be_there(tmp_path: Path) -> None:
    run(carry, 1, tmp_path)
