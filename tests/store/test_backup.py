"""Backups: a copy of a store that others change meanwhile, of one moment, to the bit; and never half a store."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import errors
from tierstore.io import files
from tierstore.store.directory import BACKUP_WORK_NAME
from tierstore.system import killpoints
from tierstore.system.killpoints import COPY_POINTS

ROWS = 6000
DDR = "600KiB"  # rows of both tables do not fit: they come and go


class Trained:
    def __init__(self, store: tierstore.Store) -> None:
        self.store = store
        self.versions: dict[int, dict[str, Tensor]] = {}
        self._generator = torch.Generator().manual_seed(1)

    def train(self, rows: int = ROWS // 2) -> None:
        ids = torch.randperm(ROWS, generator=self._generator)[:rows]
        values = torch.randn(rows, 16, generator=self._generator)
        tables = list(self.store.tables.values())
        bag = tierstore.TieredEmbeddingBag(tables[0], mode="sum")
        (bag(ids[:500], torch.arange(500)) * values[:500]).sum().backward()
        for table in tables:
            table.write(ids, values)

    def commit(self) -> None:
        number = self.store.version + 1
        seen = {name: table.read(torch.arange(ROWS)) for name, table in self.store.tables.items()}
        assert self.store.commit(extra={"number": number}, tensors={"w": torch.full((2,), float(number))}) == number
        self.versions[number] = seen

    def check(self, directory: Path, version: int) -> None:
        with tierstore.open(directory, mode="r", ddr="8MiB", threads=1) as store:
            assert store.version == version
            kept = store.versions
            store.verify()
        for number in kept:
            with tierstore.open(directory, mode="r", version=number, ddr="8MiB", threads=1) as store:
                assert store.extra == {"number": number}
                assert torch.equal(store.tensors()["w"], torch.full((2,), float(number)))
                for name, rows in self.versions[number].items():
                    assert torch.equal(store[name].read(torch.arange(ROWS)), rows), (number, name)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def trained(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    monkeypatch.setattr(files, "_PART_BYTES", 128 << 10)
    with tierstore.open(source, ddr=DDR, keep=2, threads=1) as store:
        for name in ("a", "b"):
            rule = tierstore.optim.RowWiseAdagrad()
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=16, optimizer=rule))
        made = Trained(store)
        for _ in range(3):
            made.train()
            made.commit()
        made.train(ROWS)
        yield made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("mode", ["w", "r"])
def test_a_backup_shows_one_moment_whatever_is_written_while_it_is_made(trained, source, tmp_path, mode, monkeypatch):
    """The writer's; and a follower's of what it shows, to another file system, which takes bytes that are read."""
    parts = []

    def train_on(done: int, total: int) -> None:
        parts.append((done, total))
        if len(parts) <= 6:
            trained.train(ROWS)
            trained.commit()

    with contextlib.ExitStack() as stack:
        maker = trained.store
        if mode == "r":
            monkeypatch.setattr(os, "copy_file_range", Mock(side_effect=OSError(errno.EXDEV, "")))
            maker = stack.enter_context(tierstore.open(source, mode="r", ddr="1MiB", threads=1))
        report = maker.backup(tmp_path / "copy", progress=train_on)
        if mode == "r":
            maker.refresh()
            assert maker.backup(tmp_path / "later").version == 9
            trained.check(tmp_path / "later", 9)
    assert len(parts) > 6
    assert parts == sorted(parts)
    assert parts[-1][0] == parts[-1][1]
    assert (report.version, report.versions, report.target) == (3, (2, 3), tmp_path / "copy")
    assert names(tmp_path / "copy") == ["manifest.json", "rows.lmdb"]
    trained.check(tmp_path / "copy", 3)
    assert trained.store.version == 9


FAILURES: dict[str, type[BaseException]] = {
    **dict.fromkeys(("copy_file_range", "fsync", "rename", "ftruncate"), errors.DiskFullError),
    **dict.fromkeys(COPY_POINTS[:3], MemoryError),
    "Ctrl-C": KeyboardInterrupt,
}


@pytest.mark.parametrize(("failure", "kind"), FAILURES.items())
def test_whatever_fails_leaves_nothing_and_may_be_repeated(trained, tmp_path, monkeypatch, failure, kind):
    def fail(*given: Any) -> None:
        if kind is not MemoryError:
            raise KeyboardInterrupt if failure == "Ctrl-C" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if given == (failure,):
            raise MemoryError

    with monkeypatch.context() as patch:
        if kind is errors.DiskFullError:
            patch.setattr(os, failure, fail)
        elif kind is MemoryError:
            patch.setattr(killpoints, "hook", fail)
        for left in (["source"], ["copy", "source"]):
            with pytest.raises(kind):
                trained.store.backup(tmp_path / "copy", progress=fail if failure == "Ctrl-C" else None)
            assert names(tmp_path) == left
            (tmp_path / "copy").mkdir(exist_ok=True)
            assert names(tmp_path / "copy") == []
    trained.store.backup(tmp_path / "copy")
    trained.check(tmp_path / "copy", 3)


def test_damage_is_not_copied_in_silence(trained, source, tmp_path):
    with trained.store._cold.lease() as (snapshot, _):
        page, root = int(snapshot.walk()["page"][0]), snapshot.meta.main.page
    trained.store.close()
    with (source / "rows.lmdb").open("r+b") as file:
        file.seek(page * 4096 + 60)
        file.write(b"\x5a")
    with tierstore.open(source, mode="r", ddr="1MiB") as store:
        store.backup(tmp_path / "pages")
        with tierstore.open(tmp_path / "pages", mode="r", ddr="1MiB") as copy, pytest.raises(errors.DamagedError):
            copy.verify()
        with (source / "rows.lmdb").open("r+b") as file:
            file.seek(root * 4096)
            file.write(bytes(64))
        with pytest.raises(errors.DamagedError, match=f"page {root} of its tree is damaged"):
            store.backup(tmp_path / "copy")
    assert names(tmp_path) == ["pages", "source"]


def test_a_manifest_comes_after_synced_rows(trained, tmp_path, monkeypatch):
    steps: list[str] = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda old, new: steps.append(f"to {new}") or rename(old, new))
    trained.store.backup(tmp_path / "copy")
    copy = tmp_path / "copy"
    wanted = [
        str(copy / BACKUP_WORK_NAME / "rows.lmdb"), f"to {copy / 'rows.lmdb'}", str(copy),
        f"to {copy / 'manifest.json'}", str(copy), str(tmp_path),
    ]  # fmt: skip
    assert [step for step in steps if step in wanted] == wanted
