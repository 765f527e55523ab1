"""Towers: without modules the bits of the flat exchange, with modules the gradients of one process with the whole model."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tierstore import optim
from tierstore.dist import (
    ShardedStore,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    TowerTieredEmbeddingBagCollection,
    TowerTieredEmbeddingCollection,
    data_parallel,
    open_sharded,
)

from .ranks import run

STEPS, ROWS = 3, 90
DIMS = {"a": 20, "b": 20, "c": 12}
FEATURES = ["a1", "a2", "b1", "b2", "c1", "c2"]
WIDTH = 2 * sum(DIMS.values())
TOWERS: dict[int, list[list[str]]] = {2: [["c", "a"], ["b"]], 3: [["b"], ["a"], ["c"]]}


class Case(NamedTuple):
    """How tables are sharded over their hosts, trained and looked up."""

    sharding_type: Any = "row_wise"
    rule: optim.Optimizer = optim.RowWiseAdagrad(lr=0.3)
    pooling: Any = "sum"
    is_pooled: bool = True
    is_weighted: bool = False
    calls: int = 1
    collects: bool = False
    prefetches: bool = False
    precision: Any = "fp32"
    ids: tierstore.DynamicIds | None = None


CASES = [
    Case(pooling="mean", rule=optim.Adam(lr=0.1)),
    Case(pooling="mean", prefetches=True, calls=2),
    Case("table_wise", precision="bf16", is_weighted=True),
    Case("column_wise", optim.Adagrad(lr=0.3), pooling="mean", collects=True),
    Case(is_pooled=False, prefetches=True),
    Case("column_wise", is_pooled=False, precision="int8"),
    Case("table_wise", optim.Adam(lr=0.1), is_pooled=False, collects=True, calls=2),
    Case(ids=tierstore.DynamicIds(), rule=optim.SGD(lr=0.1)),
]


def open_hosts(hosts: int, **options: Any) -> ShardedStore:
    os.environ["LOCAL_WORLD_SIZE"] = f"{dist.get_world_size() // hosts}"
    return open_sharded(None, cold="memory", **{"ddr": "1MiB", "threads": 1} | options)


def configs(case: Case) -> list[tierstore.TableConfig]:
    return [
        tierstore.TableConfig(
            name=name, feature_names=[f"{name}1", f"{name}2"], num_embeddings=ROWS, embedding_dim=dim,
            optimizer=case.rule, pooling=case.pooling, ids=case.ids,
        ) for name, dim in DIMS.items()
    ]  # fmt: skip


def batches(case: Case, rank: int) -> Iterator[tuple[tierstore.KeyedJaggedTensor, Tensor]]:
    """Of each step and call ids, and a gradient of each element of the results; ranks have other numbers of samples,
    and one has none once."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS * case.calls):
        samples = 0 if (rank, step) == (1, 2) else 5 + rank
        lengths = torch.randint(0, 5, (len(FEATURES) * samples,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator).requires_grad_() if case.is_weighted else None
        count = sum(DIMS[name[0]] * int(part.sum()) for name, part in zip(FEATURES, lengths.view(6, -1), strict=True))
        shape = (samples, WIDTH) if case.is_pooled else (count,)
        jagged = tierstore.KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths)
        yield jagged, torch.randn(shape, generator=generator)


def train(case: Case, hosts: int, *, by_towers: bool) -> list[Tensor]:
    """Results and gradients of weights; then the rows that this rank has."""
    towers, on_host = TOWERS[hosts], dist.get_world_size() // hosts
    precisions = {"forward_precision": case.precision, "backward_precision": case.precision}
    with open_hosts(hosts, towers=towers if by_towers else None, **precisions) as store:
        for config in configs(case):
            (tower,) = (place for place, names in enumerate(towers) if config.name in names)
            ranks = range(tower * on_host, (tower + 1) * on_host)[: 1 if case.sharding_type == "table_wise" else None]
            store.create_table(config, sharding_type=case.sharding_type, ranks=ranks,
                               exchange="pooled" if case.is_pooled else "rows")  # fmt: skip
        flat, tall = (
            (ShardedTieredEmbeddingBagCollection, TowerTieredEmbeddingBagCollection)
            if case.is_pooled
            else (ShardedTieredEmbeddingCollection, TowerTieredEmbeddingCollection)
        )
        module: Any = (tall if by_towers else flat)(store)
        optimizer = store.optimizer() if case.collects else None
        made = list(batches(case, store.ranks.rank))
        taken = iter(tierstore.prefetch([each for each, _ in made], module) if case.prefetches else map(_first, made))
        found: list[Tensor] = []
        for step in range(STEPS):
            some = [(next(taken), gradient) for _, gradient in made[step * case.calls :][: case.calls]]
            outs = [look_up(case, module, jagged) for jagged, _ in some]
            torch.autograd.backward(outs, [gradient for _, gradient in some])
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            weights = [jagged.weights_or_none() for jagged, _ in some]
            found += [*(out.detach() for out in outs), *(each.grad for each in weights if each is not None)]
        list(taken)
        with torch.no_grad():
            found.append(look_up(case, module, made[0][0]))
        own = [table.local for table in store.tables.values()]
        if case.ids is None:
            found += [table.local.read(torch.tensor(list(table.rows), dtype=torch.int64)) for table in store.tables.values()]
        assert own
        return found


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def look_up(case: Case, module: Any, jagged: tierstore.KeyedJaggedTensor) -> Tensor:
    found = module(jagged)
    if case.is_pooled:
        assert found.keys() == [f"{name}{number}" for name in DIMS for number in (1, 2)]
        return found.values()
    return torch.cat([each.values().reshape(-1) for each in found.values()])


def compare(places: Sequence[int], hosts: int) -> list[str]:
    """What differs, of these cases."""
    wrong = []
    for case in map(CASES.__getitem__, places):
        one, other = (train(case, hosts, by_towers=by_towers) for by_towers in (False, True))
        wrong += [
            f"{case}: tensor {place}"
            for place, pair in enumerate(itertools.zip_longest(one, other))
            if not torch.equal(*pair)
        ]
    return wrong


@pytest.mark.parametrize(("hosts", "on_host"), [(2, 2), (3, 2), (2, 1)])
def test_without_modules_results_and_rows_have_the_bits_of_the_flat_exchange(
    hosts: int, on_host: int, tmp_path: Path
) -> None:
    cases = list(range(len(CASES))) if (hosts, on_host) == (2, 2) else [0, 4]
    assert run(compare, hosts * on_host, tmp_path, cases, hosts) == [[]] * (hosts * on_host)
