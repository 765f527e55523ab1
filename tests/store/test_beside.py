"""A sound store opens whatever became of another one, a damaged copy of it, in the same process."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

import tierstore
from tests.children import make_store
from tierstore import errors

Mode = Literal["r", "w"]


def require_sound(folder: Path, mode: Mode) -> None:
    with tierstore.open(folder, mode=mode, ddr="2MiB", threads=1) as store:
        assert (store["t"].read(torch.arange(2000)) == 3.0).all()
        store.verify()
        if mode == "w":
            store.commit()


def put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def clear_root(folder: Path, place: int) -> None:
    data = (folder / "rows.lmdb").read_bytes()
    for meta in (0, 4096):
        (root,) = struct.unpack_from("<Q", data, meta + place)
        if root < 2**32:
            put(folder / "rows.lmdb", root * 4096, bytes(64))


def damage_pages(folder: Path) -> None:
    for page in range(8, (folder / "rows.lmdb").stat().st_size // 4096, 3):
        put(folder / "rows.lmdb", page * 4096 + 40, b"damage")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "manifest": lambda folder: put(folder / "manifest.json", 20, b"xx"),
    "meta page": lambda folder: put(folder / "rows.lmdb", 16, bytes(4)),
    "tree": lambda folder: clear_root(folder, 128),
    "free pages": lambda folder: clear_root(folder, 80),
    "many pages": damage_pages,
    "cut short": lambda folder: os.truncate(folder / "rows.lmdb", 40_000),
    "anchor": lambda folder: put(folder / "rows.anchor", 0, bytes(8192)),
    "table of readers": lambda folder: put(folder / "rows.lmdb-lock", 0, b"\xa5" * 9000),
}


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_opened_before_and_beside(tmp_path: Path, damage: str, mode: Mode) -> None:
    """Its errors are kept, and with them every frame that they came through."""
    make_store(tmp_path / "sound")
    kept: list[BaseException] = []
    opened: list[tierstore.Store] = []

    def use_damaged() -> None:
        damaged = tmp_path / f"damaged-{len(kept)}-{len(opened)}"
        shutil.copytree(tmp_path / "sound", damaged)
        DAMAGES[damage](damaged)
        try:
            opened.append(tierstore.open(damaged, mode=mode, ddr="2MiB", threads=1))
            opened[-1]["t"].read(torch.arange(2000))
            opened[-1].verify()
        except errors.TierstoreError as error:
            kept.append(error)

    use_damaged()
    require_sound(tmp_path / "sound", "r")
    require_sound(tmp_path / "sound", "w")
    with tierstore.open(tmp_path / "sound", ddr="2MiB", threads=1) as store:
        use_damaged()
        store["t"].write(torch.arange(2000), torch.full((2000, 16), 3.0))
        store.commit()
    assert kept or damage in ("table of readers", "meta page")  # which a writer puts right
    for each in opened:
        each.close()
    require_sound(tmp_path / "sound", "w")


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize(
    "step",
    [
        *("tierstore.store.store.Workers", "tierstore.store.directory.unpack", "tierstore.store.catalog.Table"),
        *("tierstore.io.row_file.FileMap.of_rows", "tierstore.io.row_file.Snapshot", "tierstore.io.row_file.read_head"),
        *("tierstore.io.row_file.check_store", "tierstore.io.snapshot.check_page_use"),
    ],
)
def test_a_store_that_was_opened_by_half_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, mode: Mode
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("it fails")

    make_store(tmp_path / "sound")
    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises((errors.TierstoreError, OSError)) as kept:
            tierstore.open(tmp_path / "sound", mode=mode, ddr="2MiB", threads=1)
    require_sound(tmp_path / "sound", "r")
    require_sound(tmp_path / "sound", "w")
    assert kept.value
