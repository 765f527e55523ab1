"""A reader that follows commits: newer versions, rows in another dtype, replaced stores, and lookups beside a change of
version in another thread, each of which shows rows of one version.
"""

import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.cache.support import visit
from tests.following import DIM, EVERY, ROWS, Writer, expected
from tierstore import errors
from tierstore.cache.base import Listing
from tierstore.cache.ddr import DdrCache
from tierstore.errors import StoreReplacedError
from tierstore.io import writer as io_writer
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.offline.compaction import compact_store
from tierstore.pool import direct
from tierstore.store import Store

SECONDS = 60.0
CHANGED = [1, 2, 3]


def commit_changed(writer: Writer) -> None:
    writer("write", "t", CHANGED, 5)
    writer("commit", 2)


def require_nothing_held(store: Store) -> None:
    assert store._follower._found is store._cold._found is None


def test_only_what_the_last_call_found_is_shown_and_once(writer, store_dir):
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        store["t"].read(EVERY)
        commit_changed(writer)
        first = store.find_newer()
        writer("write", "t", [1000], 6)
        writer("commit", 3)
        second = store.find_newer()
        with pytest.raises(errors.ClosedError, match="version 2 was shown or given up"):
            first.show()
        first.close()
        assert torch.equal(store["t"].read(EVERY), expected())
        assert second.show() == 3
        with pytest.raises(errors.ClosedError, match="version 3 was shown or given up"):
            second.show()
        assert torch.equal(store["t"].read(EVERY), expected(_5=CHANGED, _6=[1000]))
        require_nothing_held(store)
        writer("commit", 4)
        assert store.find_newer() is not None
        writer("rollback", 3)
        assert store.find_newer() is None
        require_nothing_held(store)


def test_a_row_that_cannot_be_kept_leaves_the_store_as_it_was(writer, store_dir):
    with tierstore.open(store_dir, mode="r", ddr="4MiB", dtype="float16") as store:
        store["t"].read(EVERY)
        writer("write", "t", [11], 1e30)
        writer("commit", 2)
        with pytest.raises(errors.DamagedError, match="row 11 of table 't'"):
            store.find_newer()
        require_nothing_held(store)
        assert torch.equal(store["t"].read(EVERY), expected().half())
        writer("rollback", 1)
        writer("write", "t", CHANGED, 5)
        assert writer("commit", 3) == store.refresh() == 3
        assert torch.equal(store["t"].read(EVERY), expected(_5=CHANGED).half())


def test_rows_that_did_not_change_stay_in_memory(writer, store_dir):
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        store["t"].read(EVERY)
        before = store.stats()
        writer("write", "t", [5], 3)
        writer("commit", 2)
        store.refresh()
        assert torch.equal(store["t"].read(EVERY), expected(_3=[5]))
        after = store.stats()
        assert after.ddr.misses - before.ddr.misses == after.ddr.evictions == 0
        assert after.ssd.lookups - before.ssd.lookups == 1  # the row that changed, and no other


def test_batches_that_hold_rows_are_waited_for_by_nobody(writer, store_dir):
    with tierstore.open(store_dir, mode="r", ddr="440KiB") as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        ids = torch.arange(10).reshape(-1, 1)
        prepared = bag.prepare(ids)
        assert bag.bring_in(prepared)
        writer("write", "t", [0], 2)
        writer("commit", 2)
        newer = store.find_newer()
        with pytest.raises(tierstore.errors.TableError, match="in use by an in-flight batch"):
            newer.show()
        assert store.version == 1
        assert torch.equal(bag(ids), expected()[:10])
        bag.forget(prepared)
        assert newer.show() == 2
        assert torch.equal(bag(ids), expected(_2=[0])[:10])


@pytest.mark.parametrize("how", ["compacted", "made again", "deleted"])
def test_a_store_that_was_replaced_says_so_and_shows_what_it_showed(writer, store_dir, how):
    writer("close")
    copy = store_dir.with_name("copy")
    if how == "compacted":
        compact_store(store_dir, copy)
    elif how == "made again":
        with tierstore.open(copy, ddr="4MiB") as store:
            store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
            store.commit()
            store.commit()
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        before = store["t"].read(EVERY)
        assert store.refresh() == 1
        shutil.rmtree(store_dir)
        if how != "deleted":
            copy.rename(store_dir)
        for _ in range(2):
            with pytest.raises(StoreReplacedError, match=r"rows\.lmdb .*open the store again"):
                store.refresh()
        assert torch.equal(store["t"].read(EVERY), before)
        assert store.version == 1


