"""A store with rows in device memory: what fails, what is refused, what a step launches; that its budget is kept.

Counted is what a GPU would be given, and how often the host would wait for it, while all of it runs on the CPU. A
launch is a torch operation that is no view and no allocation, a copy, or a Triton kernel: a function of a twin counts
as the kernels it stands for. What the device was given is under way until the host waits for it, or until the test
says that the device has caught up; only waiting for work that is under way counts."""

import contextlib
import gc
import inspect
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tierstore
from tests.hbm.stores import ALL, ENOUGH, LEAST, ROWS, config, hot, open_store, shown, simple, step
from tests.pool.support import STAGED, make_hot, read
from tierstore import optim
from tierstore.errors import BudgetError, ClosedError, PartlyTrainedError
from tierstore.hbm import launches, twin
from tierstore.hbm.base import DeviceRows, rows_of
from tierstore.hbm.cache import HbmCache, Overflow, group
from tierstore.hbm.streams import CudaStreams, Sender, Streams, staging_bytes
from tierstore.io.base import MemoryColdTier
from tierstore.pool.host import HostTier
from tierstore.store import arguments
from tierstore.system.sizes import parse_size

KERNELS_OF: Final = {"place_starts": 2, "update_rows": 3}
"""Kernels of a function that launches more than one."""
FREE: Final = ("empty", "new_empty", "lift_fresh", "is_pinned", "set_", "resize_")
WAITING: Final = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[str] = []
        self.waits: list[str] = []
        self._own = threading.local()
        self._now = self._done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.is_silent and not func.is_view and not name.startswith(FREE):
            self.launches.append(name)
            indices = args[1] if name.startswith("index") and isinstance(args[1], list) else []
            is_masked = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)
            if name.startswith(WAITING) or is_masked:
                self.wait(name)
        return func(*args, **(kwargs or {}))

    @property
    def is_silent(self) -> bool:
        return getattr(self._own, "is_silent", False)

    def wait(self, name: str) -> None:
        if not self.is_silent:
            self.waits.append(name)
            self.catch_up()

    def catch_up(self) -> None:
        """The device does all it was given."""
        self._done = self._now

    def clear(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def counted(self, function: Callable[..., Any], name: str, launches: int, *, waits: bool = False) -> Any:
        """The function, counted as so many launches, whatever it does."""

        def call(*arguments: Any, **named: Any) -> Any:
            if not self.is_silent:
                self.launches += [name] * launches
                if waits:
                    self.wait(name)
            before, self._own.is_silent = self.is_silent, True
            try:
                return function(*arguments, **named)
            finally:
                self._own.is_silent = before

        return call


class CountingMark:
    def __init__(self, count: Count) -> None:
        self._count = count
        count._now += 1
        self._made = count._now

    def query(self) -> bool:
        return self._made <= self._count._done

    def synchronize(self) -> None:
        if not self.query():
            self._count.wait("synchronize")


@contextlib.contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    count = Count()
    with monkeypatch.context() as patch:
        for name, function in inspect.getmembers(twin, inspect.isfunction):
            if function.__module__ == twin.__name__ and name[0] != "_":
                patch.setattr(twin, name, count.counted(function, name, KERNELS_OF.get(name, 1)))
        patch.setattr(launches, "launch", count.counted(launches.launch, "triton", 1))
        for name in ("cpu", "tolist"):
            patch.setattr(Tensor, name, count.counted(getattr(Tensor, name), name, 1, waits=True))
        patch.setattr(Streams, "mark", lambda _: CountingMark(count))
        patch.setattr(Streams, "follow", lambda _, mark: None)
        with count:
            yield count


SIZES = pytest.mark.parametrize("hbm", [LEAST, ENOUGH])


def bag_of(store: tierstore.Store, name: str = "t", **options: Any) -> Any:
    return tierstore.TieredEmbeddingBag(store[name], mode="sum", **options)


@SIZES
def test_a_closed_pool_frees_its_rows_whoever_refers_to_it(store_dir, hbm):
    with open_store(store_dir, hbm=hbm) as store:
        out, rows = bag_of(store)(ALL[:6], torch.tensor([0])), hot(store)
        assert rows.weights.untyped_storage().nbytes() >= ROWS // 8
    assert [each.untyped_storage().nbytes() for each in (rows.weights, rows.state)] == [0, 0]
    with pytest.raises(ClosedError):
        out.sum().backward()


def test_buffers_are_used_again_only_when_their_copy_is_done():
    """A device that is late: copies happen when somebody waits for their mark."""
    waited: list[int] = []

    class Mark:
        def __init__(self, number: int) -> None:
            self.number = number

        def query(self) -> bool:
            return self.number <= late.number - 3

        def synchronize(self) -> None:
            waited.append(self.number)

    class Late(Streams):
        number = 0

        def mark(self) -> Mark:
            self.number += 1
            return Mark(self.number)

    def fill(arrays: Sequence[Any]) -> None:
        arrays[0][:] = number

    late = Late()
    sender = Sender(late, torch.device("cpu"))
    for number in range(8):
        (values,), _ = sender.send([(np.int64, 1 + number * 20_000)], fill)
        assert (values == number).all()
    assert waited == [1, 2, 3, 4, 5, 6]


class OutOfMemory(Exception):
    pass


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    real, calls = getattr(owner, name), list[None]()

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == 1 and not after:
            raise OutOfMemory
        found = real(*arguments, **named)
        if len(calls) == 1:
            raise OutOfMemory
        return found

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("hbm", "owner", "name", "after"),
    [
        (LEAST, HbmCache, "plan", True), (LEAST, HbmCache, "commit", False), (LEAST, HbmCache, "settle", True),
        (LEAST, HbmCache, "release", False), (LEAST, Overflow, "use", False), (LEAST, HostTier, "take", False),
        (LEAST, HostTier, "put", False), (ENOUGH, HostTier, "take", False), (ENOUGH, HostTier, "put", False),
    ],
)  # fmt: skip
def test_a_call_that_fails_loses_no_row(store_dir, monkeypatch, hbm, owner, name, after):
    expected = torch.arange(600.0)[:, None].repeat(1, 4)
    with open_store(store_dir, hbm=hbm) as store:
        table = store["t"]
        table.write(ALL, expected)
        with hot(store).emptied():
            pass
        expected[:10] = 7.0
        if name != "take":
            table.write(ALL[:10], expected[:10])
        fail_once(monkeypatch, owner, name, after=after)
        with contextlib.ExitStack() as fails:
            fails.enter_context(pytest.raises(OutOfMemory))
            table.read(ALL[50:350])
            store.commit()
        if name == "put":
            assert hot(store).num_dirty == 10
        hot(store).check_integrity()
        table.write(ALL[:10], expected[:10])
        assert torch.equal(table.read(ALL), expected)
        store.commit()
        assert hot(store).num_dirty == 0
        assert not table.pool.in_use
    assert torch.equal(shown(store_dir), expected)


