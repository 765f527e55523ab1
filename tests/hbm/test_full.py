"""Every row in device memory: the bits of host memory, dirty rows that go down, and what is refused."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.hbm import stores
from tests.hbm.counting import Count, counting
from tests.hbm.stores import ALL, ENOUGH, ROWS, config, open_store, put, shown, simple, step
from tierstore import optim
from tierstore.errors import ClosedError
from tierstore.hbm.base import DeviceRows, rows_of
from tierstore.hbm.full import FullRows
from tierstore.hbm.streams import CudaStreams, Sender, Staging, Streams
from tierstore.store import arguments

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


def test_buffers_are_used_again_only_when_their_copy_is_done() -> None:
    """A device that is late: copies happen when somebody waits for their mark."""
    waited: list[int] = []

    class Late(Streams):
        def __init__(self) -> None:
            self.number = 0

        def mark(self) -> Any:
            self.number += 1
            number, streams = self.number, self

            class Mark:
                def query(self) -> bool:
                    return number <= streams.number - 3

                def synchronize(self) -> None:
                    waited.append(number)

            return Mark()

    sender = Sender(Late(), torch.device("cpu"))

    def fill(arrays: Sequence[Any]) -> None:
        arrays[0][:] = number

    for number in range(8):
        (values,), _ = sender.send([(np.int64, 1 + number * 20_000)], fill)
        assert (values == number).all()
    assert waited == [1, 2, 3, 4, 5, 6]


SIZES = pytest.mark.parametrize("hbm", [stores.LEAST, ENOUGH])


class There:
    """From when on tensors count as being on the device; how many batches were joined there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.num_joined = 0
        real = DeviceRows.join

        def join(*given: Any) -> Any:
            self.num_joined += 1
            return real(*given)

        monkeypatch.setattr(DeviceRows, "join", join)

    def begin(self) -> None:
        self._monkeypatch.setattr(arguments, "is_there", lambda given, _: isinstance(given, Tensor))


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> There:
    return There(monkeypatch)


def test_empty_batches_go_by_the_host(store_dir: Path, there: There) -> None:
    there.begin()
    with open_store(store_dir, hbm=ENOUGH) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], include_last_offset=True)
        assert bag(ALL[:0], torch.zeros(1, dtype=torch.int64)).shape == (0, 4)
        assert bag(ALL[:0], torch.zeros(3, dtype=torch.int64)).tolist() == [[0.0] * 4] * 2
        assert bag(torch.empty((2, 0), dtype=torch.int64)).tolist() == [[0.0] * 4] * 2
        with pytest.raises(ValueError, match="end at the number of ids, 4"):
            bag(ALL[:4], torch.zeros(1, dtype=torch.int64))
        assert not there.num_joined


# What is wrong


