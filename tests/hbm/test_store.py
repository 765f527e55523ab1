"""A store with rows in device memory is a store without, bit by bit: whatever is asked of it, and whatever fails."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.gate import Gate
from tests.hbm.stores import ALL, LEAST, ROWS, config, hot, open_store, put, shown, simple, step
from tierstore.errors import BudgetError, PartlyTrainedError, TableError
from tierstore.exchange.rows import write_rows
from tierstore.hbm import rows_twin
from tierstore.hbm.cache import HbmCache
from tierstore.hbm.overflow import Overflow

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
    """The update stops in the middle of the rows; who reads, pools or flushes them then waits."""
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
            threading.Thread(target=hot(store).flush),
        ]
        for reader in readers:
            reader.start()
        readers[0].join(0.2)
        go_on.set()
        for thread in (trainer, *readers):
            thread.join(30)
        assert len(seen) == 2
        assert hot(store).num_dirty == 0
        for each in seen:
            assert (each == -1).all()


class OutOfMemory(Exception):
    pass


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``broken(owner, name, first)``: works for ``first`` calls, fails once, then works."""

    def install(owner: Any, name: str, first: int = 0, *, after: bool = False) -> None:
        real = getattr(owner, name)
        calls = iter(range(1000))

        def call(*arguments: Any, **named: Any) -> Any:
            fails = next(calls) == first
            if fails and not after:
                raise OutOfMemory
            found = real(*arguments, **named)
            if fails:
                raise OutOfMemory
            return found

        monkeypatch.setattr(owner, name, call)

    return install


@pytest.fixture
def store(store_dir: Path) -> Iterator[tierstore.Store]:
    with open_store(store_dir, simple()) as opened:
        yield opened


def reopened(store: tierstore.Store) -> torch.Tensor:
    store.close()
    with tierstore.open(store.directory, mode="r", ddr="2MiB") as reader:
        return reader["t"].read(ALL)


def test_what_changed_is_not_forgotten_where_unpinning_fails(store: tierstore.Store, broken: Any) -> None:
    store["t"].write(ALL[:10], torch.full((10, 4), 7.0))
    broken(HbmCache, "release")
    with pytest.raises(OutOfMemory):
        store.commit()
    store.commit()
    assert not store["t"].pool.in_use
    assert (reopened(store)[:10] == 7).all()


def test_rows_of_a_failed_update_are_newer_than_those_below(store: tierstore.Store, broken: Any) -> None:
    bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
    out = bag(ALL[:20].view(4, 5))
    broken(rows_twin, "update_rows", after=True)
    with pytest.raises(PartlyTrainedError, match="OutOfMemory") as failed:
        out.sum().backward()
    assert isinstance(failed.value.__cause__, OutOfMemory)
    assert not store["t"].pool.in_use
    live = store["t"].read(ALL)
    assert (live[:20] == -1).all()
    with hot(store).emptied():
        pass
    assert torch.equal(store["t"].read(ALL), live)


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(HbmCache, "plan", True), (HbmCache, "commit", False), (HbmCache, "settle", True), (Overflow, "touch", False)],
)
def test_no_row_is_there_that_was_not_brought_in(
    store: tierstore.Store, broken: Any, owner: type, name: str, after: bool
) -> None:
    table = store["t"]
    table.write(ALL, torch.arange(600.0)[:, None].expand(-1, 4))
    with hot(store).emptied():
        pass
    broken(owner, name, after=after)
    with pytest.raises(OutOfMemory):
        table.read(ALL[50:60])
    hot(store).check_integrity()
    assert torch.equal(table.read(ALL)[:, 0], torch.arange(600.0))
    assert not table.pool.in_use


# Versions


@pytest.mark.parametrize("point", ["write-back: segments put", "commit: frozen rows written"])
def test_a_version_shows_what_was_there_when_it_was_asked_for(store_dir: Path, gate: Gate, point: str) -> None:
    """Rows change, go down into host memory and are read again while the writer of the version stands still."""
    with open_store(store_dir, keep=3) as store:
        put(store, ALL, 1.0)
        assert store.commit() == 1
        put(store, ALL[:300], 2.0)
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        out = bag(ALL[:10], torch.tensor([0]))
        gate.close(point)
        pending = store.commit_async()
        assert gate.reached.wait(60)
        out.sum().backward()
        put(store, ALL[295:305], 4.0)  # with those above, fewer than the outbox holds
        store["t"].read(ALL[400:])
        expected = torch.tensor([1.0] * 10 + [2.0] * 285 + [4.0] * 10 + [1.0] * 295)
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        gate.open()
        assert pending.result(60) == 2
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        store.commit()
    assert (shown(store_dir, 1) == 1.0).all()
    assert torch.equal(shown(store_dir, 2)[:, 0], torch.tensor([2.0] * 300 + [1.0] * 300))
    assert torch.equal(shown(store_dir)[:, 0], expected)


# Whole tables in and out


# Trouble
