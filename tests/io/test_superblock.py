"""Going back to the anchored tree after a loss of power: only to one that is whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import TABLES, WIDE, Int64s, check_rows, commit, keys_of, write_rows
from tests.io.support import STORE_ID, open_tier, opened, recover
from tierstore.errors import ChecksumError, DamagedError, FormatError
from tierstore.io import superblock
from tierstore.io.btree import META_READ_BYTES, Meta, parse_meta
from tierstore.io.files import SUPERBLOCK_NAME
from tierstore.io.lmdb import LmdbColdTier
from tierstore.system import killpoints

ROWS = np.arange(TABLES[0][1])


def copy_store(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("rows.lmdb", SUPERBLOCK_NAME):
        shutil.copyfile(source / name, target / name)
    return target


def some_rows(generator: np.random.Generator) -> Int64s:
    return keys_of(0, np.sort(generator.choice(ROWS, 200, replace=False)))


@pytest.fixture
def other_boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def start_anew() -> None:
        monkeypatch.setattr(superblock, "boot_id", lambda: b"another start...")

    return start_anew


def with_first_commit(directory: Path) -> LmdbColdTier:
    directory.mkdir()
    tier = opened(directory)
    write_rows(tier, WIDE, keys_of(0, ROWS), 1)
    commit(tier, b"first")
    return tier


def written_after_commit(directory: Path, seed: int, write_backs: int) -> Path:
    """A tier with two commits and many write-backs behind them; returns the files as the last commit left them."""
    generator = np.random.default_rng(seed)
    tier = with_first_commit(directory)
    for _ in range(3):
        write_rows(tier, WIDE, some_rows(generator), 7)
    write_rows(tier, WIDE, keys_of(0, ROWS), 2)
    commit(tier, b"second")
    synced = copy_store(directory, directory.with_name(directory.name + " synced"))
    for generation in range(write_backs):
        write_rows(tier, WIDE, some_rows(generator), 10 + generation)
    copy_store(directory, directory.with_name(directory.name + " later"))
    tier.close()
    return synced


def check_second_commit(directory: Path) -> None:
    tier = opened(directory)
    assert (tier.version, tier.payload) == (2, b"second")
    check_rows(tier, WIDE, keys_of(0, ROWS), 2)
    tier.verify()
    write_rows(tier, WIDE, keys_of(0, ROWS), 3)
    commit(tier, b"third")
    tier.close()
    tier = opened(directory)
    check_rows(tier, WIDE, keys_of(0, ROWS), 3)
    tier.close()


def test_a_meta_page_whose_write_failed_is_put_back(tmp_path: Path) -> None:
    """LMDB leaves the new roots under the old transaction number: no meta page, in the place that does not count."""
    written_after_commit(tmp_path / "store", 7, 4)
    path = tmp_path / "store later" / "rows.lmdb"
    with path.open("r+b") as file:
        metas = [parse_meta(os.pread(file.fileno(), META_READ_BYTES, place)) for place in (0, 4096)]
        txn_ids = [meta.txn_id for meta in metas if isinstance(meta, Meta)]
        os.pwrite(file.fileno(), (1 << 31).to_bytes(8, "little"), txn_ids.index(min(txn_ids)) * 4096 + 128)
    with pytest.raises(DamagedError, match='open it once with mode="w"'):
        open_tier(path.parent, readonly=True)
    check_second_commit(path.parent)


def test_a_damaged_slot_leaves_the_other_and_two_are_an_error(tmp_path: Path) -> None:
    written_after_commit(tmp_path / "store", 8, 1)
    path = tmp_path / "store" / SUPERBLOCK_NAME
    content = bytearray(path.read_bytes())
    newest = superblock.newest_slot(bytes(content))
    assert newest is not None
    content[newest.number % 2 * 4096 + 60] ^= 1
    other = superblock.newest_slot(bytes(content))
    assert other is not None
    assert other.number == newest.number - 1
    content[other.number % 2 * 4096 + 60] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"rows\.anchor is damaged"):
        open_tier(tmp_path / "store")


def test_an_anchor_of_another_file_is_never_put_back(tmp_path: Path, other_boot: Callable[[], None]) -> None:
    synced = written_after_commit(tmp_path / "store", 9, 3)
    other_boot()
    older = copy_store(synced, tmp_path / "older")
    check_second_commit(tmp_path / "store")  # and a third one, which sets a newer anchor
    shutil.copyfile(tmp_path / "store" / SUPERBLOCK_NAME, older / SUPERBLOCK_NAME)
    before = (older / "rows.lmdb").read_bytes()
    for readonly in (False, True):
        with pytest.raises(FormatError, match=r"is older than rows\.anchor"):
            open_tier(older, readonly=readonly)
        with pytest.raises(FormatError, match="belongs to store"):
            open_tier(synced, readonly=readonly, store_id=bytes(16))
    assert (older / "rows.lmdb").read_bytes() == before


PAGE = 4096


@pytest.fixture
def later(tmp_path: Path) -> Path:
    written_after_commit(tmp_path / "store", 7, 4)
    return tmp_path / "store later"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def roots(pages: tuple[bytes, bytes]) -> Meta:
    found = [meta for meta in map(parse_meta, pages) if isinstance(meta, Meta)]
    return max(found, key=lambda meta: meta.txn_id)


@pytest.mark.parametrize("what", ["rows", "free pages"])
def test_a_tree_that_is_not_whole_is_not_gone_back_to(later: Path, what: str) -> None:
    kept = superblock.load_superblock(later / "rows.lmdb", STORE_ID)
    assert kept is not None
    meta = roots(kept.metas)
    page = meta.main.page if what == "rows" else meta.free.page
    with (later / "rows.lmdb").open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 64, page * PAGE)
    before = files(later)
    with pytest.raises(DamagedError, match=r'Nothing was changed\. mode="r" shows .* tierstore repair'):
        recover(later / "rows.lmdb")
    assert files(later) == before
    open_tier(later, readonly=True).close()
    with pytest.raises(DamagedError, match="Nothing was changed"):
        open_tier(later)
    assert files(later).items() >= before.items()


@pytest.mark.parametrize("point", ["anchored meta pages put back", "the first page"])
def test_a_recovery_that_was_cut_short_is_made_again(later: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    class CutShortError(Exception):
        pass

    def cut(name: str) -> None:
        if name.endswith(point):
            raise CutShortError

    written: list[int] = []
    write_all = superblock.write_all

    def write_one(descriptor: int, data: bytes, offset: int) -> None:
        if written:
            raise CutShortError
        written.append(offset)
        write_all(descriptor, data, offset)

    path = later / "rows.lmdb"
    with monkeypatch.context() as patch:
        if point == "the first page":
            patch.setattr(superblock, "write_all", write_one)
        else:
            patch.setattr(killpoints, "hook", cut)
        with pytest.raises(CutShortError):
            recover(path)
    recover(path)
    check_second_commit(later)
