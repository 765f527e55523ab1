"""The checksum of a row against published values and a plain description of it; rows of older releases."""

import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.damage import PAGE
from tests.io.support import RowPlace, flip, manifest_format, oracle_checksum, oracle_seed, place_of, rows_format
from tierstore.errors import ChecksumError
from tierstore.io.checksum import crc32c, crc32c_in_software, is_row, row_checksum
from tierstore.kernels.arrays import Words
from tierstore.kernels.jit import kernel
from tierstore.offline.salvage import salvage

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

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


@kernel
def _crc32c(words: Words, register: np.uint64) -> np.uint64:
    for i in range(len(words)):
        register = crc32c(register, words[i])
    return register


@kernel
def _crc32c_in_software(words: Words, register: np.uint64) -> np.uint64:
    for i in range(len(words)):
        register = crc32c_in_software(register, words[i])
    return register


@kernel
def _checksum(words: Words, start: int, num_words: int, seed: np.uint64) -> np.uint64:
    return row_checksum(words, start, num_words, seed)


@kernel
def _is_row(words: Words, start: int, num_words: int, seed: np.uint64, checksum: np.uint64) -> bool:
    return is_row(words, start, num_words, seed, checksum)


@pytest.mark.parametrize("compute", [_crc32c, _crc32c_in_software])
def test_published_values(compute: Callable[[Words, np.uint64], np.uint64]) -> None:
    for data, expected in PUBLISHED.items():
        assert int(compute(np.frombuffer(data, np.uint64), np.uint64(0xFFFF_FFFF))) ^ 0xFFFF_FFFF == expected


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


@pytest.mark.parametrize("num_words", [*range(2, 14), 33, 64])
def test_words_that_change_alike_are_found(num_words: int) -> None:
    seed, one = np.uint64(num_words), np.uint64(1 << 63)
    words = np.random.default_rng(num_words).integers(0, 2**64, num_words, np.uint64)
    changed = [words ^ one, ~words]
    for pair in itertools.combinations(range(num_words), 2):
        changed += [words.copy(), words.copy()]
        changed[-1][list(pair)] = words[list(reversed(pair))]
        changed[-2][list(pair)] ^= one
    known = _checksum(words, 0, num_words, seed)
    assert not [each for each in changed if _checksum(each, 0, num_words, seed) == known]
    equal = np.full(num_words, 0x3F8000003F800000, np.uint64)
    assert _checksum(equal, 0, num_words, seed) != _checksum(np.zeros_like(equal), 0, num_words, seed)


TABLE = tierstore.TableConfig(name="item", num_embeddings=300, embedding_dim=64)
ROW_BYTES = 4 * 64


def _format(folder: Path) -> set[int]:
    parts = (folder / "rows.lmdb").read_bytes().split(b"tierrows")[1:]
    return {int.from_bytes(part[:8], "little") for part in parts}


def _make_older(folder: Path, places: dict[int, RowPlace]) -> None:
    data = bytearray((folder / "rows.lmdb").read_bytes())
    for row, place in places.items():
        content = bytes(data[place.row : place.row + ROW_BYTES])
        checksum = xxhash.xxh64_intdigest(content, seed=oracle_seed(row, place.number, place.index))
        assert data[place.pair + 8 : place.pair + 16] != checksum.to_bytes(8, "little")
        struct.pack_into("<QQ", data, place.pair, row, checksum)
    files = {"rows.lmdb": bytes(data), "manifest.json": (folder / "manifest.json").read_bytes()}
    for name, content in rows_format(manifest_format(files, 4), 4).items():
        (folder / name).write_bytes(content)


def _values(rows: torch.Tensor, generation: int) -> torch.Tensor:
    return (rows + 1000.0 * generation)[:, None].expand(-1, 64).contiguous()


def test_rows_of_an_older_release(tmp_path: Path) -> None:
    older, newer = torch.arange(200), torch.arange(150, 300)
    with tierstore.open(tmp_path / "store", ddr="1MiB", threads=1) as store:
        store.create_table(TABLE).write(older, _values(older, 1))
        store.commit()
        places = {row: place_of(store._cold, 0, row) for row in older.tolist()}
    _make_older(tmp_path / "store", places)
    with tierstore.open(tmp_path / "store", mode="r", ddr="1MiB", threads=1) as store:
        store.verify()
        assert torch.equal(store["item"].read(older), _values(older, 1))
    assert _format(tmp_path / "store") == {4}
    with tierstore.open(tmp_path / "store", mode="w", ddr="1MiB", threads=1) as store:
        store["item"].write(newer, _values(newer, 2))
        store.commit()
    assert 5 in _format(tmp_path / "store")
    expected = torch.cat([_values(older[:150], 1), _values(newer, 2)])
    with tierstore.open(tmp_path / "store", mode="r", ddr="1MiB", threads=1) as store:
        store.verify()
        assert torch.equal(store["item"].read(torch.arange(300)), expected)
        places |= {row: place_of(store._cold, 0, row) for row in newer.tolist()}
    for row in (3, 250):
        flip(tmp_path / "store", places[row].row + 100)
        with tierstore.open(tmp_path / "store", mode="r", ddr="1MiB", threads=1) as store:
            with pytest.raises(ChecksumError, match=f"row {row} of table 0"):
                store["item"].read(torch.arange(300))
            with pytest.raises(ChecksumError, match=f"row {row} of table 0"):
                store.verify()
        flip(tmp_path / "store", places[row].row + 100)
    for page in {place.segment_page for place in places.values()}:
        flip(tmp_path / "store", page * PAGE + 16 + 8 * 6)  # a key in the index: rows are found block by block
    report = salvage(tmp_path / "store", tmp_path / "saved")
    assert (report.rows, report.missing, report.lost) == (300, 0, [])
    with tierstore.open(tmp_path / "saved", mode="r", ddr="1MiB", threads=1) as store:
        assert torch.equal(store["item"].read(torch.arange(300)), expected)
