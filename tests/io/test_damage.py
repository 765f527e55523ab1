"""What is on disk is not what was written: each kind of damage has its clear error, and nothing crashes.

LMDB's own code trusts its file, so whatever could crash runs in the test's process only behind our checks.
"""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import NARROW, WIDE, add_tables, check_rows, commit, keys_of, read_rows, write_rows
from tests.io.support import flip, open_tier, page_of, plain_lmdb
from tierstore.errors import ChecksumError, DamagedError, FormatError, StoreNotFoundError, TruncatedError
from tierstore.io.files import check_rows_file
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.records import commit_item, item_key, payload_item

PAGE = 4096
ROWS = WIDE.rows_per_block


def _reopened(path: Path, *, readonly: bool = True) -> LmdbColdTier:
    tier = open_tier(path, readonly=readonly)
    add_tables(tier)
    return tier


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A closed, committed store: tables 0 and 1 full."""
    tier = open_tier(tmp_path)
    add_tables(tier)
    write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
    write_rows(tier, NARROW, keys_of(1, np.arange(5000)), 1)
    commit(tier, b"payload" * 1000)
    tier.close()
    return tmp_path


def _place(path: Path, block: int) -> int:
    """File offset of a block of table 0."""
    with _closing(_reopened(path)) as tier:
        return page_of(tier, 0, block) * PAGE


class _closing:
    def __init__(self, tier: LmdbColdTier) -> None:
        self.tier = tier

    def __enter__(self) -> LmdbColdTier:
        return self.tier

    def __exit__(self, *_: object) -> None:
        self.tier.close()


@pytest.mark.parametrize("word", [0, 31, 32, 33], ids=["first weight", "last weight", "state", "checksum"])
@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_a_flipped_bit_in_a_row(written: Path, word: int, row: int) -> None:
    block = 7
    flip(written, _place(written, block) + 32 + (row * WIDE.stored_row_words + word) * 8 + 3, bits=16)
    bad = block * ROWS + row
    with _closing(_reopened(written)) as tier:
        with pytest.raises(ChecksumError, match=rf"rows\.lmdb: row {bad} of table 0 .*copy"):
            check_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
        others = np.setdiff1d(np.arange(1000), [bad])
        check_rows(tier, WIDE, keys_of(0, others), 1)
        with pytest.raises(ChecksumError, match=f"row {bad} of table 0"):
            tier.verify()


def test_a_damaged_row_is_not_copied_into_a_new_block(written: Path) -> None:
    flip(written, _place(written, 3) + 32 + 5)
    with _closing(_reopened(written, readonly=False)) as tier:
        neighbour = 3 * ROWS + 1
        with pytest.raises(ChecksumError, match=f"row {3 * ROWS} of table 0"):
            write_rows(tier, WIDE, keys_of(0, [1, neighbour]), 2)
        check_rows(tier, WIDE, keys_of(0, [1, neighbour]), 1)
        whole = keys_of(0, np.arange(3 * ROWS, 4 * ROWS))
        write_rows(tier, WIDE, whole, 3)
        check_rows(tier, WIDE, whole, 3)
        commit(tier, b"")
        tier.verify()


@pytest.mark.parametrize("at", [16, 24], ids=["block key", "epoch"])
def test_a_flipped_bit_in_a_block_header(written: Path, at: int) -> None:
    flip(written, _place(written, 3) + at, bits=4)
    with _closing(_reopened(written, readonly=False)) as tier:
        with pytest.raises(ChecksumError, match=r"block 3 of table 0 .*BAD_HEADER"):
            tier.verify()
        with pytest.raises(ChecksumError, match=r"block 3 of table 0 .*BAD_HEADER"):
            write_rows(tier, WIDE, keys_of(0, [3 * ROWS]), 2)


def test_a_flipped_bit_in_a_page_header_is_seen_before_lmdb_believes_it(written: Path) -> None:
    flip(written, _place(written, 3) + 12, bits=2)  # number of pages
    with _closing(_reopened(written, readonly=False)) as tier:
        for rows in ([3 * ROWS], np.arange(3 * ROWS, 4 * ROWS)):
            with pytest.raises(ChecksumError, match=r"block 3 of table 0 .*BAD_PAGE_HEADER"):
                write_rows(tier, WIDE, keys_of(0, rows), 2)
        with pytest.raises(ChecksumError, match="BAD_PAGE_HEADER"):
            tier.verify()


def test_a_page_header_damaged_between_write_and_commit(written: Path) -> None:
    place = _place(written, 3)
    with _closing(_reopened(written, readonly=False)) as tier:
        write_rows(tier, WIDE, keys_of(0, [3 * ROWS]), 2)
        flip(written, place + 12, bits=2)
        with pytest.raises(DamagedError, match=r"block 3 of table 0 .*BAD_PAGE_HEADER"):
            commit(tier, b"")
        assert tier.version == 2  # what could not be deleted is what the version replaced
        flip(written, place + 12, bits=2)
        assert commit(tier, b"") == 3
        tier.verify()
    with plain_lmdb(written) as txn:
        assert txn.get(struct.pack(">QQ", 3, 1)) is None


def test_nonzero_padding(written: Path) -> None:
    flip(written, _place(written, 3) + PAGE - 4)
    with _closing(_reopened(written)) as tier, pytest.raises(ChecksumError, match="BAD_PADDING"):
        tier.verify()


def test_a_zeroed_page_is_damage_and_not_absent_rows(written: Path) -> None:
    with (written / "rows.lmdb").open("r+b") as file:
        file.seek(_place(written, 5))
        file.write(bytes(PAGE))
    with _closing(_reopened(written)) as tier:
        with pytest.raises(ChecksumError, match=f"row {5 * ROWS} of table 0"):
            read_rows(tier, WIDE, keys_of(0, [5 * ROWS]))
        with pytest.raises(ChecksumError, match="block 5 of table 0"):
            tier.verify()


def test_an_absent_row_must_be_zero(tmp_path: Path) -> None:
    with _closing(_reopened(tmp_path, readonly=False)) as tier:
        write_rows(tier, WIDE, keys_of(0, [0]), 1)
        commit(tier, b"")
        place = page_of(tier, 0, 0) * PAGE
    flip(tmp_path, place + 32 + WIDE.stored_row_words * 8)
    with _closing(_reopened(tmp_path)) as tier:
        check_rows(tier, WIDE, keys_of(0, [0]), 1)
        with pytest.raises(ChecksumError, match="row 1 of table 0"):
            read_rows(tier, WIDE, keys_of(0, [1]))
        with pytest.raises(ChecksumError, match="row 1 of table 0"):
            tier.verify()


def test_two_blocks_swapped(written: Path) -> None:
    a, b = _place(written, 5), _place(written, 6)
    with (written / "rows.lmdb").open("r+b") as file:
        data = file.read()
        file.seek(a + 16)
        file.write(data[b + 16 : b + PAGE])
        file.seek(b + 16)
        file.write(data[a + 16 : a + PAGE])
    with _closing(_reopened(written)) as tier:
        with pytest.raises(ChecksumError, match=f"row {5 * ROWS} of table 0"):
            read_rows(tier, WIDE, keys_of(0, [5 * ROWS]))
        with pytest.raises(ChecksumError, match="BAD_HEADER"):
            tier.verify()


def _truncate(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(int(size * share) // 512 * 512)

    return damage


def _wrong_version(path: Path) -> None:
    with path.open("r+b") as file:
        for page in (0, 1):
            file.seek(page * PAGE + 20)
            file.write(struct.pack("<I", 3))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path: path.write_bytes(b""), TruncatedError, "empty"),
        (lambda path: path.write_bytes(b"12345"), TruncatedError, "5 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), TruncatedError, "header"),
        (lambda path: path.write_bytes(bytes(100_000)), FormatError, "not an LMDB file"),
        (lambda path: path.write_bytes(b"\x89PNG" * 10_000), FormatError, "not an LMDB file"),
        (_wrong_version, FormatError, "version is 3, not 1"),
        (_truncate(0.999), TruncatedError, "bytes long"),
        (_truncate(0.5), TruncatedError, "bytes long"),
        (_truncate(0.03), TruncatedError, "bytes long"),
        (Path.unlink, StoreNotFoundError, "no such file"),
    ],
)
@pytest.mark.parametrize("readonly", [True, False])
def test_a_file_that_is_none(
    written: Path, damage: Callable[[Path], None], error: type[Exception], message: str, readonly: bool
) -> None:
    damage(written / "rows.lmdb")
    with pytest.raises(error, match=rf"rows\.lmdb: .*{message}.*copy"):
        open_tier(written, readonly=readonly, create=False)


def test_a_file_cut_while_it_is_open(written: Path) -> None:
    with _closing(_reopened(written)) as tier:
        check_rows(tier, WIDE, keys_of(0, [0]), 1)
        page = page_of(tier, 0, 40)
        with (written / "rows.lmdb").open("r+b") as file:
            file.truncate(page * PAGE)
        with pytest.raises(TruncatedError, match="beyond the end of the file"):
            read_rows(tier, WIDE, keys_of(0, [40 * ROWS]))
        with pytest.raises(DamagedError):
            tier.verify()


def test_free_pages_at_the_end_may_be_missing(written: Path) -> None:
    """LMDB may count pages that it never wrote, where they are free: that is no damage."""
    path = written / "rows.lmdb"
    with plain_lmdb(written, write=True) as txn:
        for number in range(20):
            txn.put(struct.pack(">QQ", 1 << 50, number), bytes(4080))
        for number in range(20):
            txn.delete(struct.pack(">QQ", 1 << 50, number))
    assert path.stat().st_size < (check_rows_file(path).last_page + 1) * PAGE
    with _closing(_reopened(written, readonly=False)) as tier:
        check_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
        write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 2)
        commit(tier, b"")
        tier.verify()


def test_files_of_two_stores_mixed(written: Path) -> None:
    with pytest.raises(FormatError, match="files of two stores"):
        open_tier(written, store_id=b"another store id")


def test_another_lmdb_file(tmp_path: Path) -> None:
    with plain_lmdb(tmp_path, write=True) as txn:
        txn.put(b"some key 16 byte", b"value")
    with pytest.raises(FormatError, match="not a tierstore file"):
        open_tier(tmp_path)


def test_an_lmdb_file_with_other_keys(tmp_path: Path) -> None:
    with plain_lmdb(tmp_path, write=True) as txn:
        txn.put(b"key", b"value")
    with pytest.raises(DamagedError, match="index is damaged"):
        open_tier(tmp_path)


def test_a_block_missing_from_the_index(written: Path) -> None:
    with plain_lmdb(written, write=True) as txn:
        assert txn.delete(struct.pack(">QQ", 9, 1))
    with pytest.raises(DamagedError, match=r"table 0 has \d+ blocks in the index, version 1 recorded"):
        open_tier(written)


def test_a_block_under_another_key(written: Path) -> None:
    with plain_lmdb(written, write=True) as txn:
        value = txn.pop(struct.pack(">QQ", 9, 1))
        txn.put(struct.pack(">QQ", 900, 1), value)
    with pytest.raises(DamagedError, match="others"):
        open_tier(written)


def test_a_block_of_another_size(written: Path) -> None:
    with plain_lmdb(written, write=True) as txn:
        txn.put(struct.pack(">QQ", 9, 1), bytes(2 * PAGE - 16))
    with _closing(_reopened(written)) as tier, pytest.raises(DamagedError, match="block 9 of table 0 cannot be"):
        read_rows(tier, WIDE, keys_of(0, [0]))


def test_a_damaged_commit_record(written: Path) -> None:
    with plain_lmdb(written, write=True) as txn:
        record = bytearray(txn.get(item_key(commit_item(1))))
        record[0] ^= 1
        txn.put(item_key(commit_item(1)), bytes(record))
    with pytest.raises(FormatError, match="commit record"):
        open_tier(written)


def test_a_damaged_payload(written: Path) -> None:
    with plain_lmdb(written, write=True) as txn:
        txn.put(item_key(payload_item(1, 0)), b"Payload" * 1000)
    with _closing(_reopened(written)) as tier, pytest.raises(ChecksumError, match="payload"):
        _ = tier.payload


def test_random_damage_never_passes_and_never_crashes(written: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any byte of a block or of the tree changed: an error, or the rows as they were written."""
    source = (written / "rows.lmdb").read_bytes()
    generator = np.random.default_rng(0)
    caught = 0
    for _ in range(60):
        folder = tmp_path_factory.mktemp("damaged")
        (folder / "rows.lmdb").write_bytes(source)
        flip(folder, int(generator.integers(2 * PAGE, len(source))), bits=1 << int(generator.integers(8)))
        try:
            with _closing(_reopened(folder)) as tier:
                _, present = read_rows(tier, WIDE, keys_of(0, np.arange(1000)))
                check_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
                check_rows(tier, NARROW, keys_of(1, np.arange(5000)), 1)
                assert present.all()
        except DamagedError:
            caught += 1
        shutil.rmtree(folder)
    assert caught > 40
