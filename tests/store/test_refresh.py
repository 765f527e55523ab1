"""A reader that follows the commits of another process: newer versions, rows in another dtype, random histories."""

import logging
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.following import DIM, EVERY, ROWS, Writer, expected
from tierstore import errors
from tierstore.errors import StoreReplacedError
from tierstore.io import writer as io_writer
from tierstore.io.lmdb import NewerCommit
from tierstore.offline.compaction import compact_store
from tierstore.offline.inspection import describe_store
from tierstore.store import Store

SECONDS = 60.0
CHANGED = [1, 2, 3]


def commit_changed(writer: Writer) -> None:
    writer("write", "t", CHANGED, 5)
    writer("commit", 2)


def require_nothing_held(store: Store) -> None:
    assert store._follower._found is store._cold._found is None


def test_only_what_the_last_call_found_is_shown_and_once(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        store["t"].read(EVERY)
        commit_changed(writer)
        first = store.find_newer()
        writer("write", "t", [1000], 6)
        writer("commit", 3)
        second = store.find_newer()
        assert first is not None
        assert second is not None
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


def test_a_row_that_cannot_be_kept_leaves_the_store_as_it_was(writer: Writer, store_dir: Path) -> None:
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


def test_tables_that_are_stored_differently_and_kept_alike(writer: Writer, store_dir: Path) -> None:
    writer("create", "u", 50, DIM, "float16")
    writer("write", "u", [6, 7], 5)
    writer("commit", 2)
    with tierstore.open(store_dir, mode="r", ddr="4MiB", dtype="float16") as store:
        assert store["u"].pool is store["t"].pool
        store["t"].read(EVERY)
        assert (store["u"].read(torch.tensor([6, 7])) == 5).all()
        writer("write", "t", CHANGED, 5)
        writer("write", "u", [7], 6)
        assert writer("commit", 3) == store.refresh() == 3
        assert torch.equal(store["t"].read(EVERY), expected(_5=CHANGED).half())
        assert store["u"].read(torch.tensor([6, 7]))[:, 0].tolist() == [5, 6]


def test_close_waits_for_what_is_being_read(writer: Writer, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tierstore.open(store_dir, mode="r", ddr="4MiB")
    store["t"].read(EVERY)
    commit_changed(writer)
    is_reading, may_read, read = threading.Event(), threading.Event(), NewerCommit.read

    def read_slowly(*arguments: Any) -> None:
        is_reading.set()
        assert may_read.wait(SECONDS)
        read(*arguments)

    monkeypatch.setattr(NewerCommit, "read", read_slowly)
    found: list[Any] = []
    finder = threading.Thread(target=lambda: found.append(store.find_newer()))
    finder.start()
    assert is_reading.wait(SECONDS)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    may_read.set()
    for thread in (finder, closer):
        thread.join(SECONDS)
        assert not thread.is_alive()
    with pytest.raises(errors.ClosedError, match="is closed"):
        found[0].show()
    found[0].close()


def test_a_table_that_goes_while_its_pool_is_asked_for_is_gone(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="going", num_embeddings=9, embedding_dim=4))
        find = store.pool_of

        def overtaken(layout: Any) -> Any:
            table.is_gone = True
            return find(layout)

        monkeypatch.setattr(store, "pool_of", overtaken)
        table.read(torch.arange(3))  # began before
        with pytest.raises(errors.TableError, match="not in the version"):
            table.read(torch.arange(3))


def test_rows_that_did_not_change_stay_in_memory(writer: Writer, store_dir: Path) -> None:
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


def test_batches_that_hold_rows_are_waited_for_by_nobody(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="440KiB") as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        ids = torch.arange(10).reshape(-1, 1)
        prepared = bag.prepare(ids)
        assert bag.bring_in(prepared)
        writer("write", "t", [0], 2)
        writer("commit", 2)
        newer = store.find_newer()
        assert newer is not None
        with pytest.raises(tierstore.errors.TableError, match="in use by an in-flight batch"):
            newer.show()
        assert store.version == 1
        assert torch.equal(bag(ids), expected()[:10])
        bag.forget(prepared)
        assert newer.show() == 2
        assert torch.equal(bag(ids), expected(_2=[0])[:10])


def replaced(how: str, store_dir: Path) -> None:
    shutil.rmtree(store_dir)
    if how == "compacted":
        store_dir.with_name("copy").rename(store_dir)
    elif how == "made again":
        with tierstore.open(store_dir, ddr="4MiB") as store:
            table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
            table.write(EVERY, torch.full((ROWS, DIM), 7.0))
            store.commit()
            store.commit()


@pytest.mark.parametrize("how", ["compacted", "made again", "deleted"])
def test_a_store_that_was_replaced_says_so_and_shows_what_it_showed(writer: Writer, store_dir: Path, how: str) -> None:
    writer("close")
    compact_store(store_dir, store_dir.with_name("copy"))
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        before = store["t"].read(EVERY)
        assert store.refresh() == 1
        replaced(how, store_dir)
        for _ in range(2):
            with pytest.raises(StoreReplacedError, match=r"rows\.lmdb .*open the store again"):
                store.refresh()
        assert torch.equal(store["t"].read(EVERY), before)
        assert store.version == 1


def test_a_store_that_was_moved_commits_when_it_is_back(store_dir: Path) -> None:
    away = store_dir.with_name("away")
    with tierstore.open(store_dir, ddr="4MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
        store.commit()
        table.write(EVERY[:10], torch.full((10, DIM), 7.0))
        store_dir.rename(away)
        for use in (store.commit, lambda: store.backup(away.with_name("copy"))):
            with pytest.raises(StoreReplacedError, match=r"rows\.lmdb was deleted"):
                use()
        away.rename(store_dir)
        store.commit()
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        assert store["t"].read(EVERY[:10]).unique().tolist() == [7.0]


def test_files_copied_over_a_store_that_use_its_number_again_are_another_store(
    writer: Writer, store_dir: Path, tmp_path: Path
) -> None:
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


def test_a_reader_that_looks_keeps_no_pages_of_what_is_not_committed(writer: Writer, store_dir: Path) -> None:
    many = list(range(20_000))
    writer("create", "big", len(many), 32)
    writer("write", "big", many, 1)
    writer("commit", 2)
    with tierstore.open(store_dir, mode="r", ddr="460KiB") as store:
        for value in (2, 3):
            writer("write", "big", many, value)  # more than the writer's memory holds
            before = store._cold._file.snapshot.txn_id
            assert store.refresh() == 2
            assert store._cold._file.snapshot.txn_id > before
        assert (store["big"].read(torch.tensor(many)) == 1).all()
        writer("commit", 3)
        assert store.refresh() == 3
        assert (store["big"].read(torch.tensor(many)) == 3).all()


def test_statistics_are_told_while_tables_are_added(writer: Writer, store_dir: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with tierstore.open(store_dir, mode="r", ddr="4MiB") as store, ThreadPoolExecutor(1) as pool:
            added = pool.submit(store._catalog.tables.update, ((f"t{number}", store["t"]) for number in range(20_000)))
            while not added.done():
                store.stats()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("dtype", "ddr"),
    [
        ("float32", "4MiB"), ("stored", "440KiB"), ("float16", "4MiB"), ("bfloat16", "440KiB"), ("int8", "440KiB"),
        ("int4", "4MiB"),
    ],
)  # fmt: skip
def test_rows_in_memory_are_those_of_a_store_of_that_dtype(
    writer: Writer, store_dir: Path, tmp_path: Path, dtype: Any, ddr: str
) -> None:
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


FEW = 1000
CONFIG = tierstore.TableConfig(name="t", num_embeddings=FEW, embedding_dim=16)


def test_what_an_old_reader_holds_is_told(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(io_writer, "_LEAST_HELD_BYTES", 300 << 10)

    def told() -> list[str]:
        found = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        caplog.clear()
        return found

    with tierstore.open(store_dir, ddr="4MiB", threads=1) as store:
        table = store.create_table(CONFIG)

        def commit(times: int) -> None:
            for _ in range(times):
                table.write(torch.arange(FEW), torch.randn(FEW, 16))
                store.commit()

        commit(12)
        with tierstore.open(store_dir, mode="r", ddr="4MiB", threads=1) as reader:
            reader["t"].read(torch.arange(3))
            assert told() == []
            assert store.stats().ssd.held_bytes == 0
            before = (store_dir / "rows.lmdb").stat().st_blocks * 512
            commit(40)
            growth = (store_dir / "rows.lmdb").stat().st_blocks * 512 - before
            held = store.stats().ssd.held_bytes
            assert growth / 2 < held < growth + before
            said = told()
            assert 2 <= len(said) <= 6  # each of twice as much
            assert all(f"this process ({os.getpid()}) still shows an old version, and keeps " in each for each in said)
            assert all("Store.refresh()" in each for each in said)
            assert f"this process ({os.getpid()}) shows an older version, and keeps " in describe_store(store_dir)
            reader.refresh()
            commit(2)
            assert store.stats().ssd.held_bytes < held / 4
        commit(1)
        assert store.stats().ssd.held_bytes == 0
        assert told() == []
    assert "keeps" not in describe_store(store_dir)