def test_rows_of_a_failed_update_are_newer_than_those_below(store_dir, monkeypatch):
    with open_store(store_dir) as store:
        out = bag_of(store)(ALL[:20].view(4, 5))
        fail_once(monkeypatch, twin, "update_rows", after=True)
        with pytest.raises(PartlyTrainedError, match="OutOfMemory") as failed:
            out.sum().backward()
        assert isinstance(failed.value.__cause__, OutOfMemory)
        assert not store["t"].pool.in_use
        with hot(store).emptied():
            pass
        assert (store["t"].read(ALL[:20]) == -1).all()


class There:
    """From when on tensors count as being on the device; how many batches were joined there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.num_joined, real = 0, DeviceRows.join

        def join(*given: Any) -> Any:
            self.num_joined += 1
            return real(*given)

        monkeypatch.setattr(DeviceRows, "join", join)

    def begin(self) -> None:
        self._monkeypatch.setattr(arguments, "is_there", lambda given, _: isinstance(given, Tensor))


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> There:
    return There(monkeypatch)


def test_empty_batches_go_by_the_host(store_dir, there):
    there.begin()
    with open_store(store_dir, hbm=ENOUGH) as store:
        bag = bag_of(store, include_last_offset=True)
        assert bag(ALL[:0], torch.zeros(1, dtype=torch.int64)).shape == (0, 4)
        assert bag(ALL[:0], torch.zeros(3, dtype=torch.int64)).tolist() == [[0.0] * 4] * 2
        assert bag(torch.empty((2, 0), dtype=torch.int64)).tolist() == [[0.0] * 4] * 2
        with pytest.raises(ValueError, match="end at the number of ids, 4"):
            bag(ALL[:4], torch.zeros(1, dtype=torch.int64))
        assert not there.num_joined


@SIZES
def test_no_lookup_is_captured(store_dir, there, monkeypatch, hbm):
    with open_store(store_dir, hbm=hbm) as store:
        bag = bag_of(store)
        if hbm == ENOUGH:
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
    *(([1, 2, 3, bad, 4, 5], [0, 2, 4], "is not a row of table 'u'") for bad in (-1, ROWS, 2**40)),
    *(([0, 1, 2, 3, 4, 5], bad, "offsets must start at 0") for bad in ([1, 2, 4], [0, 3, 2], [0, 2, 9], [0, 2**40, 3])),
]


@SIZES
def test_what_is_wrong_is_named_as_the_host_names_it(store_dir, there, hbm):
    with open_store(store_dir, simple(), simple(name="u"), hbm=hbm) as store:
        messages: list[list[str]] = []
        for begin in (lambda: None, there.begin):
            begin()
            messages.append([])
            for ids, offsets, message in WRONG:
                last = hbm == ENOUGH and "offsets" in message
                says = f"{message}.*include_last_offset={last}" if "offsets" in message else message
                with pytest.raises(ValueError, match=says) as caught:
                    bag_of(store, "u", include_last_offset=last)(torch.tensor(ids), torch.tensor(offsets))
                messages[-1].append(str(caught.value).split(" is ")[0].split(";")[0])
                assert not store["u"].pool.in_use
        assert messages[0] == messages[1]
        assert there.num_joined == len(WRONG)
        step(bag_of(store, "u"), ALL[:3])
        assert [store[name].read(ALL).sum() for name in "ut"] == [-12, 0]


@contextlib.contextmanager
def late(folder: Path, monkeypatch: pytest.MonkeyPatch, there: There) -> Iterator[tuple[tierstore.Store, Any, Count]]:
    """A store whose rows are in, and a device that does nothing until the host waits for it or it is said to."""
    with open_store(folder, hbm=ENOUGH) as store:
        bag = bag_of(store)
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
    "next step": lambda store, bag: step(bag, ALL[6:9]),
}


@pytest.mark.parametrize("who", AFTER)
def test_a_late_error_is_raised_once(store_dir, monkeypatch, there, who):
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


def test_backward_raises_what_is_known_by_then(store_dir, monkeypatch, there):
    with late(store_dir, monkeypatch, there) as (store, bag, count):
        out = bag(BAD, torch.tensor([0]))
        count.catch_up()
        before = store["t"].num_changes
        with pytest.raises(ValueError, match=f"id {ROWS}"):
            out.sum().backward()
        assert store["t"].num_changes == before
        assert not store["t"].pool.in_use


def test_closing_raises_the_error(store_dir, monkeypatch, there):
    work = late(store_dir, monkeypatch, there)
    with pytest.raises(ValueError, match=f"id {ROWS}"), work as (_, bag, _), torch.no_grad():
        bag(BAD, torch.tensor([0]))
    assert shown(store_dir)[:4, 0].tolist() == [-1, -1, -1, 0]


UPDATE = ["sort", "place_starts", "place_starts", "update_rows", "update_rows", "update_rows"]
"""Runs and super-runs of hot rows are kernels of an update, too."""


@pytest.mark.parametrize(
    ("is_there", "optimizer", "scaled"),
    [(False, optim.SGD(), True), (False, optim.Adam(), False), (True, optim.SGD(), False), (True, optim.Adam(), True)],
)
def test_a_step_is_ten_launches_at_most_and_no_wait(store_dir, monkeypatch, there, is_there, optimizer, scaled):
    sending = ["join_ids", "mul"] if is_there else ["copy_", "number_bags"]
    changing = ["copy_"] if optimizer == optim.Adam() else []  # what Adam goes by, again in each step
    if is_there:
        there.begin()
    with open_store(store_dir, config(optimizer=optimizer), hbm=ENOUGH) as store:
        bag, ids = bag_of(store), ALL.repeat(3)
        offsets, gradient = torch.arange(0, 3 * ROWS, 3), torch.ones(ROWS, 4)
        scale = torch.rand(3 * ROWS) if scaled else None
        bag(ids, offsets, scale).backward(gradient)
        with counting(monkeypatch) as count:
            for _ in range(3):
                count.clear()
                bag(ids, offsets, scale).backward(gradient)
                assert sorted(count.launches) == sorted([*sending, "pool_rows", *UPDATE, *changing])
                assert count.waits == []
                count.catch_up()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_launches_and_waits_where_rows_may_be_evicted(monkeypatch, policy):
    hot = make_hot(MemoryColdTier(), policy)
    read(hot, range(20))

    def step(rows: list[int]) -> None:
        lease = hot.acquire(group(torch.tensor(rows)), len(rows))
        with lease.in_use(changes=True):
            pass
        lease.release()
        count.catch_up()

    with counting(monkeypatch) as count:
        step([*range(20)] * 3)
        count.clear()
        step([*range(20)] * 3)
        expected = ["mix_keys", "sort", "place_starts", "place_starts", "edit_flags", "plan", "copy_", "commit"]
        assert sorted(count.launches) == sorted(expected)
        assert count.waits == ["synchronize"]
        count.clear()
        step([*range(10, 20 + 2 * STAGED)])
        listing = ["sort", "list_keys", "move_rows", "move_rows", "edit_flags"]
        assert sorted(count.launches) == sorted(expected + listing)
        assert count.waits == ["synchronize"] * 2
        count.clear()
        step([*range(30, 40)])  # over dirty victims
        # The summary; six dirty rows go down by two buffers; the third buffer of rows that go up waits for the first.
        assert hot.counters.evictions == 6
        assert count.waits == ["synchronize"] * (1 + 2 + 1)
    hot.check_integrity()


POLICIES = ["lru", "lfu", "tinylfu"]
OPTIMIZERS = [optim.SGD(), optim.RowWiseAdagrad(), optim.Adagrad(), optim.Adam()]
FEWEST_ROWS = 22
shapes = st.fixed_dictionaries(
    {
        "num_embeddings": st.one_of(st.integers(FEWEST_ROWS, 500), st.integers(FEWEST_ROWS, 10**7)),
        "embedding_dim": st.sampled_from([1, 3, 4, 16, 64, 200]),
        "dtype": st.sampled_from(["float32", "float16"]),
        "optimizer": st.sampled_from(OPTIMIZERS),
    }
)


def make(directory: Path, shapes: list[dict[str, Any]], **arguments: Any) -> tierstore.Store:
    store = tierstore.open(directory, threads=1, **arguments)
    for number, shape in enumerate(shapes):
        store.create_table(tierstore.TableConfig(name=f"table {number}", **shape))
    return store


def use(store: tierstore.Store) -> list[DeviceRows]:
    for table in store.tables.values():
        table.read(torch.arange(20))
    return [tier for tier in {table.pool.tier for table in store.tables.values()} if isinstance(tier, DeviceRows)]


def refused(store: tierstore.Store) -> str | None:
    """What it says is enough, if the budget of device memory is too small."""
    try:
        use(store)
    except BudgetError as error:
        (enough,) = re.findall(r"^hbm=.*too little.*; give at least (\d+KiB)$", str(error), re.DOTALL)
        return str(enough)
    return None


@settings(max_examples=12)
@given(
    tables=st.lists(shapes, min_size=1, max_size=3),
    hbm=st.one_of(st.integers(1, 300_000), st.integers(1, 8_000_000)),
    policy=st.sampled_from(POLICIES),
)
def test_budgets_are_kept_and_what_is_named_as_enough_is(tables: list[dict[str, Any]], hbm: int, policy: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        given: dict[str, Any] = {"ddr": "64MiB", "policy": policy}
        with make(Path(directory) / "store", tables, hbm=hbm, **given) as store:
            enough = refused(store)
            budget = hbm
        if enough is not None:
            budget = parse_size(enough, name="hbm")
            assert budget > hbm
            assume(budget <= 64_000_000)
        with make(Path(directory) / "store", tables, hbm=budget, **given) as store:
            pools = use(store)
            stats = store.stats()
            assert 0 < stats.hbm.bytes <= budget
            assert stats.hbm.bytes == sum(pool.size_bytes for pool in pools)
            assert stats.ddr.bytes <= 64 * 2**20
            assert stats.hbm.capacity_rows >= min(64, *(table["num_embeddings"] for table in tables)) * len(pools)
            assert stats.hbm.hits + stats.hbm.misses == stats.hbm.unique == 20 * len(tables)


def tensor_bytes() -> int:
    """Of all tensors' memory that Python knows of, each counted once."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("hbm", "dim", "dtype", "policy"), [("80KiB", 64, "float32", "lru"), ("1MiB", 3, "float16", "lfu")]
)
def test_no_tensor_escapes_the_accounts(store_dir: Path, hbm: str, dim: int, dtype: str, policy: str) -> None:
    table: dict[str, Any] = {"num_embeddings": 50_000, "embedding_dim": dim, "dtype": dtype}
    before = tensor_bytes()
    with make(store_dir, [table], ddr="4MiB", hbm=hbm, policy=policy) as store:
        (pool,) = use(store)
        taken = tensor_bytes() - before - staging_bytes(pool.layout, pool._staging.rows)
        assert pool.size_bytes <= parse_size(hbm, name="hbm")
        slack = 4000  # of the batch of 20 ids, kept until rows are next brought in
        assert 0.9 * pool.size_bytes < taken <= pool.size_bytes + slack