def test_files_copied_over_a_store_that_use_its_number_again_are_another_store(writer, store_dir, tmp_path):
    """Byte by byte, so that the path names the file that it named."""
    writer("close")
    shutil.copytree(store_dir, tmp_path / "copy")
    for directory, value in ((store_dir, 2), (tmp_path / "copy", 3)):
        writer("open", str(directory))
        writer("write", "t", [1], value)
        assert writer("commit", value) == 2
        writer("close")
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        assert store.refresh() == 2
        shutil.copyfile(tmp_path / "copy" / "rows.lmdb", store_dir / "rows.lmdb")
        store._cold._same_until = -1  # a copy of as many transactions looks like one in which nothing was done
        with pytest.raises(StoreReplacedError, match="version 2 is another commit"):
            store.refresh()


@pytest.mark.parametrize(
    ("dtype", "ddr"),
    [
        ("float32", "4MiB"), ("stored", "440KiB"), ("float16", "4MiB"), ("bfloat16", "440KiB"), ("int8", "440KiB"),
        ("int4", "4MiB"),
    ],
)  # fmt: skip
def test_rows_in_memory_are_those_of_a_store_of_that_dtype(writer, store_dir, tmp_path, dtype, ddr):
    target = tmp_path / "other"
    if dtype in ("float32", "stored"):
        target = store_dir
        want = expected()
    else:
        tierstore.quantize(store_dir, target, dtype=dtype)
        with tierstore.open(target, mode="r", ddr="4MiB") as store:
            want = store["t"].read(EVERY)
    with tierstore.open(store_dir, mode="r", ddr=ddr, dtype=dtype) as store:
        table = store["t"]
        assert table.layout.state_dim == 0
        assert torch.equal(table.read(EVERY), want)
        if not table.layout.is_quantized:
            assert torch.equal(table.pooled(EVERY, torch.arange(ROWS + 1)), want.float())
        writer("write", "t", [0, 1, 2], 3)
        writer("commit", 2)
        store.refresh()
        assert torch.equal(table.read(torch.tensor([0, 1, 2])), torch.full((3, DIM), 3.0, dtype=want.dtype))
        assert torch.equal(table.read(EVERY[3:]), want[3:])
        assert store.stats().ddr.bytes <= (4 << 20 if ddr == "4MiB" else 440 << 10)


def test_what_an_old_reader_holds_is_told(store_dir, monkeypatch, caplog):
    monkeypatch.setattr(io_writer, "_LEAST_HELD_BYTES", 300 << 10)
    me = f"this process ({os.getpid()})"
    with tierstore.open(store_dir, ddr="4MiB", threads=1) as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=1000, embedding_dim=16))

        def commit(times: int) -> int:
            for _ in range(times):
                table.write(torch.arange(1000), torch.randn(1000, 16))
                store.commit()
            return (store_dir / "rows.lmdb").stat().st_blocks * 512

        before = commit(12)
        with tierstore.open(store_dir, mode="r", ddr="4MiB", threads=1) as reader:
            reader["t"].read(torch.arange(3))
            assert store.stats().ssd.held_bytes == 0
            assert not caplog.records
            growth = commit(40) - before
            held = store.stats().ssd.held_bytes
            assert growth / 2 < held < growth + before
            said = [each.message for each in caplog.records]
            assert 2 <= len(said) <= 6  # each of twice as much
            assert all(f"{me} still shows an old version, and keeps " in each for each in said)
            assert all("Store.refresh()" in each for each in said)
            reader.refresh()
            commit(2)
            assert store.stats().ssd.held_bytes < held / 4
        caplog.clear()
        commit(1)
        assert store.stats().ssd.held_bytes == 0
        assert not caplog.records


@pytest.mark.kernel
@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu"])
def test_rows_that_stay_are_listed_whatever_moves(policy):
    """Between any two pieces of the listing rows are used, some leave and others come, at random."""
    random = np.random.default_rng(3)
    for _ in range(20 if JIT_ENABLED else 5):
        cache, before = DdrCache(100, weight_words=1, state_words=0, policy=policy), np.random.default_rng(7)
        for _ in range(30):
            visit(cache, *before.zipf(1.3, 20) % 300)
        came = stayed = set(cache.keys_of(cache.resident_slots()).tolist())
        found = Listing()
        while cache.list_more(found, 8):
            visit(cache, *random.zipf(1.2, random.integers(1, 12)) % 1000)
            now = set(cache.keys_of(cache.resident_slots()).tolist())
            stayed, came = stayed & now, came | now
        assert stayed <= set(found.keys().tolist()) <= came


