"""verify finds all damage, not the first place only, wherever the blocks lie and however many there are."""

from pathlib import Path

import numpy as np
import pytest

import tierstore
from bench.damage import PAGE, Sample, make_sample
from tierstore.errors import ChecksumError, DamagedError
from tierstore.inspection import verify_store
from tierstore.io import verify
from tierstore.io.blocks import BlockStatus

pytestmark = pytest.mark.kernel

WIDE_ROWS = 14  # of 64 float32 and a column of state in a page of 4 KiB
WIDE_ROW_BYTES = 34 * 8


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("sample") / "store", seed=3)


@pytest.fixture
def folder(sample: Sample, tmp_path: Path) -> Path:
    for name, content in sample.files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def _block_pages(sample: Sample, version: int) -> dict[tuple[int, int], int]:
    """Page of each block of that epoch, by table and number, found by its header."""
    words = np.frombuffer(sample.files["rows.lmdb"], np.uint64).reshape(-1, PAGE // 8)
    found = {}
    for page, (number, head, key, epoch) in enumerate(words[:, :4].tolist()):
        if number == page and head >> 16 & 0xFFFF == 4 and epoch == version and key >> 62 == 0:
            found[key >> 40, key & (1 << 40) - 1] = page
    return found


def _flip(folder: Path, offset: int) -> None:
    data = bytearray((folder / "rows.lmdb").read_bytes())
    data[offset] ^= 4
    (folder / "rows.lmdb").write_bytes(data)


def _error(folder: Path) -> str:
    with tierstore.open(folder, mode="r", ddr="1MiB") as store, pytest.raises(ChecksumError) as caught:
        store.verify()
    return str(caught.value)


def test_every_damaged_place_is_named(folder: Path, sample: Sample) -> None:
    pages = _block_pages(sample, 2)
    first, second = pages[0, 1] * PAGE, pages[0, 3] * PAGE
    _flip(folder, first + 32 + 3 * WIDE_ROW_BYTES)
    _flip(folder, first + 32 + 9 * WIDE_ROW_BYTES + 8)
    _flip(folder, second + 17)
    _flip(folder, pages[1, 0] * PAGE + PAGE - 1)
    message = _error(folder)
    assert message.startswith(f"{folder / 'rows.lmdb'}: ")
    for place in (
        f"row {WIDE_ROWS + 3} of table 0 does not match its checksum",
        f"row {WIDE_ROWS + 9} of table 0 does not match its checksum",
        f"block 3 of table 0 is damaged ({BlockStatus.BAD_HEADER.name})",
        f"block 0 of table 1 is damaged ({BlockStatus.BAD_PADDING.name})",
    ):
        assert place in message
    assert "tierstore repair DIR NEW_DIR" in message


def test_many_places_are_counted_and_the_first_ones_named(folder: Path, sample: Sample) -> None:
    """A page of a table with hundreds of rows zeroed: each of its rows is damaged, and the block's two headers."""
    data = bytearray((folder / "rows.lmdb").read_bytes())
    page = _block_pages(sample, 2)[1, 1]
    data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    (folder / "rows.lmdb").write_bytes(data)
    with tierstore.open(folder, mode="r", ddr="1MiB") as store:
        num_places = store["narrow"].layout.rows_per_block + 2
    message = _error(folder)
    assert f"and {num_places - 8} more places, {num_places} in all" in message
    assert message.count("; ") == 8


def test_ranges_and_slices_of_any_size_find_the_same(
    folder: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    _flip(folder, _block_pages(sample, 2)[2, 0] * PAGE + 40)
    whole = _error(folder)
    for range_pages, slice_pages in ((1, 1), (7, 2), (16, 5), (64, 1)):
        monkeypatch.setattr(verify, "RANGE_PAGES", range_pages)
        monkeypatch.setattr(verify, "_SLICE_PAGES", slice_pages)
        assert _error(folder) == whole


def test_what_is_counted_does_not_depend_on_ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tierstore.open(folder, mode="r", ddr="1MiB") as store:
        calls: list[tuple[int, int]] = []
        report = store.verify(progress=lambda done, total: calls.append((done, total)))
        assert report.tables == 3
        assert report.rows == 420 + 400 + 3 - 3 * 2
        monkeypatch.setattr(verify, "RANGE_PAGES", 5)
        monkeypatch.setattr(verify, "_SLICE_PAGES", 3)
        assert store.verify() == report
    assert calls[-1] == ((folder / "rows.lmdb").stat().st_size,) * 2


def test_a_damaged_free_list_is_found_by_a_reader_too(folder: Path, sample: Sample) -> None:
    words = np.frombuffer(sample.files["rows.lmdb"], np.uint64)
    newest = max((0, 1), key=lambda page: int(words[page * 512 + 18]))
    free_root = int(words[newest * 512 + 10])
    assert free_root < len(words) // 512
    _flip(folder, free_root * PAGE + PAGE - 8)
    with pytest.raises(DamagedError, match=r"rows\.lmdb: page"), tierstore.open(folder, mode="r", ddr="1MiB") as store:
        store.verify()


def test_in_words(folder: Path) -> None:
    assert "version 2 is sound: 817 rows in" in verify_store(folder)
