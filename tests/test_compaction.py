"""Compaction: the same rows in the same versions, in order, in less room; and never half a store."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import tierstore
from tierstore import compaction, errors
from tierstore import target as new
from tierstore.compaction import WORK_NAME, compact_store
from tierstore.io.anchor import read_stamp
from tierstore.io.btree import META_KEY
from tierstore.manifest import Manifest

ROWS = 6000


def table_config(name, dtype="float32"):
    return tierstore.TableConfig(
        name=name, num_embeddings=ROWS, embedding_dim=9, dtype=dtype, optimizer=tierstore.optim.RowWiseAdagrad()
    )


def fill(store, seed, rows=ROWS // 2):
    generator = torch.Generator().manual_seed(seed)
    for table in store.tables.values():
        ids = torch.randperm(ROWS, generator=generator)[:rows]
        table.write(ids, torch.randn(rows, 9, generator=generator).to(table.layout.torch_dtype))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store that was rewritten often enough to be mostly free pages, and has rows beyond its last commit."""
    directory = tmp_path_factory.mktemp("made") / "source"
    with tierstore.open(directory, ddr="600KiB", threads=1) as store:
        store.create_table(table_config("a"))
        store.create_table(table_config("b", "bfloat16"))
        for step in range(6):
            fill(store, step)
            store.commit(extra={"step": step}, tensors={"w": torch.full((2,), float(step))})
        fill(store, 99)
    return directory


@pytest.fixture
def source(made, tmp_path):
    return shutil.copytree(made, tmp_path / "source")


def rows(directory):
    with tierstore.open(directory, mode="r", ddr="8MiB", threads=1) as store:
        found = {name: table.read(torch.arange(ROWS)) for name, table in store.tables.items()}
        return found | {"w": store.tensors()["w"], "extra": store.extra, "version": store.version}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert equal, name


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith("-lock")}


def test_the_copy_holds_the_same_in_less_room(source, tmp_path):
    before = files(source)
    shown = []
    report = compact_store(source, tmp_path / "copy", progress=lambda *pair: shown.append(pair))
    assert files(source) == before
    same(rows(source), rows(tmp_path / "copy"))
    assert names(tmp_path / "copy") == ["manifest.json", "rows.lmdb"]
    assert report.target == tmp_path / "copy"
    assert (report.version, report.rows > ROWS) == (6, True)
    assert report.bytes_after < 0.6 * report.bytes_before
    assert shown == sorted(shown)
    assert shown[-1][0] == shown[-1][1]


def test_blocks_lie_in_key_order_and_no_page_is_free(source, tmp_path):
    compact_store(source, tmp_path / "copy")
    with compaction._snapshot(tmp_path / "copy") as (environment, snapshot, txn):
        pages, keys = [], []
        for entries, count in snapshot.walk():
            chosen = entries.block_keys[:count] != META_KEY
            pages.append(entries.pages[:count][chosen].copy())
            keys.append(entries.block_keys[:count][chosen].copy())
        stat = txn.stat(environment.open_db(txn=txn, create=False))
        in_use = 2 + stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        assert environment.info()["last_pgno"] + 1 == in_use
        assert (tmp_path / "copy" / "rows.lmdb").stat().st_size == in_use * snapshot.page_bytes
    pages, keys = np.concatenate(pages), np.concatenate(keys)
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert (np.diff(pages) > 0).all()
    # Only LMDB's leaves lie between blocks: one in some forty.
    assert (np.diff(pages) == 1).mean() > 0.9


def test_the_copy_is_trained_on_as_the_source_is(source, tmp_path):
    compact_store(source, tmp_path / "copy")
    for directory in (source, tmp_path / "copy"):
        with tierstore.open(directory, ddr="600KiB", threads=1) as store:
            fill(store, 7)
            store.commit(tensors={"w": torch.zeros(2)})
            store.verify()
    same(rows(source), rows(tmp_path / "copy"))


