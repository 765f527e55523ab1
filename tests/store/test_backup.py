"""Backups: a copy of a store that others change meanwhile, of one moment, to the bit; and never half a store."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests import children
from tierstore import errors
from tierstore.io import files
from tierstore.store.copies import BACKUP_WORK_NAME
from tierstore.system import killpoints
from tierstore.system.killpoints import COPY_POINTS

ROWS = 6000
DDR = "600KiB"  # rows of both tables do not fit: they come and go


def table_config(name: str, num_rows: int = ROWS) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, num_embeddings=num_rows, embedding_dim=16, optimizer=tierstore.optim.RowWiseAdagrad()
    )


Rows = dict[str, Tensor]


class Trained:
    def __init__(self, store: tierstore.Store) -> None:
        self.store = store
        self.versions: dict[int, Rows] = {}
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
            store.create_table(table_config(name))
        made = Trained(store)
        for _ in range(3):
            made.train()
            made.commit()
        made.train(ROWS)
        yield made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_backup_shows_one_moment_whatever_is_written_while_it_is_made(trained: Trained, tmp_path: Path) -> None:
    parts = []

    def train_on(done: int, total: int) -> None:
        parts.append((done, total))
        if len(parts) <= 6:
            trained.train(ROWS)
            trained.commit()

    report = trained.store.backup(tmp_path / "copy", progress=train_on)
    assert len(parts) > 6
    assert parts == sorted(parts)
    assert parts[-1][0] == parts[-1][1]
    assert (report.version, report.versions, report.target) == (3, (2, 3), tmp_path / "copy")
    assert names(tmp_path / "copy") == ["manifest.json", "rows.lmdb"]
    trained.check(tmp_path / "copy", 3)
    assert trained.store.version == 9


def test_a_follower_backs_up_what_it_shows_while_the_writer_rewrites_everything(
    trained: Trained, source: Path, tmp_path: Path
) -> None:
    code = """
    from tierstore.io import files
    files._PART_BYTES = 512 << 10

    def wait(done, total):
        print("part", flush=True)
        sys.stdin.readline()

    with tierstore.open(sys.argv[1], mode="r", ddr="1MiB", threads=1) as store:
        wait(0, 0)
        print("made", store.backup(sys.argv[2], progress=wait).version, flush=True)
        store.refresh()
        print(store.backup(sys.argv[3]).version)
    """
    child = children.start(code, source, tmp_path / "copy", tmp_path / "later")
    assert child.stdin is not None
    assert child.stdout is not None
    said = [child.stdout.readline()]
    while said[-1] == "part\n":
        if len(said) < 8:
            trained.train(ROWS)
            trained.commit()
        child.stdin.write("\n")
        child.stdin.flush()
        said.append(child.stdout.readline())
    out, err = child.communicate()
    assert (said[-1], out) == ("made 3\n", "10\n"), err
    assert len(said) > 8
    trained.check(tmp_path / "copy", 3)
    trained.check(tmp_path / "later", 10)


def raising(number: int) -> Callable[..., int]:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def interrupt(*_: int) -> None:
    raise KeyboardInterrupt


def fail_at(step: str) -> Callable[[str], None]:
    def hook(point: str) -> None:
        if point == step:
            raise MemoryError

    return hook


FAILURES: dict[str, tuple[Any, str, Any, type[BaseException]]] = {
    **{
        call: (files.os, call, raising(errno.ENOSPC), errors.DiskFullError)
        for call in ("copy_file_range", "fsync", "rename", "ftruncate")
    },
    **{step: (killpoints, "hook", fail_at(step), MemoryError) for step in COPY_POINTS[:3]},
    "Ctrl-C": (killpoints, "hook", None, KeyboardInterrupt),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_fails_leaves_nothing_and_may_be_repeated(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    owner, name, value, kind = FAILURES[failure]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        for left in (["source"], ["copy", "source"]):
            with pytest.raises(kind):
                trained.store.backup(tmp_path / "copy", progress=interrupt if failure == "Ctrl-C" else None)
            assert names(tmp_path) == left
            (tmp_path / "copy").mkdir(exist_ok=True)
            assert names(tmp_path / "copy") == []
    if failure == "fsync":
        monkeypatch.setattr(files.os, "copy_file_range", raising(errno.EXDEV))  # so bytes are read
    trained.store.backup(tmp_path / "copy")
    trained.check(tmp_path / "copy", 3)


def test_damage_is_not_copied_in_silence(trained: Trained, source: Path, tmp_path: Path) -> None:
    with trained.store._cold.lease() as (snapshot, _):
        page, root = int(snapshot.walk()["page"][0]), snapshot.meta.main.page
    trained.store.close()
    with (source / "rows.lmdb").open("r+b") as file:
        file.seek(page * 4096 + 60)
        file.write(b"\x5a")
    with tierstore.open(source, mode="r", ddr="1MiB") as store:
        with pytest.raises(errors.DamagedError, match="the backup is not sound"):
            store.backup(tmp_path / "copy", verify=True)
        assert names(tmp_path) == ["source"]
        with (source / "rows.lmdb").open("r+b") as file:
            file.seek(root * 4096)
            file.write(bytes(64))
        with pytest.raises(errors.DamagedError, match=f"page {root} of its tree is damaged"):
            store.backup(tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def test_the_manifest_comes_last_after_synced_rows(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    rename, fsync = os.rename, os.fsync

    def noting(descriptor: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renaming(old: Path, new: Path) -> None:
        steps.append(f"{old} -> {new}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "rename", renaming)
    trained.store.backup(tmp_path / "copy")
    copy, work = tmp_path / "copy", tmp_path / "copy" / BACKUP_WORK_NAME
    wanted = [
        str(work / "rows.lmdb"),
        f"{work / 'rows.lmdb'} -> {copy / 'rows.lmdb'}",
        str(copy),
        f"{work / 'manifest.json'} -> {copy / 'manifest.json'}",
        str(copy),
        str(tmp_path),
    ]
    assert [step for step in steps if step in wanted] == wanted
