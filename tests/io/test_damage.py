"""What is on disk is not what was written: each kind of damage has its clear error, and nothing crashes.

LMDB's own code trusts its file, so whatever could crash runs in the test's process only behind our checks. The last
tests damage a small store anywhere, in forked processes; ``pytest -m soak`` tries a bit of every byte of its row file.
"""

import contextlib
import os
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.conformance.cold_tier import NARROW, WIDE, check_rows, commit, keys_of, read_rows, write_rows
from tests.damage import PAGE, Case, Outcome, Sample, flips, make_aged, make_sample, mixes, page_damage, row_file, sweep
from tests.io.support import (
    STORE_ID,
    RowPlace,
    flip,
    manifest_format,
    open_tier,
    opened,
    place_of,
    plain_lmdb,
    refuse,
    rows_format,
)
from tierstore.errors import ChecksumError, DamagedError, FormatError, UnreadableError
from tierstore.io import superblock
from tierstore.io.files import SUPERBLOCK_NAME
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.meta import META_READ_BYTES, Meta, newest_meta, parse_meta
from tierstore.io.reader_locks import FileLocks
from tierstore.io.records import item_key, segment_key, version_item
from tierstore.io.row_map import RowMap
from tierstore.io.segments import read_indexes, stored_segments
from tierstore.kernels.jit import JIT_ENABLED

ALL = np.arange(1000)
ROWS = WIDE.rows_per_block
SEGMENT_ROWS = WIDE.rows_per_segment


def reading(path: Path) -> contextlib.closing[LmdbColdTier]:
    return contextlib.closing(opened(path, readonly=True))


def writing(path: Path) -> contextlib.closing[LmdbColdTier]:
    return contextlib.closing(opened(path))


def place(path: Path, row: int, table: int = 0) -> RowPlace:
    with reading(path) as tier:
        return place_of(tier, table, row)


def put(path: Path, offset: int, content: bytes) -> None:
    with (path / "rows.lmdb").open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_an_index_that_is_damaged_while_the_store_is_open(written: Path) -> None:
    """Rows are read, as they say themselves which they are; verify finds it, and no damaged epoch is made use of."""
    with writing(written) as tier:
        write_rows(tier, WIDE, keys_of(0, [999]), 1)
        found = place_of(tier, 0, 300)
        flip(written, found.segment_page * PAGE + 16 + 8 * 4)  # the newest epoch
        check_rows(tier, WIDE, keys_of(0, ALL), 1)
        expected = rf"segment {found.number} is damaged \(BAD_INDEX\)"
        with pytest.raises(ChecksumError, match=expected):
            tier.verify()
        with tier.lease() as (snapshot, rows), pytest.raises(ChecksumError, match=expected):
            rows.written_since(snapshot, 0)


@pytest.mark.skipif(not JIT_ENABLED, reason="without compiled code a refused page ends the process")
def test_an_index_of_several_pages_that_cannot_be_read(written: Path) -> None:
    """Of each of its pages it is asked whether it could be read: zeros would be keys of other rows."""
    with reading(written) as tier:
        found = place_of(tier, 1, 0)
        assert found.block_page > found.segment_page + 2
        with tier.lease() as (snapshot, rows):
            indexes, guard = read_indexes(snapshot, stored_segments(snapshot)), snapshot.file_map.rows.guard
            uses = (
                lambda: RowMap(rows.shapes).enter(snapshot, indexes, 1, ()),
                lambda: rows.live_rows(snapshot, NARROW, rows.segments[NARROW].in_use),
                tier.verify,
            )
            for page in range(found.segment_page, found.block_page):
                for use in uses:
                    guard.begin()  # it is asked about what was refused before
                    refuse(guard, page)
                    with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*device refuses.*log says why.*copy"):
                        use()
        tier.verify()