def test_a_running_writer_is_not_disturbed_and_what_it_has_not_committed_stays_out(tmp_path):
    with tierstore.open(tmp_path / "source", ddr="600KiB", threads=1) as store:
        store.create_table(table_config("a"))
        fill(store, 1)
        store.commit(tensors={"w": torch.ones(2)})
        want = store["a"].read(torch.arange(ROWS))
        fill(store, 2, ROWS)
        assert store.stats().ssd.rows_written > ROWS // 2  # some of it is in the file
        code = "import sys; from tierstore.cli import main; sys.exit(main(['compact', *sys.argv[1:]]))"
        arguments = [str(tmp_path / "source"), str(tmp_path / "copy")]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        assert f"{tmp_path / 'copy'}: version 1, {ROWS // 2:,} rows" in done.stdout
        fill(store, 3)
        store.commit()
        store.verify()
    assert torch.equal(rows(tmp_path / "copy")["a"], want)
    with compaction._snapshot(tmp_path / "copy") as (_, snapshot, _):
        epochs = [
            entries.epochs[:count][entries.block_keys[:count] != META_KEY].copy() for entries, count in snapshot.walk()
        ]
    assert set(np.concatenate(epochs).tolist()) == {1}
    assert "rows.anchor" not in names(tmp_path / "copy")


def test_a_store_without_rows(tmp_path):
    with tierstore.open(tmp_path / "source", ddr="8MiB") as store:
        store.create_table(table_config("a"))
    assert compact_store(tmp_path / "source", tmp_path / "copy").rows == 0
    with tierstore.open(tmp_path / "copy", ddr="8MiB") as store:
        assert list(store.tables) == ["a"]
        fill(store, 1)
        assert store.commit() == 1


def test_an_empty_directory_is_a_target_and_one_in_use_is_not(source, tmp_path):
    (tmp_path / "copy").mkdir()
    compact_store(source, tmp_path / "copy")
    held = names(tmp_path / "copy")
    with pytest.raises(FileExistsError, match=r"is not empty \(it holds manifest.json\); choose a directory"):
        compact_store(source, tmp_path / "copy")
    with pytest.raises(ValueError, match="is the store itself"):
        compact_store(source, source)
    assert names(tmp_path / "copy") == held
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="is not a directory"):
        compact_store(source, tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="nosuch"):
        compact_store(source, tmp_path / "nosuch" / "copy")


def test_no_store_is_said(tmp_path):
    with pytest.raises(errors.StoreNotFoundError, match="no store at"):
        compact_store(tmp_path / "nosuch", tmp_path / "copy")
    assert names(tmp_path) == []


@pytest.mark.parametrize("left", [[], ["rows.lmdb"]])
def test_what_a_copy_cut_short_left_is_no_store_and_is_cleared(source, tmp_path, left):
    copy = tmp_path / "copy"
    (copy / WORK_NAME).mkdir(parents=True)
    (copy / WORK_NAME / "rows.lmdb").write_bytes(b"half")
    for name in left:
        (copy / name).write_bytes(b"whole")
    with pytest.raises(errors.StoreNotFoundError):
        tierstore.open(copy, mode="r")
    compact_store(source, copy)
    same(rows(source), rows(copy))
    assert WORK_NAME not in names(copy)


def test_somebodys_row_file_is_not_cleared(source, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "rows.lmdb").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"it holds rows\.lmdb"):
        compact_store(source, tmp_path / "copy")
    assert (tmp_path / "copy" / "rows.lmdb").read_bytes() == b"mine"


def test_two_copies_into_one_directory_do_not_mix(source, tmp_path):
    (tmp_path / "copy").mkdir()
    descriptor = os.open(tmp_path / "copy", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(errors.TierstoreError, match="is being written by another process"):
            compact_store(source, tmp_path / "copy")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("new", [True, False])
def test_an_interrupt_leaves_nothing(source, tmp_path, new):
    if not new:
        (tmp_path / "copy").mkdir()

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact_store(source, tmp_path / "copy", progress=interrupt)
    assert names(tmp_path) == (["source"] if new else ["copy", "source"])
    assert new or names(tmp_path / "copy") == []
    assert compact_store(source, tmp_path / "copy").version == 6


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch, call):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compaction.os, call, refuse)
    with pytest.raises(errors.DiskFullError, match="copy: no room left"):
        compact_store(source, tmp_path / "copy")
    monkeypatch.undo()
    assert names(tmp_path) == ["source"]


