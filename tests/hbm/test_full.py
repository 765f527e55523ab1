"""Every row in device memory: the bits of host memory, dirty rows that go down, and what is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.hbm import stores
from tests.hbm.stores import ALL, ROWS, open_store, put, shown, step
from tierstore.errors import ClosedError
from tierstore.hbm.base import DeviceRows
from tierstore.hbm.full import FullRows
from tierstore.hbm.lanes import Lane
from tierstore.hbm.staging import Sender, Staging

ENOUGH = 2**20
SHARED = 50
LAST = ROWS - 1


def full(store: tierstore.Store, name: str = "t") -> FullRows:
    found: Any = store[name].pool.tier
    assert isinstance(found, FullRows)
    return found


def test_rows_come_in_once_and_dirty_ones_go_down(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        real = getattr(Staging, name)

        def watched(self: Any, keys: Any, *others: Any) -> None:
            moved.append((name, len(keys)))
            real(self, keys, *others)

        monkeypatch.setattr(Staging, name, watched)

    watch("bring")
    watch("take")
    with open_store(store_dir, hbm=ENOUGH) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        step(bag, ALL[:30])
        step(bag, ALL[20:40])
        put(store, ALL[100:102], 7.0)
        assert sum(count for name, count in moved if name == "bring") == ROWS
        assert full(store).num_dirty == 42
        store.commit()
        assert [each for each in moved if each[0] == "take"] == [("take", 42)]
        store.commit()
        assert sum(name == "take" for name, _ in moved) == 1
        full(store).check_integrity()
    rows = shown(store_dir)[:, 0]
    assert rows[[0, 19, 20, 29, 30, 39, 40, 100, 101, LAST]].tolist() == [-1, -1, -2, -2, -1, -1, 0, 7, 7, 0]


def test_what_could_not_go_down_stays_dirty(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(store_dir, hbm=ENOUGH) as store:
        step(tierstore.TieredEmbeddingBag(store["t"], mode="sum"), ALL[:30])
        hot = full(store)
        put_down = hot._below.put

        def fail(*_: Any) -> None:
            raise OSError("no room")

        monkeypatch.setattr(hot._below, "put", fail)
        with pytest.raises(OSError, match="no room"):
            store.commit()
        assert hot.num_dirty == 30
        monkeypatch.setattr(hot._below, "put", put_down)
        store.commit()
        assert hot.num_dirty == 0
    assert shown(store_dir)[:, 0].sum() == -30


@pytest.mark.parametrize("hbm", [stores.LEAST, ENOUGH])
def test_a_closed_pool_frees_its_rows_whoever_refers_to_it(store_dir: Path, hbm: int) -> None:
    with open_store(store_dir, hbm=hbm) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        step(bag, ALL[:6])
        out, hot = bag(ALL[:6], torch.tensor([0])), store["t"].pool.tier
        assert isinstance(hot, DeviceRows)
        assert hot.weights.untyped_storage().nbytes() >= ROWS // 8
    assert [each.untyped_storage().nbytes() for each in (hot.weights, hot.state)] == [0, 0]
    with pytest.raises(ClosedError):
        out.sum().backward()


"""Runs and super-runs of hot rows are kernels of an update, too."""


def test_buffers_are_used_again_only_when_their_copy_is_done() -> None:
    """A device that is late: copies happen when somebody waits for their mark."""
    waited: list[int] = []

    class Late(Lane):
        def __init__(self) -> None:
            self.number = 0

        def mark(self) -> Any:
            self.number += 1
            number, lane = self.number, self

            class Mark:
                def query(self) -> bool:
                    return number <= lane.number - 3

                def synchronize(self) -> None:
                    waited.append(number)

            return Mark()

    sender = Sender(Late(), torch.device("cpu"))

    def fill(arrays: Sequence[Any]) -> None:
        arrays[0][:] = number

    for number in range(8):
        (values,), _ = sender.send([(torch.int64, 1 + number * 20_000)], fill)
        assert (values == number).all()
    assert waited == [1, 2, 3, 4, 5, 6]


def test_a_fill_that_fails_leaves_the_buffer_free() -> None:
    sender = Sender(Lane(), torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        sender.send([(torch.int32, 3)], lambda arrays: arrays[0].fill(1 // 0))
    (values, empty), _ = sender.send([(torch.int32, 3), (torch.float32, 0)], lambda arrays: arrays[0].fill(4))
    assert values.tolist() == [4, 4, 4]
    assert empty.tolist() == []
