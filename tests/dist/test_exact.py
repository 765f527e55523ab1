"""Sharded training is one process that works off the ranks' batches: the same bits, over drawn plans and loops."""

import copy
import itertools
import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tests.optim.test_dense import Job, bag_of, batches, table
from tierstore import KeyedJaggedTensor, TableConfig, optim
from tierstore.dist import (
    ShardedStore,
    ShardedTieredEmbedding,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    Sharding,
    TowerTieredEmbeddingBagCollection,
    average,
    even,
    open_sharded,
)

from .ranks import run
from .test_placement import drawn_sharding

ROWS, STEPS, SAMPLES = 300, 3, 6
EVALUATED = 90
"""Number of the batch of each rank that is looked up, and not trained on, after the first step."""
RULES = [optim.SGD(lr=0.3), optim.Adagrad(lr=0.3), optim.RowWiseAdagrad(lr=0.3), optim.Adam(lr=0.1)]
TIERS: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"ddr": "2MiB"}, {"ddr": "500KiB"}, {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"}],
    "cuda": [{"ddr": "2MiB", "hbm": "2MiB", "device": "cuda"}],
}


class Case(NamedTuple):
    """Tables, where their rows lie, and the loop that trains them.

    Attributes:
        by_table: modules of one table each take the place of a collection.
        calls: of forward in a backward pass. passes: of backward in a step of the optimizer; 0: none collects.
        counts: batches of each rank. depth: of prefetch.
        towers: of tables, on two hosts. precision: of what crosses between these.
    """

    tables: list[tuple[TableConfig, Sharding]]
    tiers: dict[str, Any]
    is_pooled: bool
    is_weighted: bool
    by_table: bool
    calls: int
    passes: int
    counts: list[int]
    depth: int
    towers: list[list[str]]
    precision: Any

    @property
    def features(self) -> list[str]:
        return [name for config, _ in self.tables for name in config.feature_names]

    @property
    def calls_of_step(self) -> int:
        return self.calls * max(self.passes, 1)

    def is_joint(self, sharding: Sharding) -> bool:
        """Whether owners take the batches of all ranks as one."""
        return self.is_pooled and sharding.exchange == "pooled"


def drawn(seed: int, ranks: int, device: str) -> Case:
    draw = random.Random(seed)
    tiers, depth = draw.choice(TIERS[device]), draw.choice([0, 2])
    calls, passes = draw.choice([1, 1, 2]), draw.choice([0, 0, 2])
    is_tall = ranks == 4 and draw.random() < 0.5
    is_coarse = is_tall and draw.random() < 0.3  # of sums that cross once, the bits are those of the flat exchange
    is_pooled = is_coarse or draw.random() < 0.8
    is_weighted = is_coarse or (is_pooled and draw.random() < 0.3)
    names = "abc"[: draw.randint(1 + is_tall, 3)]
    tables = []
    for place, name in enumerate(names):
        sharding = drawn_sharding(draw, 2 if is_tall else ranks)
        if is_tall:
            kind: Any = "row_wise" if sharding.sharding_type == "data_parallel" else sharding.sharding_type
            own = tuple(rank + 2 * (place % 2) for rank in sharding.ranks)
            sharding = sharding._replace(sharding_type=kind, ranks=own, exchange="pooled")
            sharding = Sharding("table_wise", own[:1], "pooled") if is_coarse else sharding
        is_plain, by_columns = "device" not in tiers, sharding.parts > 1
        rules = [each for each in RULES if each != RULES[2]] if by_columns else RULES
        if by_columns and is_plain and not passes and sharding.exchange == "rows":
            rules = RULES[2:3]
        pooling = "sum" if is_weighted else draw.choice(["sum", "mean", "max"])
        fields: dict[str, Any] = {"pooling": "mean" if (pooling, sharding.exchange) == ("max", "pooled") else pooling}
        fields |= {"optimizer": draw.choice(rules), "dtype": draw.choice(["float32", "float32", "bfloat16"])}
        if is_plain and not by_columns and sharding.exchange == "rows" and fields["dtype"] == "bfloat16":
            fields["rounding"] = "stochastic"
        is_split = by_columns or sharding.sharding_type == "data_parallel"
        if is_plain and not (is_split or depth or "rounding" in fields) and draw.random() < 0.5:
            fields["ids"] = tierstore.DynamicIds(unseen="zeros" if is_tall else draw.choice(["init", "zeros"]))
        shape = {"num_embeddings": ROWS, "embedding_dim": draw.choice([12, 24])}
        tables.append((TableConfig(name=name, feature_names=(f"{name}1", f"{name}2"), **shape, **fields), sharding))
    by_table = "device" not in tiers and not (depth or is_tall) and draw.random() < 0.5
    whole = [STEPS * calls * max(passes, 1)] * ranks
    counts = whole if is_weighted or draw.random() < 0.6 else [draw.randint(0, each) for each in whole[1:]] + whole[:1]
    towers = [list(names[::2]), list(names[1::2])] if is_tall else []
    precision = "bf16" if is_coarse else "fp32"
    return Case(tables, tiers, is_pooled, is_weighted, by_table, calls, passes, counts, depth, towers, precision)


