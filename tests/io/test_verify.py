"""verify finds all damage, not the first place only, wherever the segments lie and however many there are."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

import tierstore
from tests.conformance.cold_tier import LONG, WIDE, commit, keys_of, write_rows
from tests.damage import PAGE, Sample, make_aged
from tests.io.support import RowPlace, flip, open_tier, opened, place_of, refuse
from tierstore.errors import ChecksumError, UnreadableError
from tierstore.io import verify
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.row_map import RowMap
from tierstore.io.segments import stored_segments
from tierstore.io.snapshot import Snapshot
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import MAX_ROWS, RowLayout

pytestmark = pytest.mark.kernel

NUM_ROWS = 56 + 600 + 4 - 3  # of the sample: the last row of each table is absent


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_aged(tmp_path_factory.mktemp("sample") / "store", seed=3)


@pytest.fixture
def folder(sample: Sample, tmp_path: Path) -> Path:
    for name, content in sample.files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@contextlib.contextmanager
def leased(folder: Path) -> Iterator[tuple[LmdbColdTier, Snapshot, RowMap]]:
    with tierstore.open(folder, mode="r", ddr="1MiB") as store, store._cold.lease() as (snapshot, rows):
        yield store._cold, snapshot, rows


def error(folder: Path) -> str:
    with tierstore.open(folder, mode="r", ddr="1MiB") as store, pytest.raises(ChecksumError) as caught:
        store.verify()
    return str(caught.value)


def test_every_damaged_place_is_named(folder: Path) -> None:
    with leased(folder) as (tier, _, _):
        first, second, third, last = (place_of(tier, *row) for row in ((0, 3), (0, 9), (1, 500), (2, 1)))
    flip(folder, last.segment_page * PAGE + 1000)
    flip(folder, first.row)
    flip(folder, second.pair + 8)
    flip(folder, third.block_page * PAGE + 8)
    message = error(folder)
    assert message.startswith(f"{folder / 'rows.lmdb'}: ")
    named = [
        f"segment {third.number} is damaged (BAD_BLOCK)",
        f"segment {last.number} is damaged (BAD_PADDING)",
        f"row 3 of table 0 in segment {first.number} does not match its checksum",
        f"row 9 of table 0 in segment {second.number} does not match its checksum",
    ]
    assert "; ".join(sorted(named[:2]) + named[2:]) in message
    assert "tierstore repair DIR NEW_DIR" in message


def _say(folder: Path, place: RowPlace, word: int, content: int) -> None:
    data = np.fromfile(folder / "rows.lmdb", np.uint64)
    index = data[place.segment_page * PAGE // 8 + 2 :]
    index[word] = content
    num, is_mixed = int(index[3]) & 0xFFFF_FFFF, int(index[3]) >> 32
    index[0] = xxhash.xxh64_intdigest(index[1 : 6 + num * (1 + is_mixed)].tobytes(), seed=place.number)
    data.tofile(folder / "rows.lmdb")


IMPOSSIBLE = {"oldest": (5, 0), "newest": (4, 99), "mixed": (3, 1 << 32 | 54), "fewer rows": (3, 53),
              "fewer blocks": (3, 30), "no row": (6, 1000), "no row later": (7, 1000), "another layout": (7, 1 << 40),
              "no key": (7, 1 << 63)}  # fmt: skip


@pytest.mark.parametrize(("word", "content"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_index_that_says_what_cannot_be(tmp_path: Path, word: int, content: int) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(54)), 7)
        place = place_of(tier, 0, 0)
        tier.verify()
        _say(tmp_path, place, word, content)
        with pytest.raises(ChecksumError, match=rf"segment {place.number} is damaged \(BAD_"):
            tier.verify()


def test_epochs_that_the_index_denies(folder: Path) -> None:
    with leased(folder) as (tier, tree, rows):
        segments = rows.segments[rows.layouts[2]]
        [slot, *_] = np.flatnonzero(segments.arrays.newest != segments.arrays.oldest)
        keys, _ = rows.live_rows(tree, segments.layout, np.array([slot]))
        place, num = place_of(tier, 2, int(keys[0]) % MAX_ROWS), int(segments.arrays.rows[slot])
        whole = (folder / "rows.lmdb").read_bytes()
        for word in (6 + num, 6 + 2 * num - 1):
            for epoch in (segments.arrays.oldest[slot] - 1, segments.arrays.newest[slot] + 1):
                _say(folder, place, word, epoch)
                with pytest.raises(ChecksumError, match=rf"segment {place.number} is damaged \(BAD_INDEX\)"):
                    tier.verify()
                (folder / "rows.lmdb").write_bytes(whole)
        tier.verify()


def test_slices_of_any_size_find_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    with leased(folder) as (tier, tree, _):
        report, stored = tier.verify(), stored_segments(tree)
        place = place_of(tier, 2, 0)
    assert report == (3, len(stored), NUM_ROWS, int(stored["pages"].sum()) * PAGE)
    flip(folder, place.row + 40)
    whole = error(folder)
    flip(folder, place.row + 40)
    for size in (1, 2, 5, 100):
        monkeypatch.setattr(verify, "SLICE_SEGMENTS", size)
        with tierstore.open(folder, mode="r", ddr="1MiB") as store:
            assert store.verify(progress=lambda done, total: calls.append((done, total))) == report
        flip(folder, place.row + 40)
        assert error(folder) == whole
        flip(folder, place.row + 40)
        assert calls == sorted(calls)
        assert calls[-1] == ((folder / "rows.lmdb").stat().st_size,) * 2
        assert len(calls) == -(-len(stored) // size) + 1
        calls.clear()


def test_of_tables_that_are_not_known_the_index_is_checked(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(100)), 1)
        write_rows(tier, LONG, keys_of(5, np.arange(10)), 1)
        commit(tier, b"")
        place = place_of(tier, 5, 3)
        known = tier.verify()
    with contextlib.closing(open_tier(tmp_path, readonly=True)) as reader:
        reader.add_table(0, WIDE, 1000)
        flip(tmp_path, place.row)
        report = reader.verify()
        assert (report.tables, report.rows) == (1, 100)
        assert report.segments < known.segments
        flip(tmp_path, place.segment_page * PAGE + 16 + 48)
        with pytest.raises(ChecksumError, match=rf"segment {place.number} is damaged \(BAD_INDEX\)"):
            reader.verify()


@pytest.mark.skipif(not JIT_ENABLED, reason="without compiled code a refused page ends the process")
def test_a_page_of_zeros_that_cannot_be_read(tmp_path: Path) -> None:
    """What the device refuses reads as zeros, which would be right here."""
    with contextlib.closing(open_tier(tmp_path)) as tier:
        layout = RowLayout(dim=1500)
        assert (layout.rows_per_block, layout.pages_per_block) == (2, 3)
        tier.add_table(0, layout, 10)
        write_rows(tier, layout, keys_of(0, [1]), 1)
        place = place_of(tier, 0, 1)
        refuse(tier._file.map.rows.guard, place.block_page + 2)
        with pytest.raises(UnreadableError, match=rf"rows\.lmdb: segment {place.number} cannot be read.*log says why"):
            tier.verify()
        tier.verify()
