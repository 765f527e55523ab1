"""File systems of other kinds: overlays, without hard links, that tell no size, of several users."""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tierstore
from tests.children import run
from tierstore import errors
from tierstore.cli.entry import main
from tierstore.io.lmdb import LmdbColdTier
from tierstore.system.files import write_text
from tierstore.updates.publish import write_update

ROWS, DIM = 2000, 8
IDS = torch.arange(ROWS)


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(place: Path, *options: str | Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    _run("mount", *options, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _write(store: tierstore.Store, value: float) -> int:
    store["item"].write(IDS, torch.full((ROWS, DIM), value))
    return store.commit()


def _values(store: tierstore.Store) -> list[float]:
    found: list[float] = store["item"].read(IDS).unique().tolist()
    return found


def _make(path: Path) -> Path:
    with tierstore.open(path, ddr="1MiB", threads=1, keep=5) as store:
        store.create_table(tierstore.TableConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM))
        _write(store, 1.0)
        _write(store, 2.0)
    return path


def _check(path: Path, value: float) -> None:
    with tierstore.open(path, mode="r", ddr="1MiB", threads=1) as store:
        assert _values(store) == [value]
        store.verify()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def test_a_store_of_a_lower_layer_is_written_to_and_a_reader_is_told_to_open_again(made, tmp_path):
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    shutil.copytree(made, tmp_path / "lower" / "store")
    layers = f"lowerdir={tmp_path / 'lower'},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    with mounted(tmp_path / "merged", "-t", "overlay", "overlay", "-o", layers) as merged:
        layered = merged / "store"
        with tierstore.open(layered, mode="r", ddr="1MiB", threads=1) as reader:
            assert _values(reader) == [2.0]
            with tierstore.open(layered, ddr="1MiB", threads=1, keep=5) as writer:
                for value in (3.0, 4.0, 5.0):
                    assert _write(writer, value) == value
                    assert _values(writer) == [value]
            with pytest.raises(errors.StoreReplacedError, match=r"rows\.lmdb: .*open the store again"):
                reader.refresh()
            assert reader.version == 2
            assert _values(reader) == [2.0]
        _check(layered, 5.0)
        with tierstore.open(layered, ddr="1MiB", threads=1, keep=5) as writer:
            writer.rollback(1)
        _check(layered, 1.0)


def test_no_file_can_be_removed_that_keeps_a_second_writer_out(made, tmp_path):
    names = sorted({path.name for path in made.iterdir()} | {"rows.lmdb-lock"})
    second_writer = """
    for folder in sys.argv[1:]:
        try:
            tierstore.open(folder, ddr="1MiB", threads=1).close()
            print("opened")
        except errors.TierstoreError as error:
            print(type(error).__name__)
    """
    with contextlib.ExitStack() as stack:
        pairs = {}
        for name in names:
            folder = Path(shutil.copytree(made, tmp_path / name))
            pairs[name] = tuple(
                stack.enter_context(tierstore.open(folder, mode=mode, ddr="1MiB", threads=1)) for mode in ("w", "r")
            )
            (folder / name).unlink()
        said = dict(zip(names, run(second_writer, *(tmp_path / name for name in names)).splitlines(), strict=True))
        assert said.pop("manifest.json") == "FormatError"
        assert said.pop("rows.lmdb") == "TruncatedError"
        assert set(said.values()) == {"StoreLockedError"}, said
        for name, (writer, reader) in pairs.items():
            if name in said:
                assert _write(writer, 3.0) == reader.refresh() == 3
                assert _values(reader) == [3.0]
                continue
            if name == "rows.lmdb":
                with pytest.raises(errors.StoreReplacedError):
                    _write(writer, 3.0)
            else:
                assert _write(writer, 3.0) == 3
            with pytest.raises(errors.TierstoreError, match=name):
                reader.refresh()
            assert _values(reader) == [2.0]
    for name in said:
        _check(tmp_path / name, 3.0)
        with tierstore.open(tmp_path / name, ddr="1MiB", threads=1) as writer:
            assert _write(writer, 4.0) == 4


@pytest.mark.parametrize(
    ("module", "name", "lacked"),
    [
        (os, "fsync", "sync of directories"),
        (fcntl, "flock", "locks of files and directories"),
        (fcntl, "fcntl", "locks of open files"),
    ],
)
def test_what_a_file_system_lacks_is_named(tmp_path, monkeypatch, module, name, lacked):
    plain = getattr(module, name)
    for code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):

        def call(file: int, *given: Any, code: int = code) -> Any:
            if name == "fsync" and not stat.S_ISDIR(os.fstat(file).st_mode):
                return plain(file)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(module, name, call)
        with pytest.raises(errors.TierstoreError, match=rf"file system, .* lacks .*: no {lacked}.*local file system"):
            tierstore.open(tmp_path / str(code), ddr="1MiB")
        if name != "fcntl":
            with pytest.raises(errors.TierstoreError, match=f"no {lacked}"):
                write_text(tmp_path / "page", "", force=True)