def batch(case: Case, rank: int, number: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    lengths = torch.randint(0, 6, (len(case.features) * SAMPLES,), generator=generator) * ((rank + number) % 5 > 0)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator).requires_grad_() if case.is_weighted else None
    return KeyedJaggedTensor(case.features, ids, weights, lengths=lengths)


def joined(case: Case, jagged: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    lists = [each[name] for name in case.features for each in jagged]
    weights = torch.cat([each.weights() for each in lists]) if case.is_weighted else None
    ids, lengths = (torch.cat(own) for own in zip(*((each.values(), each.lengths()) for each in lists), strict=True))
    return KeyedJaggedTensor(case.features, ids, weights, lengths=lengths)


def gradient(case: Case, key: str, jagged: KeyedJaggedTensor, rank: int, number: int) -> Tensor:
    dim = next(config.embedding_dim for config, _ in case.tables if key in config.feature_names)
    generator = torch.Generator().manual_seed(1000 * number + 10 * rank + case.features.index(key))
    count = jagged.stride() if case.is_pooled else len(jagged[key].values())
    return torch.randn((count, dim), generator=generator)


def look_up(case: Case, modules: dict[str, Any], jagged: KeyedJaggedTensor) -> dict[str, Tensor]:
    """By feature; ``modules``: by table, or one for all."""
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        if not case.by_table:
            out = module(jagged)
            found |= {key: out[key] if case.is_pooled else out[key].values() for key in out.keys()}  # noqa: SIM118
        for key in [f"{name}1", f"{name}2"] if case.by_table else []:
            lists = jagged[key]
            ids, offsets, weights = lists.values(), lists.offsets()[:-1], lists.weights_or_none()
            found[key] = module(ids, offsets, weights) if case.is_pooled else module(ids)
    return found


class Trained(NamedTuple):
    """Of one rank: results by feature and number of the batch, gradients of weights by number, all rows, and of each
    step the square of the norm of the gradients collected."""

    results: dict[tuple[str, int], Tensor]
    weights: dict[int, Tensor]
    rows: dict[str, Tensor]
    squares: dict[int, Tensor]


def all_rows(case: Case, modules: dict[str, Any]) -> dict[str, Tensor]:
    ids, ones = torch.arange(ROWS).repeat(len(case.features)), torch.ones(len(case.features) * ROWS, dtype=torch.int64)
    with torch.no_grad():
        found = look_up(case, modules, KeyedJaggedTensor(case.features, ids, lengths=ones))
    return {key: rows.cpu() for key, rows in found.items()}


def train(case: Case, *, by_towers: bool = False) -> Trained:
    rank, made = dist.get_rank(), Trained({}, {}, {}, {})
    with open_memory(case, by_towers=by_towers) as store:
        for config, sharding in case.tables:
            store.create_table(config, **sharding._asdict())
        many: Any = ShardedTieredEmbeddingCollection
        if case.is_pooled:
            many = TowerTieredEmbeddingBagCollection if by_towers else ShardedTieredEmbeddingBagCollection
        one: Any = ShardedTieredEmbeddingBag if case.is_pooled else ShardedTieredEmbedding
        modules = {name: one(store, name) for name in store.tables} if case.by_table else {"": many(store)}
        optimizer = store.optimizer() if case.passes else None
        own = [batch(case, rank, number) for number in range(case.counts[rank])]
        given: Any = own if len({*case.counts}) == 1 else even(own, store)
        taken = enumerate(tierstore.prefetch(given, modules[""], depth=case.depth) if case.depth else given)
        for step in range(STEPS):
            for _ in range(max(case.passes, 1)):
                outs, gradients = [], []
                for number, jagged in itertools.islice(taken, case.calls):
                    for key, out in look_up(case, modules, jagged).items():
                        outs.append(out)
                        gradients.append(gradient(case, key, jagged, rank, number).to(out.device))
                        made.results[key, number] = out.detach().cpu()
                torch.autograd.backward(outs, gradients)
            if optimizer is not None:
                made.squares[step] = optimizer.clip_grad_norm_(max_norm=1e9).square()
                optimizer.step()
                optimizer.zero_grad()
            if not step:
                with torch.no_grad():
                    found = look_up(case, modules, batch(case, rank, EVALUATED))
                made.results.update({(key, EVALUATED): out.cpu() for key, out in found.items()})
        list(taken)
        weighted = [(n, each.weights()) for n, each in enumerate(own) if case.is_weighted]
        made.weights.update({number: weights.grad for number, weights in weighted if len(weights)})
        made.rows.update(all_rows(case, modules))
        if not by_towers:
            assert all(map(torch.equal, made.rows.values(), all_rows(case, copy.deepcopy(modules)).values()))
    return made


def open_memory(case: Case, *, by_towers: bool) -> ShardedStore:
    """Of one rank on a GPU, values go by NCCL; several would need one each, so theirs go by gloo."""
    by_nccl = case.tiers.get("device") == "cuda" and dist.get_world_size() == 1
    group = dist.new_group(backend="cpu:gloo,cuda:nccl") if by_nccl else None
    wire = {"forward_precision": case.precision, "backward_precision": case.precision}
    towers = case.towers if by_towers else None
    return open_sharded(None, cold="memory", group=group, threads=1, towers=towers, **wire, **case.tiers)


def train_all(seeds: Sequence[int], device: str) -> list[tuple[Any, ...]]:
    """Where tables are in towers, these give the bits of the flat exchange."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    for seed in seeds:
        case = drawn(seed, dist.get_world_size(), device)
        own: tuple[Any, ...] = tuple(train(case))
        found.append(own)
        for one, other in zip(own, train(case, by_towers=True) if case.towers else own, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one), (seed, case)
    return found


def expected(case: Case, ranks: int) -> list[Trained]:
    """Of one process that works off the ranks' batches one after another; where owners pool, as one batch."""
    made = [Trained({}, {}, {}, {}) for _ in range(ranks)]
    given = [{n: batch(case, rank, n) for n in (*range(case.counts[rank]), EVALUATED)} for rank in range(ranks)]
    for is_joint in (False, True):
        names = [config.name for config, sharding in case.tables if case.is_joint(sharding) == is_joint]
        groups = [range(ranks)] if is_joint else [range(rank, rank + 1) for rank in range(ranks)]
        if names:
            train_whole(case, names, groups, given, made)
    for own, jagged in zip(made, given, strict=True):
        weighted = [(n, each.weights()) for n, each in jagged.items() if case.is_weighted and n != EVALUATED]
        own.weights.update({number: weights.grad * ranks for number, weights in weighted if len(weights)})
    return made


def train_whole(
    case: Case, names: Sequence[str], groups: Sequence[range], given: Sequence[dict[int, Any]], made: Sequence[Trained]
) -> None:
    """These tables, by the batches of each group of ranks as one."""

    def look_up_together(group: range, number: int) -> tuple[list[Tensor], list[Tensor]]:
        there = [rank for rank in group if number in given[rank]]
        if not there:
            return [], []
        outs = look_up(case, modules, joined(case, [given[rank][number] for rank in there]))
        gradients = []
        for key, out in outs.items():
            own = [gradient(case, key, given[rank][number], rank, number) / len(given) for rank in there]
            for rank, part in zip(there, torch.split(out.detach(), [*map(len, own)]), strict=True):
                made[rank].results[key, number] = part
            gradients.append(torch.cat(own))
        return list(outs.values()), gradients

    with tierstore.open(cold="memory", ddr="4MiB", threads=1) as store:
        for config, _ in case.tables:
            store.create_table(config)
        many: Any = tierstore.TieredEmbeddingBagCollection if case.is_pooled else tierstore.TieredEmbeddingCollection
        one: Any = tierstore.TieredEmbeddingBag if case.is_pooled else tierstore.TieredEmbedding
        modules = {name: one(store[name]) for name in names} if case.by_table else {"": many(store, tables=names)}
        optimizer = None if len(groups) == 1 and not case.passes else store.optimizer()
        numbers = iter(range(STEPS * case.calls_of_step))
        for step in range(STEPS):
            for _ in range(max(case.passes, 1)):
                own = list(itertools.islice(numbers, case.calls))
                for group in groups:
                    pairs = [look_up_together(group, number) for number in own]
                    outs, gradients = ([each for pair in pairs for each in pair[place]] for place in (0, 1))
                    if outs:
                        torch.autograd.backward(outs, gradients)
            if optimizer is not None:
                square = optimizer.clip_grad_norm_(max_norm=1e9).square()
                optimizer.step()
                optimizer.zero_grad()
                for each in made:
                    each.squares[step] = each.squares.get(step, torch.zeros(())) + square
            if not step:
                with torch.no_grad():
                    for rank in range(len(given)):
                        look_up_together(range(rank, rank + 1), EVALUATED)
        rows = all_rows(case, modules)
        for own in made:
            own.rows.update(rows)


@pytest.mark.parametrize(
    ("ranks", "device", "seeds"),
    [
        (1, "cpu", range(100, 104)),
        (2, "cpu", range(24)),
        (4, "cpu", range(200, 212)),
        pytest.param(2, "cpu", range(1000, 2000), marks=pytest.mark.soak),
        pytest.param(1, "cuda", range(12), marks=pytest.mark.gpu),
        pytest.param(2, "cuda", range(12), marks=pytest.mark.gpu),
    ],
)
def test_training_gives_the_bits_of_one_process(ranks: int, device: str, seeds: range, tmp_path: Path) -> None:
    by_rank = run(train_all, ranks, tmp_path, seeds, device, timeout_s=120)
    for seed, found in zip(seeds, zip(*by_rank, strict=True), strict=True):
        case = drawn(seed, ranks, device)
        if case.precision != "fp32":
            continue
        summed = {
            key
            for config, sharding in case.tables
            if case.is_joint(sharding) and sharding.sharding_type not in ("table_wise", "column_wise")
            for key in config.feature_names
        }
        for own, wanted in zip(itertools.starmap(Trained, found), expected(case, ranks), strict=True):
            assert own.rows.keys() == set(case.features)
            for key, rows in own.rows.items():
                assert torch.equal(rows, wanted.rows[key]), (seed, key, case)
            for place, out in wanted.results.items():
                close = 1e-5 * (place[0] in summed)  # sums of the owners' sums
                assert torch.allclose(own.results[place], out, rtol=close, atol=close), (seed, place, case)
            for step, square in own.squares.items():
                torch.testing.assert_close(square, wanted.squares[step], rtol=1e-4, atol=0, msg=f"{seed}: {case}")
            for number, weights in wanted.weights.items():
                torch.testing.assert_close(own.weights[number], weights, rtol=1e-4, atol=1e-5, msg=f"{seed}: {case}")


PARTS = [slice(0, 5), slice(5, 16)]


def take_free_steps() -> list[list[Tensor]]:
    found = []
    for curvature in ("hessian", "gauss-newton"):
        with open_sharded(None, cold="memory", ddr="1MiB") as store:
            store.create_table(table())
            mean, part = partial(average, ranks=store.ranks), PARTS[store.ranks.rank]
            job = Job(ShardedTieredEmbeddingBag(store, "t"), curvature=curvature, average=mean)
            job.train([ids[part] for ids in batches(4)], part=16, share=(part.stop - part.start) * 2 / 16)
            found.append(job.weights())
    return found


def test_hessian_free_steps_of_ranks_have_the_same_bits_and_are_those_of_one_process(tmp_path: Path) -> None:
    first, second = run(take_free_steps, 2, tmp_path)
    for place, curvature in enumerate(("hessian", "gauss-newton")):
        with tierstore.open(cold="memory", ddr="1MiB") as store:
            job = Job(bag_of(store), curvature=curvature)
            job.train(batches(4), part=16)
            assert all(map(torch.equal, first[place], second[place]))
            torch.testing.assert_close(first[place], job.weights(), rtol=1e-3, atol=1e-4)
