"""Work that fails half way on the device, as for want of memory: nothing is lost, and no row is there that is not."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.hbm.stores import ALL, hot, open_store, simple
from tierstore.errors import PartlyTrainedError
from tierstore.hbm import rows_twin
from tierstore.hbm.cache import HbmCache
from tierstore.hbm.overflow import Overflow


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


def test_a_failed_update_is_rolled_back(store: tierstore.Store, broken: Any) -> None:
    store["t"].write(ALL, torch.full((600, 4), 7.0))
    store.commit()
    bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
    out = bag(ALL[:20].view(4, 5))
    broken(rows_twin, "update_rows", after=True)
    with pytest.raises(PartlyTrainedError, match="OutOfMemory"):
        out.sum().backward()
    with pytest.raises(PartlyTrainedError, match="OutOfMemory"):
        store.commit()
    store.rollback(1)
    assert (store["t"].read(ALL) == 7).all()
    bag(ALL[:20].view(4, 5)).sum().backward()
    live = store["t"].read(ALL)
    assert (live[:20] == 6).all()
    assert (live[20:] == 7).all()
    store.commit()
    assert not store["t"].pool.in_use
    assert torch.equal(reopened(store), live)


@pytest.mark.parametrize(("name", "after"), [("plan", True), ("commit", False), ("settle", False), ("settle", True)])
def test_no_row_is_there_that_was_not_brought_in(store: tierstore.Store, broken: Any, name: str, after: bool) -> None:
    table = store["t"]
    table.write(ALL, torch.arange(600.0)[:, None].expand(-1, 4))
    with hot(store).emptied():
        pass
    broken(HbmCache, name, after=after)
    with pytest.raises(OutOfMemory):
        table.read(ALL[50:60])
    hot(store).check_integrity()
    assert torch.equal(table.read(ALL)[:, 0], torch.arange(600.0))
    assert not table.pool.in_use


def test_nothing_stays_pinned_where_a_lease_cannot_be_made(store: tierstore.Store, broken: Any) -> None:
    table = store["t"]
    table.write(ALL, torch.arange(600.0)[:, None].expand(-1, 4))
    broken(Overflow, "touch")
    with pytest.raises(OutOfMemory):
        table.read(ALL[50:60])
    hot(store).check_integrity()
    assert not table.pool.in_use
    assert torch.equal(table.read(ALL)[:, 0], torch.arange(600.0))


def test_memory_of_a_pool_goes_with_it(store: tierstore.Store) -> None:
    store["t"].read(ALL)
    old = weakref.ref(hot(store).weights)
    gc.disable()
    try:
        store.create_table(simple(name="other"))
        assert old() is None
    finally:
        gc.enable()


def test_defaults_of_torch_do_not_matter(store_dir: Path) -> None:
    before = torch.get_default_dtype()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with open_store(store_dir, simple()) as store:
            ids = torch.arange(40, device="cpu")
            bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
            out = bag(ids, torch.arange(0, 40, 5, device="cpu"))
            out.sum().backward()
            read = store["t"].read(ids)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    assert out.dtype == read.dtype == torch.float32
    assert (read == -1).all()


def test_rows_that_come_down_are_no_lookups(store: tierstore.Store) -> None:
    store["t"].read(ALL)
    before = store.stats()
    store["t"].write(ALL[:100], torch.zeros(100, 4))
    hot(store).flush()
    after = store.stats()
    came_up = after.hbm.misses - before.hbm.misses
    assert after.ddr.lookups - before.ddr.lookups == came_up
