"""Power loss: any mixture of synced and later sectors of the row file opens at the last commit."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import TABLES, WIDE, Int64s, add_tables, check_rows, commit, keys_of, write_rows
from tests.io.support import STORE_ID, open_tier, recover
from tierstore.errors import ChecksumError, DamagedError, FormatError
from tierstore.io import anchor
from tierstore.io.anchor import ANCHOR_NAME, AnchorKeeper
from tierstore.io.btree import META_READ_BYTES, Meta, parse_meta
from tierstore.io.lmdb import LmdbColdTier

SECTOR = 512
ROWS = np.arange(TABLES[0][1])


def copy_store(source: Path, target: Path) -> Path:
    """The files as they are now, without locks, which a machine that starts again does not have."""
    target.mkdir()
    for name in ("rows.lmdb", ANCHOR_NAME):
        shutil.copyfile(source / name, target / name)
    return target


def lose_power(synced: Path, later: Path, target: Path, survives: Callable[[int], np.ndarray]) -> Path:
    """A store whose row file has, sector by sector, what was synced or what was written later."""
    copy_store(later, target)
    old = np.fromfile(synced / "rows.lmdb", np.uint8)
    new = np.fromfile(later / "rows.lmdb", np.uint8)
    size = max(len(old), len(new))
    old, new = (np.pad(image, (0, size - len(image))).reshape(-1, SECTOR) for image in (old, new))
    mixed = np.where(survives(len(new))[:, None], new, old)
    mixed.tofile(target / "rows.lmdb")
    return target


def some_rows(generator: np.random.Generator) -> Int64s:
    return keys_of(0, np.sort(generator.choice(ROWS, 200, replace=False)))


@pytest.fixture
def other_boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def start_anew() -> None:
        monkeypatch.setattr(anchor, "boot_id", lambda: b"another start...")

    return start_anew


def with_first_commit(directory: Path) -> LmdbColdTier:
    """A new tier whose rows are all written, of generation 1, and committed."""
    directory.mkdir()
    tier = open_tier(directory)
    add_tables(tier)
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
    tier = open_tier(directory)
    add_tables(tier)
    assert (tier.version, tier.payload) == (2, b"second")
    check_rows(tier, WIDE, keys_of(0, ROWS), 2)
    tier.verify()
    write_rows(tier, WIDE, keys_of(0, ROWS), 3)
    commit(tier, b"third")
    tier.close()
    tier = open_tier(directory)
    add_tables(tier)
    check_rows(tier, WIDE, keys_of(0, ROWS), 3)
    tier.close()


@pytest.mark.parametrize("write_backs", [1, 2, 9])
def test_any_mixture_opens_at_the_last_commit(tmp_path: Path, other_boot: Callable[[], None], write_backs: int) -> None:
    synced = written_after_commit(tmp_path / "store", write_backs, write_backs)
    generator, later = np.random.default_rng(write_backs), tmp_path / "store later"
    other_boot()
    mixtures: list[Callable[[int], np.ndarray]] = [
        lambda sectors: np.arange(sectors) < 16,  # the meta pages alone
        lambda sectors: np.arange(sectors) >= 16,
        *(lambda sectors, share=share: generator.random(sectors) < share for share in (0.0, 0.1, 0.5, 0.9, 1.0)),
    ]
    for number, survives in enumerate(mixtures):
        check_second_commit(lose_power(synced, later, tmp_path / f"lost {number}", survives))


def test_a_tree_that_others_read_stays(tmp_path: Path) -> None:
    written_after_commit(tmp_path / "store", 7, 4)
    later = tmp_path / "store later"
    before = (later / "rows.lmdb").read_bytes()
    reader = open_tier(later, readonly=True)
    recover(later / "rows.lmdb")
    assert (later / "rows.lmdb").read_bytes() == before
    reader.close()
    check_second_commit(later)


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
    path = tmp_path / "store" / ANCHOR_NAME
    content = bytearray(path.read_bytes())
    newest = anchor.newest_slot(bytes(content))
    assert newest is not None
    content[newest.number % 2 * 4096 + 60] ^= 1
    other = anchor.newest_slot(bytes(content))
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
    shutil.copyfile(tmp_path / "store" / ANCHOR_NAME, older / ANCHOR_NAME)
    before = (older / "rows.lmdb").read_bytes()
    for readonly in (False, True):
        with pytest.raises(FormatError, match=r"is older than rows\.anchor"):
            open_tier(older, readonly=readonly)
        with pytest.raises(FormatError, match="belongs to store"):
            open_tier(synced, readonly=readonly, store_id=bytes(16))
    assert (older / "rows.lmdb").read_bytes() == before


def test_the_file_does_not_grow_with_what_is_written_between_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_boot: Callable[[], None]
) -> None:
    """Anchors are set in the background; power may be lost at any of them."""
    monkeypatch.setattr(anchor, "GROWTH_BYTES", 1 << 16)
    directory = tmp_path / "store"
    tier = with_first_commit(directory)
    write_rows(tier, WIDE, keys_of(0, ROWS), 2)
    commit(tier, b"second")
    committed_bytes = (directory / "rows.lmdb").stat().st_size
    generator = np.random.default_rng(3)
    for round_ in range(300):
        write_rows(tier, WIDE, some_rows(generator), 10 + round_)
        if round_ % 60 == 59:
            copy_store(directory, tmp_path / f"later {round_}")
    assert tier.counters().bytes_written > 20 * committed_bytes
    assert (directory / "rows.lmdb").stat().st_size < 6 * committed_bytes
    tier.close()
    other_boot()
    for round_ in range(59, 300, 60):
        check_second_commit(tmp_path / f"later {round_}")


class Pin:
    """The tree when so many bytes had been written."""

    def __init__(self, at_bytes: int, pins: list["Pin"]) -> None:
        self.at_bytes = at_bytes
        self._pins = pins
        pins.append(self)

    def close(self) -> None:
        self._pins.remove(self)


class Slow(Future[None]):
    """An anchor that is never there before somebody waits for it."""

    def exception(self, timeout: float | None = None) -> None:
        pass


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(("live_bytes", "growths"), [(0, 1), (1 << 30, 2), (1 << 45, 4)])
def test_no_pin_falls_further_behind_than_three_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live_bytes: int, growths: int, is_slow: bool
) -> None:
    """However large the store is: the list of pages that wait for an anchor is written with transactions."""
    directory = tmp_path / "store"
    directory.mkdir()
    open_tier(directory).close()
    pins: list[Pin] = []
    written, limit, step = 0, growths * anchor.GROWTH_BYTES, 5 << 20
    keeper = AnchorKeeper(directory / "rows.lmdb", STORE_ID, 4096, sync=lambda: None, pin=lambda: Pin(written, pins))
    if is_slow:
        monkeypatch.setattr(keeper, "_submit", lambda metas: Slow())
    keeper.set()
    behind = set()
    for _ in range(500):
        written += step
        keeper.wrote(step, live_bytes)
        behind.add(written - pins[0].at_bytes)
        if not is_slow:
            assert keeper._pending is None or keeper._pending[1].exception() is None
    assert max(behind) <= 3 * limit
    assert (max(behind) > 2 * limit + step) == is_slow
    keeper.close()
    assert not pins


def test_a_device_that_takes_writes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that fills up: an anchor of which only a part is there vouches for nothing."""
    whole = os.pwrite

    def part(descriptor: int, data: bytes, offset: int) -> int:
        return whole(descriptor, bytes(data)[: (len(data) + 1) // 2], offset)

    monkeypatch.setattr(os, "pwrite", part)
    written_after_commit(tmp_path / "store", 4, 1)
    monkeypatch.undo()
    content = (tmp_path / "store" / ANCHOR_NAME).read_bytes()
    assert len(content) == 8192
    assert all(anchor.newest_slot(content[place : place + 4096]) is not None for place in (0, 4096))
    monkeypatch.setattr(anchor, "boot_id", lambda: b"another start....")
    check_second_commit(tmp_path / "store")