@SIZES
@pytest.mark.parametrize("on_device", [False, True])
def test_a_lookup_under_capture_is_refused(
    store_dir: Path, there: There, monkeypatch: pytest.MonkeyPatch, hbm: int, on_device: bool
) -> None:
    with open_store(store_dir, hbm=hbm) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        if on_device:
            there.begin()
        before = bag(ALL[:3, None])
        monkeypatch.setattr(CudaStreams, "__init__", lambda _: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(rows_of(store["t"].pool).streams, "refuse_capture", CudaStreams().refuse_capture)
        with pytest.raises(RuntimeError, match="cannot capture a lookup of tables: capture the part"):
            bag(ALL[:3, None])
        monkeypatch.undo()
        assert torch.equal(bag(ALL[:3, None]), before)


WRONG: list[tuple[list[int], list[int], str]] = [
    *(([1, 2, 3, bad, 4, 5], [0, 2, 4], "is not a row of table 'u'") for bad in (-1, ROWS, 2**40, -(2**62))),
    *(
        ([0, 1, 2, 3, 4, 5], bad, "offsets must start at 0")
        for bad in ([1, 2, 4], [0, 3, 2], [0, 2, 9], [0, -1, 2], [0, 2**40, 3], [-3, 0, 1])
    ),
]


@SIZES
@pytest.mark.parametrize(("ids", "offsets", "message"), WRONG)
def test_what_is_wrong_is_named_as_the_host_names_it(
    store_dir: Path, there: There, hbm: int, ids: list[int], offsets: list[int], message: str
) -> None:
    last = hbm == ENOUGH and "offsets" in message
    with open_store(store_dir, simple(), simple(name="u"), hbm=hbm) as store:
        bag = tierstore.TieredEmbeddingBag(store["u"], mode="sum", include_last_offset=last)
        messages = []
        for begin in (lambda: None, there.begin):
            begin()
            with pytest.raises(ValueError, match=message) as caught:
                bag(torch.tensor(ids), torch.tensor(offsets))
            messages.append(str(caught.value).split(" is ")[0].split(";")[0])
        assert messages[0] == messages[1]
        assert there.num_joined == 1
        assert not store["u"].pool.in_use
        step(tierstore.TieredEmbeddingBag(store["u"], mode="sum"), ALL[:3])
        assert [store[name].read(ALL).sum() for name in "ut"] == [-12, 0]


@contextlib.contextmanager
def late(
    directory: Path, monkeypatch: pytest.MonkeyPatch, there: There
) -> Iterator[tuple[tierstore.Store, Any, Count]]:
    """A store whose rows are in, and a device that does nothing until the host waits for it or it is said to."""
    with open_store(directory, hbm=ENOUGH) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        step(bag, ALL[:3])
        store.commit()
        there.begin()
        with counting(monkeypatch) as count:
            yield store, bag, count


BAD = torch.tensor([1, ROWS, 2])
AFTER: dict[str, Callable[[tierstore.Store, Any], Any]] = {
    "commit": lambda store, bag: store.commit(),
    "rollback": lambda store, bag: store.rollback(store.version),
    "create": lambda store, bag: store.create_table(config("late")),
    "flush": lambda store, bag: store["t"].pool.flush(),
    "next step": lambda store, bag: step(bag, ALL[6:9]),
}


@pytest.mark.parametrize("who", AFTER)
def test_a_late_error_is_raised_once(store_dir: Path, monkeypatch: pytest.MonkeyPatch, there: There, who: str) -> None:
    """By who waits for the device, and by the next step if it is known by then."""
    with late(store_dir, monkeypatch, there) as (store, bag, count):
        step(bag, BAD)
        step(bag, ALL[3:6])
        assert count.waits == []
        if who == "next step":
            count.catch_up()
        with pytest.raises(ValueError, match=rf"id {ROWS} is not a row of table 't'") as caught:
            AFTER[who](store, bag)
        assert "of an earlier batch" in caught.value.__notes__[0]
        step(bag, ALL[6:9])
        store.commit()
        assert store["t"].read(ALL)[:10, 0].tolist() == [-1] * 9 + [0]


def test_backward_raises_the_error_if_it_is_known_by_then(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, there: There
) -> None:
    with late(store_dir, monkeypatch, there) as (store, bag, count):
        out = bag(BAD, torch.tensor([0]))
        count.catch_up()
        before = store["t"].num_changes
        with pytest.raises(ValueError, match=f"id {ROWS}"):
            out.sum().backward()
        assert store["t"].num_changes == before
        assert not store["t"].pool.in_use


def test_closing_raises_the_error(store_dir: Path, monkeypatch: pytest.MonkeyPatch, there: There) -> None:
    work = late(store_dir, monkeypatch, there)
    with pytest.raises(ValueError, match=f"id {ROWS}"), work as (_, bag, _), torch.no_grad():
        bag(BAD, torch.tensor([0]))
    assert shown(store_dir)[:4, 0].tolist() == [-1, -1, -1, 0]


UPDATE = ["sort", "place_starts", "place_starts", "update_rows", "update_rows", "update_rows"]
"""Runs and super-runs of hot rows are kernels of an update, too."""


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("optimizer", [optim.SGD(), optim.Adam()])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_training_step_is_ten_launches_at_most_and_no_wait(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, there: There, is_there: bool, optimizer: Any, scaled: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    sending = ["join_ids", "mul"] if is_there else ["copy_", "number_bags"]
    changing = ["copy_"] if optimizer == optim.Adam() else []  # what Adam goes by, again in each step
    if is_there:
        there.begin()
    with open_store(store_dir, config(optimizer=optimizer), hbm=ENOUGH) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        bag(ALL, torch.tensor([0]), torch.ones(ROWS) if scaled else None).sum().backward()
        with counting(monkeypatch) as count:
            for _ in range(6):
                ids = torch.randint(0, ROWS, (5100,), generator=generator)
                offsets, gradient = torch.arange(0, 5100, 3), torch.ones(1700, 4)
                scale = torch.rand(5100, generator=generator) if scaled else None
                count.clear()
                bag(ids, offsets, scale).backward(gradient)
                assert sorted(count.launches) == sorted([*sending, "pool_rows", *UPDATE, *changing])
                assert count.waits == []
                count.catch_up()
