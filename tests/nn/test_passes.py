"""A backward pass updates each table once, by gradients of the rows that forward read, and only if it was asked to."""

import contextlib
import functools
import gc
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tierstore
from tierstore import optim

ROWS, DIM = 2000, 8
ALL = torch.arange(ROWS)
BUDGETS: list[dict[str, Any]] = [{"ddr": "2MiB"}, {"ddr": "404KiB", "policy": "lru"}, {"ddr": "2MiB", "hbm": "36KiB"}]
"""All rows in memory; about a hundred of them; the same in the tier for device memory."""
IDS = torch.arange(20).view(10, 2)


def config(name: str = "t", **fields: Any) -> tierstore.TableConfig:
    shape = {"num_embeddings": ROWS, "embedding_dim": DIM, "init": tierstore.init.Uniform(-1, 1)}
    return tierstore.TableConfig(name=name, **{"optimizer": optim.SGD(lr=1.0), **shape, **fields})  # type: ignore[arg-type]


@pytest.fixture(params=BUDGETS, ids=str)
def store(request: pytest.FixtureRequest, store_dir: Path) -> Iterator[tierstore.Store]:
    with tierstore.open(store_dir, **request.param) as store:
        yield store
        gc.collect()
        assert not any(table.pool.in_use for table in store.tables.values())


@pytest.fixture
def bag(store: tierstore.Store) -> tierstore.TieredEmbeddingBag:
    return tierstore.TieredEmbeddingBag(store.create_table(config()))


def test_lookups_are_merged_in_the_order_of_their_forwards(store):
    table = store.create_table(config(init=tierstore.init.Constant(0.0)))
    bag = tierstore.TieredEmbeddingBag(table)
    outs = [bag(IDS).sum() * factor for factor in (1.0, 1e8, -1e8)]  # backwards, the sum is 1
    (outs[2] + outs[0] + outs[1]).backward()
    assert not table.read(ALL).any()


def test_every_pass_over_a_kept_graph_is_an_update(bag):
    table = bag.table
    before = table.read(ALL[:20])
    out = (bag(IDS) + bag(IDS)).sum()
    out.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    out.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(table.read(ALL[:20]), before - 2 - 2)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()  # type: ignore[no-untyped-call]
    assert table.state.step == 2


@pytest.mark.parametrize("rule", [optim.SGD(lr=0.5), optim.Adagrad(lr=1.0)], ids=lambda rule: rule.kind)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "nested"])
def test_checkpoints_train_as_without(store_dir, way, rule):
    plain, ended = functools.partial(checkpoint, use_reentrant=way != "not reentrant"), []
    inside = plain if way == "nested" else lambda part, x: part(x)
    for run in (lambda part, x: part(x), lambda part, x: plain(lambda x: inside(part, x), x)):
        with tierstore.open(store_dir / str(len(ended)), ddr="404KiB", policy="lru") as store:
            table = store.create_table(config(optimizer=rule))
            bag = tierstore.TieredEmbeddingBag(table)
            for is_whole in (False, True, True):
                x = torch.linspace(1, 2, DIM, requires_grad=True)
                y = run(lambda x, bag=bag: torch.sin(x * bag(IDS)), x)
                out = run(lambda y, bag=bag: (y * bag(IDS + 5)).sum(), y if is_whole else fails(y)) + bag(IDS).sum()
                with contextlib.nullcontext() if is_whole else pytest.raises(ArithmeticError):
                    out.backward()
            ended.append(torch.cat([table.read(ALL), x.grad[None]]))
            assert table.state.step == 2
            del y, out
            gc.collect()
            assert not table.pool.in_use
    # A reentrant checkpoint's forwards count when they are repeated, so sums have another order.
    close = 0 if way == "not reentrant" else 1e-4
    torch.testing.assert_close(*ended, rtol=close, atol=close)