def test_a_full_temporary_folder_is_named_with_what_an_update_takes(store, tmp_path, monkeypatch):
    plain, left = os.pwrite, iter([True, False, False])

    def pwrite(*given: Any) -> int:
        if not next(left, True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    (tmp_path / "work").mkdir()
    with pytest.raises(errors.DiskFullError, match=r"work/update: no space left .* twice its size .* so far"):
        write_update(store, tmp_path / "work" / "update")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_file_system_that_tells_no_size(store, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0, f_bfree=0, f_frsize=4096))
    for command, target in (("backup", "b"), ("compact", "c"), ("export", "x.safetensors")):
        assert main([command, str(store), str(tmp_path / target)]) == 0
    with tierstore.open(store, ddr="1MiB", threads=1) as writer:
        assert _write(writer, 3.0) == 3


def test_the_root_of_a_file_system_is_empty_to_a_new_store(store, tmp_path):
    for command in ("backup", "compact", "repair"):
        (tmp_path / command / "lost+found").mkdir(parents=True)
        assert main([command, str(store), str(tmp_path / command)]) == 0
        _check(tmp_path / command, 2.0)
        assert (tmp_path / command / "lost+found").is_dir()


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o027, 0o640)])
def test_files_have_the_mode_that_the_umask_says(tmp_path, umask, mode):
    os.chmod(tmp_path, 0o2775)
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 2500)
    before = os.umask(umask)
    try:
        store = _make(tmp_path / "store")
        with tierstore.open(store, ddr="1MiB", threads=1, keep=5) as writer:
            writer.rollback(1)
            _write(writer, 3.0)
        (store / "rows.anchor").unlink()
        with tierstore.open(store, ddr="1MiB", threads=1, keep=5):
            pass
        for command in ("backup", "compact", "repair"):
            assert main([command, str(store), str(tmp_path / command)]) == 0
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 11
    wrong = {path.name: oct(path.stat().st_mode) for path in files if stat.S_IMODE(path.stat().st_mode) != mode}
    assert not wrong
    assert {path.stat().st_gid for path in files} == {tmp_path.stat().st_gid}


def test_names_that_no_terminal_can_show(made, tmp_path, monkeypatch):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xff\xe9re"))
    with tierstore.open(folder, ddr="1MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="na\u00efve", num_embeddings=ROWS, embedding_dim=DIM))
        store["na\u00efve"].write(IDS, torch.ones(ROWS, DIM))
        store.commit()
    for encoding in ("ascii", "utf-8"):
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, "stdout", out)
        target = f"{folder}-{encoding}"
        page = f"{target}.safetensors"
        for words in (["inspect", folder], ["verify", folder], ["backup", folder, target], ["export", folder, page]):
            assert main([*map(str, words)]) == 0, words
        out.flush()
        assert raw.getvalue().count(rb"st\udcff\udce9re") >= 4
        assert "na\u00efve".encode(encoding, errors="backslashreplace") in raw.getvalue()


def test_a_store_that_was_moved_away_writes_nothing_where_another_stands(store, tmp_path):
    other = _make(tmp_path / "other")
    moved = tierstore.open(store, ddr="1MiB", threads=1)
    tier = cast(LmdbColdTier, moved._cold)
    moved["item"].write(IDS, torch.full((ROWS, DIM), 3.0))
    moved["item"].pool.flush()
    os.rename(store, tmp_path / "moved")
    os.rename(other, store)
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    table = tierstore.TableConfig(name="more", num_embeddings=10, embedding_dim=DIM)
    for call in (moved.commit, lambda: moved.create_table(table), tier._writer._superblocks.set, moved.commit):
        with pytest.raises(errors.StoreReplacedError, match=r"rows\.lmdb is another file"):
            call()
    moved.close()
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before
    for path in (store, tmp_path / "moved"):
        with tierstore.open(path, ddr="1MiB", threads=1, keep=5) as again:
            assert (list(again.tables), _values(again), again.version) == (["item"], [2.0], 2)


@pytest.mark.parametrize("name", ["rows.lmdb", "rows.lmdb-lock", "rows.anchor"])
def test_a_file_that_another_store_shares_is_not_written(store, tmp_path, name):
    os.link(store / name, tmp_path / "shared")
    with pytest.raises(errors.TierstoreError, match=rf"{name} is a hard link, .*cp -a --reflink=auto or tierstore b"):
        tierstore.open(store, ddr="1MiB", threads=1)
    _check(store, 2.0)
    assert main(["backup", str(store), str(tmp_path / "own")]) == 0
    with tierstore.open(tmp_path / "own", ddr="1MiB", threads=1, keep=5) as own:
        assert _write(own, 3.0) == 3