NUM_ROWS, DIMS = 150, {"a": 40, "b": 48}
ALL, STARTS = torch.arange(NUM_ROWS), torch.arange(0, NUM_ROWS, 2)
PLACES: dict[str, Any] = {
    "in memory": {"ddr": "2MiB"},
    "evicting": {"ddr": "500KiB"},
    "on device": {"ddr": "2MiB", "hbm": "2MiB"},
}
TURNS = 6  # moments of a lookup at which the version changes
_PACKAGE = str(Path(tierstore.__file__).parent)

Change = Callable[[], Any]


def _put(store: Store, value: int) -> None:
    for name, dim in DIMS.items():
        store[name].write(ALL, torch.full((NUM_ROWS, dim), float(value)))


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Store]:
    with tierstore.open(tmp_path / "store", ddr="2MiB") as store:
        for name, dim in DIMS.items():
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=dim))
        _put(store, 0)
        store.commit()
        yield store


def _lookups(store: Store) -> dict[str, Callable[[], torch.Tensor]]:
    a, bag = store["a"], tierstore.TieredEmbeddingBag(store["a"])
    collection = tierstore.TieredEmbeddingBagCollection(store)
    lengths = torch.ones(2 * NUM_ROWS, dtype=torch.int64)
    jagged = tierstore.KeyedJaggedTensor(["a", "b"], ALL.repeat(2), lengths=lengths)
    return {
        "read": lambda: a.read(ALL),
        "pooled": lambda: a.pooled(ALL, torch.arange(NUM_ROWS + 1), mode="mean"),
        "max": lambda: a.pooled(ALL, torch.arange(NUM_ROWS + 1), mode="max"),
        "bag": lambda: bag(ALL, STARTS),
        "collection": lambda: collection(jagged).values(),
    }


def _interrupted(look_up: Callable[[], torch.Tensor], line: int, change: Change) -> tuple[torch.Tensor, int]:
    """What it finds if, at or behind the given line that it runs of the package, another thread moves to another
    version; and how many lines it ran."""
    lines, thread = itertools.count(), threading.Thread(target=change)
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            count = next(lines)
            if count == line:
                thread.start()
                thread.join(0.05)  # no longer, as it may wait for this lookup
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = look_up()
    finally:
        sys.settrace(before)
    if thread.ident is None:  # it ran fewer lines
        thread.start()
    thread.join()
    return found, count


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["read", "pooled", "max", "bag", "collection"])
def test_whenever_the_version_changes(trained, where, kind):
    with tierstore.open(trained.directory, mode="r", policy="lru", **PLACES[where]) as reader:
        look_up = _lookups(reader)[kind]
        look_up()
        _, lines = _interrupted(look_up, -1, reader.refresh)
        for value, line in enumerate(np.linspace(1, lines, TURNS).astype(int).tolist(), 1):
            _put(trained, value)
            trained.commit()
            found, _ = _interrupted(look_up, line, reader.refresh)
            assert found.min() == found.max()
            assert reader.version == trained.version
            assert look_up().min() == look_up().max() == value * (2 if kind == "bag" else 1)


@pytest.mark.parametrize("where", ["in memory", "evicting"])
def test_while_rows_come_in(trained, where):
    lines = 1
    for value in range(1, 3 * TURNS):
        with tierstore.open(trained.directory, mode="r", policy="lru", **PLACES[where]) as reader:
            reader["a"].read(ALL[-1:])
            _put(trained, value)
            trained.commit()
            newer = reader.find_newer()
            found, lines = _interrupted(lambda: reader["a"].read(ALL), lines * value // (3 * TURNS), newer.show)
            assert found.min() == found.max()
            assert (reader["a"].read(ALL) == value).all()


@pytest.mark.parametrize("kind", ["pooled", "bag"])
def test_while_rows_are_added_up(trained, kind, monkeypatch):
    """A version that changes while a kernel runs has it run again."""
    with tierstore.open(trained.directory, mode="r", ddr="2MiB") as reader, ThreadPoolExecutor(1) as thread:
        look_up = _lookups(reader)[kind]
        look_up()
        _put(trained, 1)
        trained.commit()

        def overtaken(run: Callable[..., Any], *given: Any) -> Any:
            status = run(*given)
            thread.submit(reader.refresh).result()
            return status

        for name in ("pool_at", "look_up"):
            monkeypatch.setattr(direct, name, partial(overtaken, getattr(direct, name)))
        found = look_up()
        assert found.min() == found.max() == (2 if kind == "bag" else 1)