@pytest.mark.parametrize("ddr", ["800KiB", "2MiB"])
def test_staging_in_host_memory_is_part_of_ddr(store_dir: Path, ddr: str) -> None:
    found, staging = [], 0
    for hbm in (0, "2MiB"):
        with make(store_dir, [{"num_embeddings": 50_000, "embedding_dim": 64}], ddr=ddr, hbm=hbm) as store:
            staging = sum(pool.host_bytes for pool in use(store))
            found.append(store.stats().ddr)
            assert found[-1].bytes <= parse_size(ddr, name="ddr")
    assert staging > 100_000
    row_bytes = 64 * 4 + 44
    assert found[0].capacity_rows - found[1].capacity_rows > 0.9 * staging / (row_bytes * 17 / 16)


@pytest.mark.parametrize("hbm", [0, "1% of tables", "0.0000001% of tables"])
def test_a_share_of_small_tables_is_as_little_as_a_store_needs(tmp_path: Path, hbm: str | int) -> None:
    shape = {"num_embeddings": 1000, "embedding_dim": 8, "optimizer": optim.Adagrad}
    with make(tmp_path / "store", [shape, shape | {"embedding_dim": 4}], ddr="1% of tables", hbm=hbm) as store:
        use(store)
        assert store.stats().ddr.bytes < 1 << 20
        assert 0 < store.stats().ddr.capacity_rows < 2000
        rows = torch.arange(1000)
        for table in store.tables.values():
            assert table.pooled(rows, torch.arange(1001), mode="max").equal(table.read(rows))
        assert {table.config.optimizer for table in store.tables.values()} == {optim.Adagrad()}
    with make(tmp_path / "other", [shape], ddr="1KiB") as store, pytest.raises(BudgetError, match="too little"):
        use(store)
