"""A store with rows in device memory is a store without, bit by bit: whatever is asked of it, and whatever fails."""

import threading
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
    simple,
    step,
)
from tierstore.errors import BudgetError, TableError
from tierstore.exchange.rows import write_rows
from tierstore.hbm import rows_twin

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