def test_a_page_header_damaged_between_write_and_commit(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LMDB frees as many pages as a page header says: that is looked at before. Others are deleted, rows written."""
    found = place(written, 0)
    header = found.segment_page * PAGE + 12  # number of pages
    with writing(written) as tier:
        write_rows(tier, WIDE, keys_of(0, ALL), 2)
        flip(written, header, bits=2)
        expected = rf"segment {found.number} is damaged \(BAD_PAGE_HEADER\)"
        assert commit(tier, b"") == 2  # what could not be deleted is what the version replaced
        assert re.search(expected, caplog.text)
        write_rows(tier, WIDE, keys_of(0, ALL), 3)
        assert commit(tier, b"") == 3
        with pytest.raises(ChecksumError, match=expected):
            tier.verify()
        flip(written, header, bits=2)
        tier.verify()
    with writing(written) as tier:
        assert commit(tier, b"") == 4
    with plain_lmdb(written) as txn:
        assert txn.get(segment_key(found.number)) is None


def test_nonzero_padding(written: Path) -> None:
    last = place(written, 999)
    assert last.index % ROWS < ROWS - 1, "a place is free in the last block"
    with reading(written) as tier:
        places = [last.pair + 16, last.row + WIDE.row_bytes, last.row + 2 * WIDE.row_bytes - 1]
        places += [(last.block_page + 1) * PAGE - 4, (last.segment_page + 1) * PAGE - 1]
        for at in (*places, last.segment_page * PAGE + 16 + 8 * (6 + last.index + 1)):
            flip(written, at)
            check_rows(tier, WIDE, keys_of(0, ALL), 1)
            with pytest.raises(ChecksumError, match=rf"segment {last.number} is damaged \(BAD_PADDING\)"):
                tier.verify()
            flip(written, at)
        tier.verify()


DAMAGES = ["zeroed page", "exchanged pages", "another row", "another row and pair", "another key"]


@pytest.mark.parametrize("distance", [1, ROWS, SEGMENT_ROWS], ids=["block", "segment", "file"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_in_others_places_are_errors_and_the_others_are_right(written: Path, damage: str, distance: int) -> None:
    first, bad = SEGMENT_ROWS, np.array([SEGMENT_ROWS + distance])
    with reading(written) as tier:
        source, target = (place_of(tier, 0, row) for row in (first, first + distance))
        blocks = np.array([place_of(tier, 0, row).block_page for row in ALL.tolist()])
    pages, data = [source.block_page, target.block_page], (written / "rows.lmdb").read_bytes()
    if damage == "zeroed page":
        put(written, pages[1] * PAGE, bytes(PAGE))
        bad = ALL[blocks == pages[1]]
    elif damage == "exchanged pages":
        for at, page in zip(pages, reversed(pages), strict=True):
            put(written, at * PAGE, data[page * PAGE : (page + 1) * PAGE])
        bad = ALL[np.isin(blocks, pages) & (pages[0] != pages[1])]
    elif damage == "another key":
        put(written, target.pair, data[source.pair : source.pair + 8])
    else:
        put(written, target.row, data[source.row : source.row + WIDE.row_bytes])
        if damage == "another row and pair":
            put(written, target.pair, data[source.pair : source.pair + 16])
    with reading(written) as tier:
        for row in bad.tolist():
            with pytest.raises(ChecksumError, match=rf"rows\.lmdb: row {row} of table 0 .*copy"):
                read_rows(tier, WIDE, keys_of(0, [row]))
        check_rows(tier, WIDE, keys_of(0, np.setdiff1d(ALL, bad)), 1)
        if len(bad):
            with pytest.raises(ChecksumError, match=rf"rows\.lmdb: .*row {bad[0]} of table 0 in segment .*copy"):
                tier.verify()


def test_an_older_page_of_the_same_place(tmp_path: Path) -> None:
    """As a device shows that lost a write: the page that lay there before, of the same rows and whole."""
    before: dict[int, bytes] = {}
    with writing(tmp_path) as tier:
        for version in range(1, 40):
            write_rows(tier, WIDE, keys_of(0, ALL), version)
            commit(tier, b"")
            data = tier.path.read_bytes()
            places = [place_of(tier, 0, row).block_page * PAGE for row in range(0, 1000, ROWS)]
            if lost := [(row, at) for row, at in zip(range(0, 1000, ROWS), places, strict=True) if at in before]:
                break
            before = {at: data[at : at + PAGE] for at in places} | before
    row, at = lost[0]
    assert before[at] != data[at : at + PAGE]
    put(tmp_path, at, before[at])
    with reading(tmp_path) as tier:
        with pytest.raises(ChecksumError, match=f"row {row} of table 0"):
            read_rows(tier, WIDE, keys_of(0, [row]))
        check_rows(tier, WIDE, keys_of(0, np.setdiff1d(ALL, np.arange(row, row + ROWS))), version)
        with pytest.raises(ChecksumError, match=f"row {row} of table 0 in segment"):
            tier.verify()


def test_free_pages_at_the_end_may_be_missing(written: Path) -> None:
    path = written / "rows.lmdb"
    with plain_lmdb(written, write=True) as txn:
        for number in range(20):
            txn.put(struct.pack(">QQ", 1 << 50, number), bytes(4080))
        for number in range(20):
            txn.delete(struct.pack(">QQ", 1 << 50, number))
    assert path.stat().st_size < (newest_meta(path).last_page + 1) * PAGE
    with writing(written) as tier:
        check_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
        write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 2)
        commit(tier, b"")
        tier.verify()


def test_another_lmdb_file(tmp_path: Path) -> None:
    with plain_lmdb(tmp_path, write=True) as txn:
        txn.put(b"some key 16 byte", b"value")
    with pytest.raises(FormatError, match="not a tierstore file"):
        open_tier(tmp_path)


def test_a_segment_missing_from_the_tree(written: Path) -> None:
    number = place(written, 0).number
    with plain_lmdb(written, write=True) as txn:
        assert txn.delete(segment_key(number))
    with pytest.raises(DamagedError, match=r"its tree has \d+ segments, and its record of the log counts \d+ others"):
        open_tier(written)


def test_a_segment_of_another_size(written: Path) -> None:
    number = place(written, 0).number
    with plain_lmdb(written, write=True) as txn:
        value = bytes(txn.get(segment_key(number)))
        txn.put(segment_key(number), value + bytes(PAGE))
    with reading(written) as tier, pytest.raises(DamagedError, match=f"segment {number} cannot be one of its tables'"):
        read_rows(tier, WIDE, keys_of(0, [0]))
    with plain_lmdb(written, write=True) as txn:
        txn.put(segment_key(number), value[:-8])
    with pytest.raises(DamagedError, match=f"segment {number}, which does not fill its pages"):
        open_tier(written)


def test_a_damaged_payload(written: Path) -> None:
    with writing(written) as tier:
        tier.commit(b"two", 2, keep=2)
    with plain_lmdb(written, write=True) as txn:
        txn.put(item_key(version_item(1, 0)), b"Payload" * 1000)
    with reading(written) as tier:
        assert tier.payload == b"two"
        with pytest.raises(ChecksumError, match="the payload of version 1 is damaged"):
            tier.verify()
    older = contextlib.closing(open_tier(written, readonly=True, version=1))
    with older as tier, pytest.raises(ChecksumError, match="payload"):
        _ = tier.payload


@pytest.fixture(scope="module", params=[make_sample, make_aged], ids=["new", "aged"])
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folders = [tmp_path_factory.mktemp("sample") / "store" for _ in range(2)]
    return [request.param(folder, seed) for seed, folder in enumerate(folders, 1)]


def _failures(cases: Sequence[Case], samples: list[Sample], **how: Any) -> list[Outcome]:
    outcomes = sweep(cases, samples, **how)
    assert sorted(outcome.case for outcome in outcomes) == sorted(cases)
    return [outcome for outcome in outcomes if outcome.failures]


def test_bytes_of_the_row_file(samples: list[Sample]) -> None:
    cases = [*flips(samples[0], all_bits=False, stride=809, files=["rows.lmdb"])]
    cases += flips(samples[0], all_bits=True, stride=1999, files=["rows.lmdb"])
    assert _failures(cases, samples, prepare=row_file) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_byte_of_the_row_file(samples: list[Sample]) -> None:
    assert _failures([*flips(samples[0], all_bits=False, files=["rows.lmdb"])], samples, prepare=row_file) == []
    assert _failures(list(flips(samples[0], all_bits=False, stride=101)), samples) == []
    assert _failures(list(page_damage(samples[0])), samples) == []


def test_bytes_that_lmdb_believes(samples: list[Sample]) -> None:
    data = samples[0].files["rows.lmdb"]
    trees = [
        at
        for at in range(2 * PAGE, len(data), PAGE)
        if data[at + 10] & 3 and int.from_bytes(data[at : at + 8], "little") == at // PAGE
    ]
    places = [*range(0, 152, 5), *range(PAGE, PAGE + 152, 5)]
    places += [
        at + offset for at in trees[:: max(1, len(trees) // 8)] for offset in (0, 10, 12, 14, 17, PAGE - 20, PAGE - 9)
    ]
    assert _failures([Case("flip", "rows.lmdb", at, 1 << at % 8) for at in places], samples) == []


def test_an_older_tree_that_calls_itself_the_newest(tmp_path: Path) -> None:
    """The older meta page numbered as if it came after the newer one: its tree is whole, and lacks the last commit."""
    with tierstore.open(tmp_path, ddr="1MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="item", num_embeddings=100, embedding_dim=8))
        store["item"].write(torch.arange(100), torch.ones(100, 8))
        store.commit()
    data = bytearray((tmp_path / "rows.lmdb").read_bytes())
    numbers = [int.from_bytes(data[page * PAGE + 144 : page * PAGE + 152], "little") for page in (0, 1)]
    older = int(numbers[1] < numbers[0])
    data[older * PAGE + 144 : older * PAGE + 152] = (numbers[older] + 2).to_bytes(8, "little")
    (tmp_path / "rows.lmdb").write_bytes(data)
    (tmp_path / "rows.anchor").unlink()  # it holds both pages as they were
    for mode in ("r", "w"):
        with pytest.raises(DamagedError, match=rf"rows\.lmdb: page {older} of its tree is damaged \(BAD_TOTALS\)"):
            tierstore.open(tmp_path, mode=mode)


def test_pages_cut_off_zeroed_and_swapped(samples: list[Sample]) -> None:
    cases = list(page_damage(samples[0]))
    assert _failures(cases[:: max(1, len(cases) // 60)], samples) == []


def test_files_of_two_stores_empty_and_missing(samples: list[Sample]) -> None:
    assert _failures(list(mixes(samples[0])), samples) == []


@pytest.mark.parametrize("version", [0, 3, 6])
@pytest.mark.parametrize("change", [rows_format, manifest_format])
def test_other_format_versions(samples: list[Sample], tmp_path: Path, change: Any, version: int) -> None:
    for name, content in change(samples[0].files, version).items():
        (tmp_path / name).write_bytes(content)
    for mode in ("r", "w"):
        with pytest.raises(FormatError, match=rf"format version {version}\b.* reads 4 and 5"):
            tierstore.open(tmp_path, mode=mode)  # type: ignore[arg-type]


def copy_store(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("rows.lmdb", SUPERBLOCK_NAME):
        shutil.copyfile(source / name, target / name)
    return target


@pytest.fixture
def synced(tmp_path: Path) -> Path:
    """The files as the last of two commits left them; "later" and "store" are as many write-backs left them, the
    latter closed."""
    generator, folder = np.random.default_rng(7), tmp_path / "store"
    folder.mkdir()
    with contextlib.closing(opened(folder)) as tier:
        for generation, payload in ((1, b"first"), (2, b"second")):
            write_rows(tier, WIDE, keys_of(0, ALL), generation)
            commit(tier, payload)
        copy_store(folder, tmp_path / "synced")
        for generation in range(10, 14):
            write_rows(tier, WIDE, keys_of(0, np.sort(generator.choice(ALL, 200, replace=False))), generation)
        copy_store(folder, tmp_path / "later")
    return tmp_path / "synced"


@pytest.fixture
def later(synced: Path) -> Path:
    return synced.with_name("later")


def check_second_commit(directory: Path) -> None:
    with contextlib.closing(opened(directory)) as tier:
        assert (tier.version, tier.payload) == (2, b"second")
        check_rows(tier, WIDE, keys_of(0, ALL), 2)
        tier.verify()
        write_rows(tier, WIDE, keys_of(0, ALL), 3)
        commit(tier, b"third")
    with contextlib.closing(opened(directory)) as tier:
        check_rows(tier, WIDE, keys_of(0, ALL), 3)


def test_a_meta_page_whose_write_failed_is_put_back(later: Path) -> None:
    """LMDB leaves the new roots under the old transaction number: no meta page, in the place that does not count."""
    path = later / "rows.lmdb"
    with path.open("r+b") as file:
        metas = [parse_meta(os.pread(file.fileno(), META_READ_BYTES, place)) for place in (0, 4096)]
        txn_ids = [meta.txn_id for meta in metas if isinstance(meta, Meta)]
        os.pwrite(file.fileno(), (1 << 31).to_bytes(8, "little"), txn_ids.index(min(txn_ids)) * 4096 + 128)
    with pytest.raises(DamagedError, match='open it once with mode="w"'):
        open_tier(path.parent, readonly=True)
    check_second_commit(path.parent)


def test_a_damaged_slot_leaves_the_other_and_two_are_an_error(later: Path) -> None:
    path = later / SUPERBLOCK_NAME
    content = bytearray(path.read_bytes())
    newest = superblock.newest_slot(bytes(content))
    content[newest.number % 2 * 4096 + 60] ^= 1
    other = superblock.newest_slot(bytes(content))
    assert other.number == newest.number - 1
    content[other.number % 2 * 4096 + 60] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"rows\.anchor is damaged"):
        open_tier(later)


def test_an_anchor_of_another_file_is_never_put_back(synced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superblock, "boot_id", lambda: b"another start...")
    older, store = copy_store(synced, synced.with_name("older")), synced.with_name("store")
    check_second_commit(store)  # and a third one, which sets a newer anchor
    shutil.copyfile(store / SUPERBLOCK_NAME, older / SUPERBLOCK_NAME)
    before = (older / "rows.lmdb").read_bytes()
    for readonly in (False, True):
        with pytest.raises(FormatError, match=r"is older than rows\.anchor"):
            open_tier(older, readonly=readonly)
        with pytest.raises(FormatError, match="belongs to store"):
            open_tier(synced, readonly=readonly, store_id=bytes(16))
    assert (older / "rows.lmdb").read_bytes() == before


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def recover(path: Path) -> None:
    with contextlib.closing(FileLocks(path, writable=True)) as locks:
        superblock.recover(path, STORE_ID, locks)


@pytest.mark.parametrize("what", ["rows", "free pages"])
def test_a_tree_that_is_not_whole_is_not_gone_back_to(later: Path, what: str) -> None:
    kept = superblock.load_superblock(later / "rows.lmdb", STORE_ID)
    meta = max((meta for meta in map(parse_meta, kept.metas) if isinstance(meta, Meta)), key=lambda meta: meta.txn_id)
    page = meta.main.page if what == "rows" else meta.free.page
    with (later / "rows.lmdb").open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 64, page * 4096)
    before = files(later)
    with pytest.raises(DamagedError, match=r'Nothing was changed\. mode="r" shows .* tierstore repair'):
        recover(later / "rows.lmdb")
    assert files(later) == before
    open_tier(later, readonly=True).close()
    with pytest.raises(DamagedError, match="Nothing was changed"):
        open_tier(later)
    assert files(later).items() >= before.items()


def test_a_recovery_that_was_cut_short_is_made_again(later: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two meta pages; the crash tests kill it behind them."""
    write, written = superblock.write_all, list[int]()

    def write_one(descriptor: int, data: bytes, offset: int) -> None:
        if written:
            raise MemoryError
        written.append(offset)
        write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(superblock, "write_all", write_one)
        with pytest.raises(MemoryError):
            recover(later / "rows.lmdb")
    recover(later / "rows.lmdb")
    check_second_commit(later)
