"""A store open for reading follows the commits of another process; rows kept in another dtype than stored."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.following import DIM, EVERY, ROWS, Writer, expected
from tierstore.errors import StoreReplacedError
from tierstore.offline.compaction import compact_store


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


def test_rows_first_asked_for_while_a_version_is_made_ready_are_not_kept(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        writer("write", "t", [5], 3)
        writer("commit", 2)
        newer = store.find_newer()
        assert newer is not None
        assert torch.equal(store["t"].read(EVERY), expected())  # no row was in memory before, nor room for any
        newer.show()
        assert torch.equal(store["t"].read(EVERY), expected(_3=[5]))


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
        with pytest.raises(tierstore.errors.TableError, match="in use by a batch under way"):
            newer.show()
        assert store.version == 1
        assert torch.equal(bag(ids), expected()[:10])
        bag.forget(prepared)
        assert newer.show() == 2
        assert torch.equal(bag(ids), expected(_2=[0])[:10])


def test_a_store_at_one_version_and_a_writer_stay(writer: Writer, store_dir: Path, tmp_path: Path) -> None:
    with tierstore.open(store_dir, mode="r", version=1, ddr="4MiB") as store:
        writer("commit", 2)
        assert store.refresh() == 1
    with tierstore.open(tmp_path / "other", ddr="4MiB") as store:
        assert store.find_newer() is None


def replaced(how: str, store_dir: Path) -> None:
    """Put another store, or none, where the store is."""
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
        store._cold._follower._last = -1  # a copy of as many transactions looks like one in which nothing was done
        with pytest.raises(StoreReplacedError, match="version 2 is another commit"):
            store.refresh()


def test_a_reader_that_looks_keeps_no_pages_of_what_is_not_committed(writer: Writer, store_dir: Path) -> None:
    many = list(range(20_000))
    writer("create", "big", len(many), 32)
    writer("write", "big", many, 1)
    writer("commit", 2)
    with tierstore.open(store_dir, mode="r", ddr="440KiB") as store:
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


def test_wrong_dtypes(writer: Writer, store_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype='int3' is not one of"):
        tierstore.open(store_dir, mode="r", dtype="int3")
    with pytest.raises(ValueError, match='goes with mode="r"'):
        tierstore.open(tmp_path / "new", dtype="int8")
    tierstore.quantize(store_dir, tmp_path / "half", dtype="float16")
    with pytest.raises(tierstore.errors.TableError, match="'t': rows stored as float16 cannot be kept as float32"):
        tierstore.open(tmp_path / "half", mode="r", dtype="float32")
