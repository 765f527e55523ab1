"""Training steps in CUDA graphs: to the bits of steps without, on a GPU and on one that ``capturing`` emulates."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.hbm import capturing, stores
from tests.hbm.capturing import Cuda, Device
from tests.hbm.stores import ALL, ENOUGH, ROWS, bits, config, open_store, simple
from tierstore import optim
from tierstore.errors import TableError
from tierstore.store import arguments

NAMES = ["a", "b", "c"]
SAMPLES, COUNT = 7, 60
RULES = [optim.SGD(lr=0.1, weight_decay=0.01), optim.RowWiseAdagrad(lr=0.1), optim.Adagrad(lr=0.1)]
CLOSED = "a CUDA graph (until the store is closed)"


BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device | Cuda:
    return Cuda() if getattr(request, "param", "cpu") == "cuda" else capturing.install(monkeypatch)


class Model:
    """A collection and a dense layer, whose batch is in tensors that stay where they are."""

    def __init__(self, store: tierstore.Store, *, scaled: bool, with_optimizer: bool = False) -> None:
        self.embeddings = tierstore.TieredEmbeddingBagCollection(store)
        where = {"device": store.device}
        self.dense = nn.Parameter(torch.linspace(-1, 1, 4 * len(NAMES), **where))
        self.ids, self.offsets = torch.zeros((2, COUNT), dtype=torch.int64, **where)
        self.offsets = self.offsets[: len(NAMES) * SAMPLES + 1]
        self.scale = torch.ones(COUNT, **where) if scaled else None
        self.out = torch.zeros(SAMPLES, 4 * len(NAMES), **where)
        self._optimizers: list[Any] = [torch.optim.SGD([self.dense], lr=0.1)]
        if with_optimizer:
            self._optimizers.append(store.optimizer())

    def take(self, order: np.random.Generator) -> None:
        """Copy the next batch in."""
        self.ids.copy_(torch.from_numpy((order.random(COUNT) ** 2 * ROWS).astype(np.int64)))
        cuts = np.sort(order.integers(0, COUNT + 1, len(NAMES) * SAMPLES - 1))
        self.offsets.copy_(torch.from_numpy(np.array([0, *cuts, COUNT])))
        if self.scale is not None:
            self.scale.copy_(torch.from_numpy(order.random(COUNT, np.float32)))

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        batch = tierstore.KeyedJaggedTensor(NAMES, self.ids, self.scale, offsets=self.offsets)
        pooled = self.embeddings(batch).values()
        self.out.copy_(pooled.detach())
        (self.dense * pooled).tanh().sum().backward()
        for optimizer in self._optimizers:
            optimizer.step()


def train(
    directory: Path, device: Device | Cuda, rule: Any, pooling: Any, *, captured: bool, with_optimizer: bool = False
) -> list[Any]:
    """What training of several batches shows, while it lasts and in the store that it leaves."""
    tables = [config(name, optimizer=rule, pooling=pooling, init=tierstore.init.Uniform(-1, 1)) for name in NAMES]
    order, shown = np.random.default_rng(3), []
    with open_store(directory, *tables, hbm=ENOUGH, device=device.name) as store:
        model = Model(store, scaled=pooling == "sum", with_optimizer=with_optimizer)

        def look() -> list[Any]:
            device.synchronize()
            rows = [bits(store[name].read(ALL)) for name in NAMES]
            return [rows, bits(model.out), bits(model.dense), [store[name].state for name in NAMES],
                    [store[name].num_changes for name in NAMES], store.changed_tables]  # fmt: skip

        model.take(order)
        model.step()
        before, step = look(), model.step
        if captured:
            with device.capture() as graph:
                model.step()
            assert look() == before
            rows = stores.hot(store, "a")
            rows._features.clear()
            rows._rules.clear()
            gc.collect()
            step = graph.replay
        else:
            look()
        for number in range(6):
            model.take(order)
            step()
            device.synchronize() if number % 2 else None  # else the next batch is copied in behind the replay
            shown.append(look())
            if number == 2:
                store.commit()
                model.step()  # without a graph
        model.take(order)
        step()
        hbm = store.stats().hbm
        shown.append((hbm.lookups, hbm.hits))
        store.commit()
    with tierstore.open(directory, mode="r", ddr="2MiB") as store:
        return [*shown, [(bits(store[name].read(ALL)), store[name].state) for name in NAMES]]


@BOTH
@pytest.mark.parametrize(("rule", "pooling"), list(zip(RULES, ["sum", "mean", "max"], strict=True)), ids=str)
def test_replays_are_steps_to_the_bit(tmp_path: Path, device: Device | Cuda, rule: Any, pooling: str) -> None:
    expected = train(tmp_path / "eager", device, rule, pooling, captured=False)
    assert train(tmp_path / "captured", device, rule, pooling, captured=True) == expected


class Bag:
    """One table whose rows count down by one with each batch that has them, trained by a graph."""

    def __init__(self, store: tierstore.Store, device: Device | Cuda, *, ids: int = 3) -> None:
        self._bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum", include_last_offset=True)
        self.ids, self.offsets = torch.arange(ids, device=store.device), torch.tensor([0, ids], device=store.device)
        self.step()
        with device.capture() as graph:
            self.step()
        self._device, self._graph = device, graph

    def step(self) -> None:
        self._bag(self.ids, self.offsets).sum().backward()

    def replay(self, *ids: int) -> None:
        self._device.synchronize()
        self.ids.copy_(torch.tensor(ids))
        self._graph.replay()


def values(store: tierstore.Store, count: int) -> list[float]:
    return store["t"].read(ALL)[:count, 0].tolist()


LOOKS: dict[str, Callable[[tierstore.Store, Bag], Any]] = {
    "commit": lambda store, bag: store.commit(),
    "flush": lambda store, bag: store["t"].pool.flush(),
    "whoever asks": lambda store, bag: stores.hot(store).look(),
    "the next step, once it is known": lambda store, bag: (bag._device.synchronize(), bag.step()),
}


@BOTH
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("who", LOOKS)
def test_a_wrong_batch_stops_replays_until_the_host_has_looked(
    store_dir: Path, device: Device | Cuda, who: str, is_last: bool
) -> None:
    with open_store(store_dir, hbm=ENOUGH, device=device.name) as store:
        bag = Bag(store, device)
        bag.replay(3, 4, 5)
        bag.replay(6, ROWS, 7)
        if not is_last:
            bag.replay(6, 7, 8)
        with pytest.raises(ValueError, match=rf"id {ROWS} is not a row of table 't'") as caught:
            LOOKS[who](store, bag)
        assert "replayed after it" in caught.value.__notes__[0]
        assert values(store, 9) == [-1] * 6 + [0] * 3
        assert store["t"].state.step == 2
        store.commit()
        bag.replay(6, 7, 8)
        store.commit()
        assert store["t"].state.step == 3
    assert stores.shown(store_dir)[:10, 0].tolist() == [-1] * 9 + [0]


@BOTH
def test_closing_tells_of_a_wrong_batch_and_of_rows_that_were_not_committed(
    store_dir: Path, device: Device | Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(store_dir, hbm=ENOUGH, device=device.name)
    bag = Bag(store, device)
    store.commit()
    bag.replay(3, 4, 5)
    bag.replay(3, -1, 5)
    with pytest.raises(ValueError, match="id -1 is not a row"):
        store.close()
    assert "changes of 1 table since the last commit are dropped" in caplog.text
    assert stores.shown(store_dir)[:4, 0].tolist() == [-1, -1, -1, 0]


def test_flush_and_closing_wait_for_replays(store_dir: Path, device: Device) -> None:
    store = open_store(store_dir, hbm=ENOUGH)
    bag = Bag(store, device)
    bag.replay(3, 4, 5)
    assert stores.hot(store).num_dirty == 6
    bag.replay(3, 4, 5)
    store["t"].pool.flush()
    assert not device.pending
    bag.replay(6, 7, 8)
    store.__exit__(ZeroDivisionError)
    assert not device.pending


def test_what_would_change_addresses_or_rows_is_refused(store_dir: Path, device: Device) -> None:
    with open_store(store_dir, hbm=ENOUGH) as store:
        bag = Bag(store, device)
        version = store.commit()
        with pytest.raises(TableError) as caught:
            store.create_table(config("late"))
        assert CLOSED in str(caught.value)
        for change in (lambda: store.rollback(version), lambda: store["t"].pool.tier.emptied().__enter__()):
            with pytest.raises(TableError, match="CUDA graph"):
                change()
        store["t"].learning_rate = 1.0
        with pytest.raises(RuntimeError, match=r"cannot become 0\.5: commit, close"):
            store["t"].learning_rate = 0.5
        bag.replay(0, 1, 2)
        store.commit()
    assert stores.shown(store_dir)[:4, 0].tolist() == [-2, -2, -2, 0]


def refuse(device: Device, match: str, work: Callable[[], Any]) -> None:
    with device.capture(), pytest.raises(RuntimeError, match=match):
        work()


def test_what_no_graph_can_have(store_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = config("adam", optimizer=optim.Adam())
    with open_store(store_dir, simple(), adam, hbm=ENOUGH) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        other = tierstore.TieredEmbeddingBag(store["adam"], mode="sum")
        offsets = torch.tensor([0])

        def step(one: Any = bag, scale: Tensor | None = None) -> None:
            one(ALL[:3], offsets, scale).sum().backward()

        for _ in range(2):
            refuse(device, "rows must be in device memory before", step)
            assert store["t"].pool  # made, and empty
        step()
        step(other)
        refuse(device, "adam, which goes by the step's number, does not train table 'adam'", lambda: step(other))
        refuse(device, "per-sample weights get no gradient", lambda: step(scale=torch.ones(3, requires_grad=True)))
        step()
        refuse(device, "host reads no ids", lambda: (bag(ALL[:3], offsets) + bag(ALL[:3], offsets)).sum().backward())
        refuse(device, "rows are not committed", store["t"].pool.flush)
        refuse(device, "nothing is sent from the host", lambda: store["t"].read(ALL[:3]))
        refuse(device, "no more lookups of the same features fit", lambda: [step() for _ in range(9)])
        step()
        out = bag(ALL[:3], offsets)
        refuse(device, "nor the other way round", lambda: out.sum().backward())
        with device.capture():
            out = bag(ALL[:3], offsets)
        with pytest.raises(RuntimeError, match="nor the other way round"):
            out.sum().backward()
        assert store["t"].state.step == 3
        monkeypatch.setattr(arguments, "is_there", lambda *_: False)
        refuse(device, "ids must be on the store's device", step)


def test_dynamic_ids_come_from_the_device_and_are_refused_in_a_graph(
    store_dir: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_dir, simple(ids=tierstore.DynamicIds()), hbm=ENOUGH) as store:
        table, offsets = store["t"], torch.tensor([0, 2])
        bag = tierstore.TieredEmbeddingBag(table, mode="sum", include_last_offset=True)

        def step(*ids: int) -> None:
            bag(torch.tensor(ids), offsets).sum().backward()

        step(-5, 7)
        step(-5, 8)
        assert table.read(torch.tensor([-5, 7, 8, 9]))[:, 0].tolist() == [-2, -1, -1, 0]
        refuse(device, "none of them dynamic", lambda: step(7, 9))
        monkeypatch.setattr(arguments, "is_there", lambda *_: False)
        for use in (lambda: step(7, 9), lambda: table.admit(torch.tensor([9])), lambda: table.read(torch.tensor([7]))):
            refuse(device, "its ids are dynamic", use)
        assert (table.id_stats().rows, table.state.step) == (3, 2)
