"""The bytes of segments and checksums against a plain description of the format; rows of an older release.

``verify`` finds all that is not so, not the first place only, wherever segments lie and however many there are.
"""

import contextlib
import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.conformance.cold_tier import LONG, WIDE, commit, keys_of, write_rows
from tests.damage import PAGE, Sample, make_aged
from tests.io.support import RowPlace, flip, manifest_format, open_tier, opened, place_of, refuse, rows_format
from tests.kernels.calls import from_python
from tierstore.errors import ChecksumError, UnreadableError
from tierstore.io import verify
from tierstore.io.checksum import crc32c, crc32c_in_software, is_row, row_checksum
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.row_map import RowMap
from tierstore.io.segments import build_segment, geometry, stored_segments
from tierstore.io.snapshot import Snapshot
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import MAX_ROWS, RowLayout
from tierstore.offline.salvage import salvage

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

_CASTAGNOLI = 0x82F63B78  # the polynomial, its lowest coefficient the highest bit


def _shifted(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ _CASTAGNOLI * (byte & 1)
    return byte


_SHIFTED = [_shifted(byte) for byte in range(256)]


def oracle_crc32c(register: int, data: bytes) -> int:
    for byte in data:
        register = register >> 8 ^ _SHIFTED[(register ^ byte) & 0xFF]
    return register


def oracle_mix(first: int, second: int) -> int:
    prime_1, prime_2, prime_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    found = 0x27D4EB2F165667C5
    for word in (first, second):
        found = (found + word * prime_2) % 2**64
        found = (found << 31 | found >> 33) * prime_1 % 2**64
    found = (found ^ found >> 33) * prime_2 % 2**64
    found = (found ^ found >> 29) * prime_3 % 2**64
    return found ^ found >> 32


def oracle_checksum(content: bytes, seed: int) -> int:
    registers = [seed & 0xFFFF_FFFF, seed >> 32, 0, 0]
    for at in range(0, len(content), 8):
        registers = [*registers[1:], oracle_crc32c(registers[0], content[at : at + 8])]
    return oracle_mix(registers[0] | registers[1] << 32, registers[2] | registers[3] << 32)


def oracle_seed(key: int, number: int, index: int) -> int:
    return (key * 0x9E3779B185EBCA87 + number * 0xC2B2AE3D27D4EB4F + index) % 2**64


LAYOUTS = {
    "one page": RowLayout(dim=64, state_dim=1),
    "no padding": RowLayout(dim=64),  # 15 rows fill a page to its last byte
    "small rows": RowLayout(dim=3, dtype="float16"),  # the keys of a segment take pages
    "several pages": RowLayout(dim=3000, dtype="bfloat16", state_dim=3000),
    "long state": RowLayout(dim=300, state_dim=300),
    "quantized": RowLayout(dim=100, dtype="int4"),
    "large pages": RowLayout(dim=64, state_dim=1, page_bytes=16384),
}
NUMBER = (3 << 32) + 5


class Rows(NamedTuple):
    keys: list[int]
    epochs: list[int]
    contents: list[bytes]  # weights and state of each row


def oracle_block_word(newest: int, block: int, rows: int, is_last: bool) -> int:
    word = newest << 24 | is_last << 7 | block
    return word | (oracle_mix(NUMBER, word | rows << 8) & 0xFFFF) << 8


def oracle_index(layout: RowLayout, rows: Rows) -> bytes:
    is_mixed = len(set(rows.epochs)) > 1
    count = len(rows.keys) | is_mixed << 32
    body = struct.pack("<8sQQQQ", b"tierlogs", NUMBER, count, max(rows.epochs), min(rows.epochs))
    body += struct.pack(f"<{len(rows.keys)}Q", *rows.keys)
    body += struct.pack(f"<{len(rows.keys)}Q", *rows.epochs) if is_mixed else b""
    index = struct.pack("<Q", xxhash.xxh64_intdigest(body, seed=NUMBER)) + body
    return index + bytes(-(16 + len(index)) % layout.page_bytes)


def oracle_block(layout: RowLayout, rows: Rows, block: int) -> bytes:
    first, size = block * layout.rows_per_block, layout.pages_per_block * layout.page_bytes
    pairs, payloads = [], []
    for index in range(first, min(first + layout.rows_per_block, len(rows.keys))):
        seed = oracle_seed(rows.keys[index], NUMBER, index)
        pairs.append(struct.pack("<QQ", rows.keys[index], oracle_checksum(rows.contents[index], seed)))
        payloads.append(rows.contents[index])
    is_last = first + len(pairs) == len(rows.keys)
    header = struct.pack("<QQ", NUMBER, oracle_block_word(max(rows.epochs), block, len(pairs), is_last))
    if layout.pages_per_block == 1:
        found = header + b"".join(pairs).ljust(16 * layout.rows_per_block, b"\0") + b"".join(payloads)
    else:
        found = header + b"".join(pair + payload for pair, payload in zip(pairs, payloads, strict=True))
    return found.ljust(size, b"\0")


def oracle_segment(layout: RowLayout, rows: Rows) -> bytes:
    blocks = range(-(-len(rows.keys) // layout.rows_per_block))
    return oracle_index(layout, rows) + b"".join(oracle_block(layout, rows, block) for block in blocks)


def some_rows(layout: RowLayout, count: int, epochs: list[int]) -> Rows:
    generator = np.random.default_rng(count)
    keys = generator.choice(1 << 45, count, replace=False).tolist()
    contents = [generator.bytes(layout.row_bytes) for _ in keys]
    return Rows(keys, [epochs[i % len(epochs)] for i in range(count)], contents)


def built(layout: RowLayout, rows: Rows) -> bytes:
    """The value of a segment, out of arenas where its rows lie in reverse; every byte of it is written."""
    count, row_words = len(rows.keys), layout.row_bytes // 8
    arena = np.frombuffer(b"".join(reversed(rows.contents)), np.uint64).reshape(count, row_words)
    weights, state = arena[:, : layout.weight_words].ravel(), arena[:, layout.weight_words :].ravel()
    epochs = np.array(rows.epochs if len(set(rows.epochs)) > 1 else rows.epochs[:1], np.uint64)
    pages = layout.segment_pages(count, is_mixed=len(epochs) > 1)
    image = np.full(pages * layout.page_bytes // 8 - 2, 0xDEAD, np.uint64)
    slots = np.arange(count, dtype=np.int32)[::-1].copy()
    build_segment(geometry(layout, 0), NUMBER, epochs, np.array(rows.keys), slots, weights, state, image)
    return image.tobytes()


@pytest.mark.parametrize("epochs", [[9], [3, 9, 1 << 39]], ids=["one epoch", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_segment_is_what_the_format_says(layout: RowLayout, epochs: list[int]) -> None:
    most, a_block = layout.rows_per_segment, layout.rows_per_block
    for count in {1, min(a_block + 1, most), max(most - 1, 1), most}:
        rows = some_rows(layout, count, epochs)
        assert built(layout, rows) == oracle_segment(layout, rows)


_READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
)
PUBLISHED = {  # RFC 3720, appendix B.4
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    _READ_COMMAND: 0xD9963A56,
}


_checksum, _is_row = from_python(row_checksum), from_python(is_row)


@pytest.mark.parametrize("compute", [crc32c, crc32c_in_software])
def test_published_values(compute: Any) -> None:
    for data, expected in PUBLISHED.items():
        words = np.frombuffer(data, np.uint64)
        assert int(functools.reduce(from_python(compute), words, np.uint64(0xFFFF_FFFF))) ^ 0xFFFF_FFFF == expected


@given(content=st.binary(max_size=200), seed=st.integers(0, 2**64 - 1), start=st.integers(0, 3), bit=st.integers(0))
def test_a_checksum_is_what_the_format_says(content: bytes, seed: int, start: int, bit: int) -> None:
    """Of any number of words; a row matches it, or that of older releases, and with any bit flipped neither."""
    content = content[: len(content) // 8 * 8]
    words = np.frombuffer(bytes(8 * start) + content, np.uint64).copy()
    num_words, own_seed = len(content) // 8, np.uint64(seed)
    expected = oracle_checksum(content, seed)
    assert int(_checksum(words, start, num_words, own_seed)) == expected
    kinds = [np.uint64(each) for each in (expected, xxhash.xxh64_intdigest(content, seed=seed))]
    assert [_is_row(words, start, num_words, own_seed, each) for each in kinds] == [True, True]
    assert not any(_is_row(words, start, num_words, own_seed ^ np.uint64(1 << bit % 64), each) for each in kinds)
    if num_words:
        words[start + bit // 64 % num_words] ^= np.uint64(1 << bit % 64)
        assert not any(_is_row(words, start, num_words, own_seed, each) for each in kinds)


OLD_ROWS, ROW_BYTES = 200, 4 * 64


def make_older(folder: Path, places: list[RowPlace]) -> None:
    """Give the rows the checksums, and the files the version, of the release before."""
    data = bytearray((folder / "rows.lmdb").read_bytes())
    for row, place in enumerate(places):
        content = bytes(data[place.row : place.row + ROW_BYTES])
        checksum = xxhash.xxh64_intdigest(content, seed=oracle_seed(row, place.number, place.index))
        assert data[place.pair + 8 : place.pair + 16] != checksum.to_bytes(8, "little")
        struct.pack_into("<QQ", data, place.pair, row, checksum)
    files = {"rows.lmdb": bytes(data), "manifest.json": (folder / "manifest.json").read_bytes()}
    for name, content in rows_format(manifest_format(files, 4), 4).items():
        (folder / name).write_bytes(content)


def test_rows_of_an_older_release(tmp_path: Path) -> None:
    folder, table = tmp_path / "store", tierstore.TableConfig(name="item", num_embeddings=300, embedding_dim=64)
    rows = torch.arange(300.0)[:, None].expand(-1, 64).contiguous()

    def reading(folder: Path) -> tierstore.Store:
        return tierstore.open(folder, mode="r", ddr="1MiB", threads=1)

    with tierstore.open(folder, ddr="1MiB", threads=1) as store:
        store.create_table(table).write(torch.arange(OLD_ROWS), rows[:OLD_ROWS])
        store.commit()
        places = [place_of(store._cold, 0, row) for row in range(OLD_ROWS)]
    make_older(folder, places)
    with reading(folder) as store:
        store.verify()
        assert torch.equal(store["item"].read(torch.arange(OLD_ROWS)), rows[:OLD_ROWS])
    rows[150:] += 1000
    with tierstore.open(folder, ddr="1MiB", threads=1) as store:
        store["item"].write(torch.arange(150, 300), rows[150:])
        store.commit()
        places = [place_of(store._cold, 0, row) for row in range(300)]
    formats = {part[0] for part in (folder / "rows.lmdb").read_bytes().split(b"tierrows")[1:]}
    assert 5 in formats <= {4, 5}
    with reading(folder) as store:
        store.verify()
        assert torch.equal(store["item"].read(torch.arange(300)), rows)
    for row in (3, 250):
        flip(folder, places[row].row + 100)
        with reading(folder) as store:
            for use in (lambda store=store: store["item"].read(torch.arange(300)), store.verify):
                with pytest.raises(ChecksumError, match=f"row {row} of table 0"):
                    use()
        flip(folder, places[row].row + 100)
    for page in {place.segment_page for place in places}:
        flip(folder, page * PAGE + 16 + 8 * 6)  # a key in the index: rows are found block by block
    report = salvage(folder, tmp_path / "saved")
    assert (report.rows, report.missing, report.lost) == (300, 0, [])
    with reading(tmp_path / "saved") as store:
        assert torch.equal(store["item"].read(torch.arange(300)), rows)


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


IMPOSSIBLE = [
    (5, 0), (4, 99),  # the oldest and the newest epoch
    (3, 1 << 32 | 54), (3, 53), (3, 30),  # mixed epochs, fewer rows, fewer blocks
    (6, 1000), (7, 1000), (7, 1 << 40), (7, 1 << 63),  # keys: no row of the table, another layout, no key
]  # fmt: skip


def test_an_index_that_says_what_cannot_be(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(54)), 7)
        place, whole = place_of(tier, 0, 0), tier.path.read_bytes()
        for word, content in IMPOSSIBLE:
            _say(tmp_path, place, word, content)
            with pytest.raises(ChecksumError, match=rf"segment {place.number} is damaged \(BAD_"):
                tier.verify()
            tier.path.write_bytes(whole)
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


@pytest.mark.parametrize("size", [1, 5])
def test_slices_of_any_size_find_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    calls: list[tuple[int, int]] = []
    with leased(folder) as (tier, tree, _):
        report, stored = tier.verify(), stored_segments(tree)
        place = place_of(tier, 2, 0)
        assert report == (3, len(stored), NUM_ROWS, int(stored["pages"].sum()) * PAGE)
        monkeypatch.setattr(verify, "SLICE_SEGMENTS", size)
        assert tier.verify(progress=lambda done, total: calls.append((done, total))) == report
    assert calls == sorted(calls)
    assert calls[-1] == ((folder / "rows.lmdb").stat().st_size,) * 2
    assert len(calls) == -(-len(stored) // size) + 1
    flip(folder, place.row + 40)
    assert f"row 0 of table 2 in segment {place.number}" in error(folder)


def test_of_tables_that_are_not_known_the_index_is_checked(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(100)), 1)
        write_rows(tier, LONG, keys_of(5, np.arange(10)), 1)
        commit(tier, b"")
        place = place_of(tier, 5, 3)
        known = tier.verify()
    with contextlib.closing(open_tier(tmp_path, readonly=True)) as reader:
        reader.set_tables({0: (WIDE, 1000)})
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
        tier.set_tables({0: (layout, 10)})
        write_rows(tier, layout, keys_of(0, [1]), 1)
        place = place_of(tier, 0, 1)
        refuse(tier._file.map.rows.guard, place.block_page + 2)
        with pytest.raises(UnreadableError, match=rf"rows\.lmdb: segment {place.number} cannot be read.*log says why"):
            tier.verify()
        tier.verify()