def test_a_disk_too_small_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    def refuse(path, size_bytes):
        assert size_bytes > ROWS * 36
        raise errors.DiskFullError(f"{path}: too small")

    monkeypatch.setattr(compaction, "require_room", refuse)
    with pytest.raises(errors.DiskFullError, match="too small"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def damage(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def first_block(source):
    with compaction._snapshot(source) as (_, snapshot, _):
        entries, _ = next(iter(snapshot.walk()))
        return int(entries.pages[0]) * snapshot.page_bytes


def test_a_damaged_row_is_found_in_the_copy_and_leaves_nothing(source, tmp_path):
    at = first_block(source)
    damage(source / "rows.lmdb", at + 40, b"\x5a")
    with pytest.raises(errors.DamagedError, match=f"check it with tierstore verify {source}"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


@pytest.mark.parametrize("header", [b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00"])
def test_a_page_header_that_would_lead_lmdb_astray_is_found_first(source, tmp_path, header):
    at = first_block(source)
    damage(source / "rows.lmdb", at + 12, header)  # the number of pages
    with pytest.raises(errors.DamagedError, match=r"source/rows\.lmdb: page \d+ is damaged"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def test_a_missing_row_file_is_said(source, tmp_path):
    (source / "rows.lmdb").unlink()
    with pytest.raises(errors.TruncatedError, match=r"rows\.lmdb is missing"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def test_the_row_file_carries_the_stores_id_where_an_anchor_looks_for_it(source, tmp_path):
    compact_store(source, tmp_path / "copy")
    manifest = Manifest.read(tmp_path / "copy")
    assert read_stamp(tmp_path / "copy" / "rows.lmdb", manifest.page_bytes) == bytes.fromhex(manifest.store_id)
    assert manifest == Manifest.read(source)


def test_the_manifest_comes_last_after_synced_rows(source, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    steps = []

    def note(name, call):
        def noting(*arguments, **keywords):
            steps.append((name, *(str(each) for each in arguments if isinstance(each, (str, os.PathLike)))))
            return call(*arguments, **keywords)

        return noting

    monkeypatch.setattr(compaction.os, "rename", note("rename", os.rename))
    monkeypatch.setattr(compaction, "stamp_rows_file", note("stamp and sync", compaction.stamp_rows_file))
    monkeypatch.setattr(new, "sync_directory", note("sync", new.sync_directory))
    compact_store(source, copy)
    work = copy / WORK_NAME
    wanted = [
        ("stamp and sync", str(work / "rows.lmdb")),
        ("rename", str(work / "rows.lmdb"), str(copy / "rows.lmdb")),
        ("sync", str(copy)),
        ("rename", str(work / "manifest.json"), str(copy / "manifest.json")),
        ("sync", str(copy)),
        ("sync", str(tmp_path)),
    ]
    assert [step for step in steps if step in wanted] == wanted


def test_kept_versions_are_in_the_copy(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    with tierstore.open(source, ddr="600KiB", threads=1, keep=3) as store:
        store.create_table(table_config("a"))
        for step in range(5):
            fill(store, step)
            store.commit(extra={"step": step}, tensors={"w": torch.full((2,), float(step))})
        fill(store, 99)
    compact_store(source, copy)
    for version in (3, 4, 5):
        found = []
        for directory in (source, copy):
            with tierstore.open(directory, mode="r", version=version, ddr="8MiB") as store:
                assert (store.versions, store.extra) == ((3, 4, 5), {"step": version - 1})
                found.append(store["a"].read(torch.arange(ROWS)))
        assert torch.equal(*found)
    with tierstore.open(copy, ddr="8MiB", keep=3) as store:
        store.rollback(4)
        assert store.commit() == 6
