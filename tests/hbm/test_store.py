"""A store with rows in device memory is a store without, bit by bit: whatever is asked of it, and whatever fails."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.hbm.stores import ALL, hot, open_store, simple, step
from tierstore.errors import PartlyTrainedError
from tierstore.hbm import twin
from tierstore.hbm.cache import HbmCache, Overflow

# Threads


def test_no_reader_sees_half_an_update(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update stops in the middle of the rows; who reads, pools or flushes them then waits."""
    inside, go_on = threading.Event(), threading.Event()
    real = twin.update_rows

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
        monkeypatch.setattr(twin, "update_rows", halting)
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
    broken(twin, "update_rows", after=True)
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
    [(HbmCache, "plan", True), (HbmCache, "commit", False), (HbmCache, "settle", True), (Overflow, "use", False)],
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