class Do(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return grad, None


def fails(x: Tensor) -> Tensor:
    def fail() -> None:
        raise ArithmeticError

    out: Tensor = Do.apply(x, fail)  # type: ignore[no-untyped-call]
    return out


def test_passes_in_threads_are_apart(bag):
    """Each waits, in the middle of its pass, for the others to be there too."""
    together = threading.Barrier(3)
    table = bag.table
    before = table.read(ALL)

    def step(first: int) -> None:
        ids = IDS[:2] + first
        (Do.apply(bag(ids), lambda: together.wait(60)) + 2 * bag(ids)).sum().backward()  # type: ignore[no-untyped-call]

    threads = [threading.Thread(target=step, args=(100 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = before.clone()
    for number in range(3):
        expected[100 * number : 100 * number + 4] -= 3
    assert torch.equal(table.read(ALL), expected)
    assert table.state.step == 3


def test_gradients_are_as_they_were_though_others_change_them(store):
    """Addition hands one gradient to both; its other owner may empty it before the pass ends."""
    table = store.create_table(config())
    before = table.read(ALL[:20])
    parameter = torch.nn.Parameter(torch.zeros(len(IDS), DIM))

    def empty(parameter: Tensor) -> None:
        parameter.grad.zero_()

    parameter.register_post_accumulate_grad_hook(empty)
    out = tierstore.TieredEmbeddingBag(table)(IDS)
    (parameter + out).backward(torch.ones(len(IDS), DIM))
    assert torch.equal(table.read(ALL[:20]), before - 1)


def test_rows_nobody_asked_to_train_stay(bag):
    table = bag.table
    before = table.read(ALL)
    scale, factor = torch.ones(IDS.shape, requires_grad=True), torch.ones(DIM, requires_grad=True)
    (grad,) = torch.autograd.grad(bag(IDS, None, scale).sum(), [scale])
    assert grad.any()
    (bag(IDS, None, scale) * factor).sum().backward(inputs=[factor, scale])
    assert scale.grad is not None
    torch.autograd.grad((bag(IDS, None, scale) * factor).sum(), [factor])  # no node of the lookup runs
    parameters = [*bag.parameters(), factor]
    gradients = torch.autograd.grad((bag(IDS) * factor).sum(), parameters)
    assert [each.shape for each in gradients] == [each.shape for each in parameters]
    assert bag.rows.grad is None
    made = torch.autograd.functional.jacobian(lambda scale: bag(IDS, None, scale).sum(1), scale.detach())
    assert made.shape == (len(IDS), *IDS.shape)
    assert made.any()
    assert torch.equal(table.read(ALL), before)
    assert table.state.step == 0
    bag(IDS, None, scale).sum().backward()
    assert torch.equal(table.read(ALL[:20]), before[:20] - 1)


def test_a_pass_that_fails_leaves_nothing_behind(bag):
    table = bag.table
    before = table.read(ALL)
    failing = fails(torch.ones(1, requires_grad=True))
    kept = bag(IDS)
    with pytest.raises(ArithmeticError):  # nodes run newest first
        (failing + kept.sum() + bag(IDS).sum()).backward(retain_graph=True)
    assert torch.equal(table.read(ALL), before)
    (bag(IDS + 40) + kept).sum().backward()
    before[:20] -= 1
    before[40:60] -= 1
    assert torch.equal(table.read(ALL), before)
    assert table.state.step == 1


def test_compiled_autograd_is_refused(store_dir):
    with tierstore.open(store_dir, ddr="2MiB") as store:
        bag = tierstore.TieredEmbeddingBag(store.create_table(config()))
        with (
            compiled_autograd._enable(lambda graph: graph),
            pytest.raises(RuntimeError, match="compiled_autograd = False"),
        ):
            bag(IDS).sum().backward()


CHANGES: dict[str, Any] = {
    "write": lambda bag: bag.table.write(ALL[:20], torch.full((20, DIM), 50.0)),
    "train": lambda bag: bag(IDS).sum().backward(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_changed_between_forward_and_backward(store, change):
    """As in torch: an error where the gradient needs them, no error where it does not."""
    table = store.create_table(config())
    other = store.create_table(config("other"))
    bag = tierstore.TieredEmbeddingBag(table)
    scale = torch.ones(IDS.shape, requires_grad=True)
    out, plain, weighted = bag(IDS, None, scale), bag(IDS), bag(IDS, None, torch.full(IDS.shape, 2.0))
    untouched = tierstore.TieredEmbeddingBag(other)(IDS, None, scale)
    CHANGES[change](bag)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: rows of table 't'"):
        out.sum().backward()
    assert scale.grad is None
    before = table.read(ALL[:20])
    (plain + weighted + untouched).sum().backward()
    assert torch.equal(table.read(ALL[:20]), before - 1 - 2)
    assert scale.grad is not None


@pytest.mark.parametrize(
    ("aliased", "names", "ids_type"),
    [(True, ["t", "other"], torch.int32), (True, ["other", "t"], torch.int64), (False, ["other", "t"], torch.int32)],
)
def test_buffers_may_be_used_anew_after_forward(store, aliased, names, ids_type):
    """Gradients go to the rows that forward read, whatever becomes of ids, offsets and weights."""
    table = store.create_table(config())
    store.create_table(config("other"))
    collection = tierstore.TieredEmbeddingBagCollection(store)
    before = table.read(ALL)
    for first in (0, 500):  # the second time all rows are in
        ids = (torch.arange(40) + first).to(ids_type)
        offsets, weights = torch.arange(0, 41, 2), torch.full((40,), 3.0)
        features = tierstore.KeyedJaggedTensor(names, ids, weights, offsets=offsets)
        collection.forward(features).values().sum().backward()
        out = collection(features)["t"]
        if aliased:
            ids.numpy()[:], offsets.numpy()[:], weights.numpy()[:] = 7, 40, 0
        else:
            ids.fill_(7)
            offsets.fill_(40)
            weights.fill_(0)
        out.sum().backward()
        own = first + 20 * names.index("t")
        before[own : own + 20] = before[own : own + 20] - 3 - 3
        assert torch.equal(table.read(ALL), before)


@pytest.mark.parametrize("part", ["ids", "offsets", "weights"])
def test_a_prefetched_batch_is_looked_up_as_it_was_read(store, part):
    bag = tierstore.TieredEmbeddingBag(store.create_table(config()))
    ids, offsets, weights = torch.arange(4), torch.tensor([0, 2]), torch.tensor([1.0, 2.0, 4.0, 3.0])
    (batch,) = batches = [(ids, offsets, weights)]
    expected = bag(*batch)
    for _ in tierstore.prefetch(batches, bag, depth=1, features=lambda batch: batch):
        {"ids": ids, "offsets": offsets, "weights": weights}[part].numpy()[1] = 3
        assert torch.equal(bag(*batch), expected)
    assert not torch.equal(bag(*batch), expected)


FEW, WIDTH = 300, 4
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


STATE_NAMES = {optim.SGD: (), optim.Adagrad: ("sum",), optim.Adam: ("exp_avg", "exp_avg_sq")}


class DenseTable:
    """float32 weights and state of one table, by torch's own optimizers; only rows that a batch has are updated."""

    def __init__(self, weights: Tensor, optimizer: optim.Optimizer) -> None:
        self.weights = weights.clone()
        self.optimizer = optimizer
        self.step_count = 0
        rows = len(weights)
        self.accumulator = torch.full((rows,), optimizer.initial_state)
        self.state = {
            name: torch.full_like(weights, optimizer.initial_state) for name in STATE_NAMES.get(type(optimizer), ())
        }

    def apply(self, gradient: Tensor, ids: Tensor) -> None:
        self.step_count += 1
        touched = ids.unique()
        if isinstance(self.optimizer, optim.RowWiseAdagrad) and not isinstance(self.optimizer, optim.Adagrad):
            self._rowwise_adagrad(touched, gradient[touched])
        else:
            self._torch_step(touched, gradient[touched])

    def _rowwise_adagrad(self, touched: Tensor, gradient: Tensor) -> None:
        rule: Any = self.optimizer
        decay = rule.weight_decay * self.weights[touched]
        gradient = gradient if rule.decoupled else gradient + decay
        self.accumulator[touched] += gradient.double().pow(2).mean(1).float()
        root = self.accumulator[touched].sqrt() + rule.eps
        self.weights[touched] -= rule.lr * (gradient / root[:, None] + (decay if rule.decoupled else 0))

    def _torch_step(self, touched: Tensor, gradient: Tensor) -> None:
        rule: Any = self.optimizer
        parameter = torch.nn.Parameter(self.weights[touched].clone())
        parameter.grad = gradient.clone()
        torch_optimizer = self._torch_optimizer(rule, [parameter])
        for name, values in self.state.items():
            torch_optimizer.state[parameter][name] = values[touched].clone()
        if self.state:
            torch_optimizer.state[parameter]["step"] = torch.tensor(float(self.step_count - 1))
        torch_optimizer.step()
        self.weights[touched] = parameter.detach()
        for name, values in self.state.items():
            values[touched] = torch_optimizer.state[parameter][name]

    @staticmethod
    def _torch_optimizer(rule: Any, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        common = {"lr": rule.lr, "weight_decay": rule.weight_decay}
        if isinstance(rule, optim.Adam):
            kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
            return kind(parameters, betas=rule.betas, eps=rule.eps, **common)
        if isinstance(rule, optim.Adagrad):
            return torch.optim.Adagrad(
                parameters, eps=rule.eps, initial_accumulator_value=rule.initial_accumulator_value, **common
            )
        return torch.optim.SGD(parameters, **common)


class Call:
    """Of a batch over some tables: ids and offsets of each, maybe weights, and what makes a loss of the result."""

    def __init__(self, tables: list[int], batch: int, weighted: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables = tables
        self.lengths = torch.randint(0, 4, (len(tables) * batch,), generator=generator)
        self.ids = (torch.rand(int(self.lengths.sum()), generator=generator) ** 3 * FEW).long()
        self.scale = torch.rand(len(self.ids), generator=generator) if weighted else None
        self.factor = torch.randn(batch, WIDTH * len(tables), generator=generator)

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
def test_any_graph(graph, rule, backwards, way):
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
                    name=f"t{number}", num_embeddings=FEW if number < 3 else OTHERS, embedding_dim=WIDTH,
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
        ended += [store[f"t{number}"].read(torch.arange(FEW)) for number in range(3)]
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
    rows = torch.empty(FEW, WIDTH)
    tierstore.init.Uniform(-1, 1, seed=number).fill(
        (torch.arange(FEW) | number << 40).numpy(), torch.arange(FEW, dtype=torch.int32).numpy(), rows.numpy(), WIDTH, 0
    )
    return rows
