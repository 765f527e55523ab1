"""Random graphs over a few tables: as torch trains them, and in the same bits at every budget."""

import tempfile
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import tierstore
from tests.oracle import DenseTable
from tierstore import optim

ROWS, DIM = 300, 4
SETTINGS: list[dict[str, Any]] = [
    {"ddr": "2MiB", "threads": 1},
    {"ddr": "404KiB", "policy": "lru", "threads": 2},
    {"ddr": "480KiB", "policy": "tinylfu", "threads": 1},
    {"ddr": "2MiB", "hbm": "12KiB"},
]
RULES = [
    optim.SGD(lr=0.5), optim.SGD(lr=0.1, weight_decay=0.02), optim.RowWiseAdagrad(lr=0.5, eps=1e-6),
    optim.RowWiseAdagrad(lr=0.1, weight_decay=0.5, decoupled=True), optim.Adagrad(lr=0.5),
    optim.Adagrad(lr=0.1, weight_decay=0.02, initial_accumulator_value=0.1), optim.Adam(lr=0.1),
    optim.Adam(lr=0.01, betas=(0.8, 0.9), weight_decay=0.02, decoupled=True),
]  # fmt: skip
OTHERS = 6000
"""Rows of a table that nobody trains, which leaves no room for all of them."""


class Call:
    """Of a batch over some tables: ids and offsets of each, maybe weights, and what makes a loss of the result."""

    def __init__(self, tables: list[int], batch: int, weighted: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables = tables
        self.lengths = torch.randint(0, 4, (len(tables) * batch,), generator=generator)
        self.ids = (torch.rand(int(self.lengths.sum()), generator=generator) ** 3 * ROWS).long()
        self.scale = torch.rand(len(self.ids), generator=generator) if weighted else None
        self.factor = torch.randn(batch, DIM * len(tables), generator=generator)

    def ids_of(self, table: int) -> Tensor:
        sizes = self.lengths.view(len(self.tables), -1).sum(1).tolist()
        return self.ids.split(sizes)[self.tables.index(table)]

    def loss_by_torch(self, leaves: list[Tensor], poolings: list[str], scale: Tensor | None) -> Tensor:
        lengths = self.lengths.view(len(self.tables), -1)
        scales = [None] * len(self.tables) if scale is None else scale.split(lengths.sum(1).tolist())
        parts = [
            functional.embedding_bag(
                self.ids_of(table), leaves[table], own.cumsum(0) - own, mode=poolings[table], per_sample_weights=weights
            )
            for table, own, weights in zip(self.tables, lengths, scales, strict=True)
        ]
        return (torch.cat(parts, 1) * self.factor).sum()

    def loss(self, store: tierstore.Store, scale: Tensor | None) -> Tensor:
        names = [f"t{table}" for table in self.tables]
        if len(names) == 1:
            bag = tierstore.TieredEmbeddingBag(store[names[0]], include_last_offset=True)
            return (bag(self.ids, functional.pad(self.lengths.cumsum(0), (1, 0)), scale) * self.factor).sum()
        features = tierstore.KeyedJaggedTensor(names, self.ids, scale, self.lengths)
        pooled = tierstore.TieredEmbeddingBagCollection(store, tables=names)(features).values()
        return (pooled * self.factor).sum()


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[list[Call]]]:
    """Each table's pooling, and the calls of each pass."""
    poolings = [draw(st.sampled_from(["sum", "sum", "mean", "max"])) for _ in range(3)]
    passes: list[list[Call]] = []
    for _ in range(draw(st.integers(1, 2))):
        passes.append([])
        for _ in range(draw(st.integers(1, 4))):
            tables = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
            weighted = draw(st.booleans()) and all(poolings[table] == "sum" for table in tables)
            passes[-1].append(Call(tables, draw(st.integers(1, 40)), weighted, draw(st.integers(0, 2**20))))
    return poolings, passes


@settings(max_examples=settings.default.max_examples // 6)
@given(
    graph=graphs(), rule=st.sampled_from(RULES), backwards=st.booleans(),
    way=st.sampled_from(["fused", "deferred", "merged"]),
)  # fmt: skip
def test_any_graph(graph: tuple[list[str], list[list[Call]]], rule: optim.Optimizer, backwards: bool, way: str) -> None:
    """By the fused update, and by a step of the store's optimizer, of gradients that were read or not."""
    poolings, passes = graph
    ways = ["fused", way, way, way]
    ended = [train(poolings, passes, rule, backwards, *each) for each in zip(SETTINGS, ways, strict=True)]
    for setting, bits in zip(SETTINGS[1:], ended[1:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(bits, ended[0], strict=True)), setting
    for one, other in zip(ended[0], by_torch(poolings, passes, rule), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def scales_of(calls: list[Call]) -> list[Tensor | None]:
    return [None if call.scale is None else call.scale.clone().requires_grad_() for call in calls]


def train(
    poolings: list[str], passes: list[list[Call]], rule: Any, backwards: bool, setting: Any, way: str
) -> list[Tensor]:
    ended: list[Tensor] = []
    with tempfile.TemporaryDirectory() as directory, tierstore.open(directory, **setting) as store:
        for number, pooling in enumerate([*poolings, "sum"]):
            store.create_table(
                tierstore.TableConfig(
                    name=f"t{number}", num_embeddings=ROWS if number < 3 else OTHERS, embedding_dim=DIM,
                    pooling=pooling, optimizer=rule, init=tierstore.init.Uniform(-1, 1, seed=number),  # type: ignore[arg-type]
                )
            )  # fmt: skip
        optimizer = None if way == "fused" else store.optimizer()
        for calls in passes:
            scales = scales_of(calls)
            losses = [call.loss(store, scale) for call, scale in zip(calls, scales, strict=True)]
            # Autograd's order of nodes is that of these; the bits are not to follow it.
            torch.autograd.backward(losses[::-1] if backwards else losses)
            ended += [scale.grad for scale in scales if scale is not None and scale.grad is not None]
            if optimizer is not None:
                if way == "merged":
                    assert any(each["params"][0].grad is not None for each in optimizer.param_groups)
                optimizer.step()
                optimizer.zero_grad()
            assert not store["t0"].pool.in_use
        ended += [store[f"t{number}"].read(torch.arange(ROWS)) for number in range(3)]
    return ended


def by_torch(poolings: list[str], passes: list[list[Call]], rule: optim.Optimizer) -> list[Tensor]:
    ended: list[Tensor] = []
    tables = [DenseTable(first_values(number), rule) for number in range(3)]
    for calls in passes:
        scales = scales_of(calls)
        leaves = [table.weights.clone().requires_grad_() for table in tables]
        losses = [call.loss_by_torch(leaves, poolings, scale) for call, scale in zip(calls, scales, strict=True)]
        torch.autograd.backward(losses)
        ended += [scale.grad for scale in scales if scale is not None and scale.grad is not None]
        for number, (table, leaf) in enumerate(zip(tables, leaves, strict=True)):
            ids = [call.ids_of(number) for call in calls if number in call.tables]
            if ids:
                table.apply(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, torch.cat(ids))
    return [*ended, *(table.weights for table in tables)]


def first_values(number: int) -> Tensor:
    rows = torch.empty(ROWS, DIM)
    tierstore.init.Uniform(-1, 1, seed=number).fill(
        (torch.arange(ROWS) | number << 40).numpy(), torch.arange(ROWS, dtype=torch.int32).numpy(), rows.numpy(), DIM, 0
    )
    return rows
