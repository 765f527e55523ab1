"""A store with rows in device memory is a store without, bit by bit: whatever is asked of it, and whatever fails."""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.hbm.stores import (
    ALL,
    LEAST,
    ROWS,
    config,
    hot,
    open_store,
    put,
    same,
    simple,
    step,
)
from tierstore import optim
from tierstore.errors import BudgetError, ClosedError, TableError
from tierstore.exchange.rows import write_rows
from tierstore.hbm import rows_twin

# The same bits as without


RULES: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(lr=0.1, weight_decay=0.01),
    "rowwise": optim.RowWiseAdagrad(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "adam": optim.Adam(lr=0.1),
}


# Batches under way


def test_dropped_graphs_give_their_pins_back(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        outs = [bag(ALL[first : first + 20], torch.tensor([0])) for first in range(0, 200, 20)]
        assert hot(store).num_leased > 2
        del outs[1:]
        assert hot(store).num_leased == 1
        outs.clear()
        assert hot(store).num_leased == 0
        hot(store).check_integrity()
        assert (store["t"].read(ALL) == 0).all()


def test_tickets_are_forgotten_with_their_pins(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        batches = [torch.arange(first, first + 10).reshape(5, 2) for first in range(0, 200, 10)]
        tickets = [bag.prepare(ids) for ids in batches[:3]]
        assert all(bag.bring_in(ticket) for ticket in tickets)
        assert hot(store).num_leased == 3
        for ticket in tickets:
            bag.forget(ticket)
            bag.forget(ticket)
        assert hot(store).num_leased == 0
        with closing(tierstore.prefetch(batches, bag, depth=4, features=same)) as pipeline:
            bag(next(pipeline)).sum().backward()
            next(pipeline)
        assert hot(store).num_leased == 0
        for ids in tierstore.prefetch(batches, bag, depth=2, features=same):
            ids += 300  # in place: what was made ready is of no use
            bag(ids).sum().backward()
        assert hot(store).num_leased == 0
        expected = torch.zeros(ROWS)
        expected[:10] = expected[300:500] = -1
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)


def test_tables_are_made_between_batches_only(store_dir: Path) -> None:
    with open_store(store_dir) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        put(store, ALL, 5.0)
        out = bag(ALL[:30], torch.tensor([0]))
        for refuse in (lambda: store.create_table(simple(name="u")), lambda: write_rows(store["t"], 0, ones(), None)):
            with pytest.raises(TableError, match="rows are in use by a batch under way"):
                refuse()
        out.sum().backward()
        bag(ALL, torch.arange(0, ROWS, 5))  # in parts: nothing stays pinned
        assert not store["t"].pool.in_use
        with pytest.raises(BudgetError):  # what was just enough for one table
            store.create_table(config(name="u", num_embeddings=10**5, embedding_dim=64)).read(ALL)


@pytest.mark.parametrize("hbm", [LEAST, 2**20])
@pytest.mark.parametrize("call", ["has_room", "stage", "readied"])
def test_a_pool_that_a_new_table_replaced_is_looked_up_again(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, hbm: int, call: str
) -> None:
    with open_store(store_dir, hbm=hbm) as store:
        table = store["t"]
        lookup: Any = table.lookup(table.jagged(ALL[:6], torch.tensor([0, 3, 6]), mode="sum"), mode="sum")
        tier, send, gradient = type(hot(store)), type(hot(store)).send, torch.ones(2, 4)
        replaced = []

        def send_late(rows: Any, *arguments: Any) -> Any:
            if not replaced:
                replaced.append(rows)
                store.create_table(simple(name="u"))
            return send(rows, *arguments)

        monkeypatch.setattr(tier, "send", send_late)
        ready = getattr(lookup, call)(*[gradient] * (call == "readied"))
        assert table.pool.tier is not replaced[0]
        if call == "readied":
            ready.train()
        assert ready
        lookup.release()
        assert not table.pool.in_use
        assert torch.equal(table.read(ALL)[:, 0], -torch.ones(ROWS) * (ALL < 6) * (call == "readied"))


def ones() -> Any:
    return np.ones((5, 4), np.float32)


# Threads


def test_no_reader_sees_half_an_update(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update stops in the middle of the rows; whoever reads or pools them then waits."""
    inside, go_on = threading.Event(), threading.Event()
    real = rows_twin.update_rows

    def halting(*arguments: Any, weights: Tensor, **named: Any) -> None:
        before = weights.clone()
        real(*arguments, weights=weights, **named)
        after = weights.clone()
        weights[:, 2:] = before[:, 2:]
        inside.set()
        assert go_on.wait(30)
        weights.copy_(after)

    with open_store(store_dir, hbm=2**20) as store:
        table = store["t"]
        table.read(ALL)
        monkeypatch.setattr(rows_twin, "update_rows", halting)
        trainer = threading.Thread(target=step, args=(tierstore.TieredEmbeddingBag(table, mode="sum"), ALL[:60]))
        trainer.start()
        assert inside.wait(30)
        offsets = torch.tensor([0, 60])
        seen: list[Tensor] = []
        readers = [
            threading.Thread(target=lambda: seen.append(table.read(ALL[:60]))),
            threading.Thread(target=lambda: seen.append(table.pooled(ALL[:60], offsets) / 60)),
        ]
        for reader in readers:
            reader.start()
        readers[0].join(0.2)
        go_on.set()
        for thread in (trainer, *readers):
            thread.join(30)
        assert len(seen) == 2
        for each in seen:
            assert (each == -1).all()


def test_inference_beside_training(store_dir: Path) -> None:
    with open_store(store_dir, ddr="404KiB", policy="lru") as store:
        table, done = store["t"], threading.Event()
        failures: list[Any] = []
        checked = [0, 0]

        def serve(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            lowest = torch.zeros(ROWS)
            try:
                while not done.is_set():
                    ids = torch.randint(0, ROWS, (50,), generator=generator).unique()
                    each = torch.arange(len(ids) + 1)
                    rows = table.read(ids) if number else table.pooled(ids, each, mode="max")
                    if (rows != rows[:, :1]).any() or (rows[:, 0] > lowest[ids]).any():
                        failures.append(rows)
                    lowest[ids] = rows[:, 0]
                    checked[number] += 1
            except BaseException as error:
                failures.append(error)

        servers = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
        for server in servers:
            server.start()
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        generator = torch.Generator().manual_seed(9)
        expected = torch.zeros(ROWS)
        batches = [torch.randint(0, ROWS, (60, 3), generator=generator) for _ in range(12)]
        for number, ids in enumerate(tierstore.prefetch(batches, bag, depth=2, features=same)):
            bag(ids).sum().backward()
            expected -= torch.bincount(ids.flatten(), minlength=ROWS)
            if number % 4 == 3:
                store.commit()
        done.set()
        for server in servers:
            server.join(60)
        assert not failures, failures[0]
        assert min(checked) > 0
        assert torch.equal(table.read(ALL)[:, 0], expected)
        hot(store).check_integrity()
        assert not table.pool.in_use


def test_closing_the_store_ends_who_waits(store_dir: Path) -> None:
    store = open_store(store_dir)
    pool = hot(store)
    lease = pool.acquire(pool.group(torch.arange(60)), 60)
    others = []
    while (other := pool.acquire(pool.group(torch.tensor([100 + len(others)])), 1)) is not None:
        others.append(other)
    failures: list[type[BaseException]] = []

    def fail(use: Callable[[], Any]) -> None:
        try:
            use()
        except ClosedError as error:
            failures.append(type(error))

    bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
    last = ALL[-1:]
    uses: list[Callable[[], Any]] = [
        lambda: store["t"].read(last), lambda: put(store, last, 1.0), lambda: bag(last, torch.tensor([0]))
    ]  # fmt: skip
    threads = [threading.Thread(target=fail, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    store.close()
    for thread in threads:
        thread.join(30)
    assert failures == [ClosedError] * 3
    del lease, other
    others.clear()
