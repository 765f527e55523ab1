"""A segment's bytes, built and checked by the kernels, against a plain description of the format.

A block says of itself what it is, so that its rows are known without the index of their segment.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from tests.kernel_calls import from_python
from tierstore.io.segments import SegmentStatus, block_word, build_segment, check_index, geometry, unpack_block_word
from tierstore.kernels.jit import kernel
from tierstore.layout import RowLayout

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

Words = NDArray[np.uint64]

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
PAGE = 7  # where the segment lies in the image of a file

_check_index = from_python(check_index)


class Rows(NamedTuple):
    keys: list[int]
    epochs: list[int]
    contents: list[bytes]  # weights and state of each row


def oracle_seed(key: int, number: int, index: int) -> int:
    return (key * 0x9E3779B185EBCA87 + number * 0xC2B2AE3D27D4EB4F + index) % 2**64


def oracle_mix(first: int, second: int) -> int:
    """Two rounds of XXH64 and its last step, over two words."""
    prime_1, prime_2, prime_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    found = 0x27D4EB2F165667C5
    for word in (first, second):
        found = (found + word * prime_2) % 2**64
        found = (found << 31 | found >> 33) * prime_1 % 2**64
    found = (found ^ found >> 33) * prime_2 % 2**64
    found = (found ^ found >> 29) * prime_3 % 2**64
    return found ^ found >> 32


def oracle_block_word(number: int, newest: int, block: int, rows: int, is_last: bool) -> int:
    word = newest << 24 | is_last << 7 | block
    return word | (oracle_mix(number, word | rows << 8) & 0xFFFF) << 8


def oracle_index(layout: RowLayout, rows: Rows, number: int) -> bytes:
    """The words before the first block, as docs/format.md draws them, without LMDB's header."""
    is_mixed = len(set(rows.epochs)) > 1
    count = len(rows.keys) | is_mixed << 32
    body = struct.pack("<8sQQQQ", b"tierlogs", number, count, max(rows.epochs), min(rows.epochs))
    body += struct.pack(f"<{len(rows.keys)}Q", *rows.keys)
    body += struct.pack(f"<{len(rows.keys)}Q", *rows.epochs) if is_mixed else b""
    index = struct.pack("<Q", xxhash.xxh64_intdigest(body, seed=number)) + body
    return index + bytes(-(16 + len(index)) % layout.page_bytes)


def oracle_block(layout: RowLayout, rows: Rows, number: int, block: int) -> bytes:
    """The bytes of one block, header, pairs, rows and zeros."""
    first, size = block * layout.rows_per_block, layout.pages_per_block * layout.page_bytes
    pairs, payloads = [], []
    for index in range(first, min(first + layout.rows_per_block, len(rows.keys))):
        seed = oracle_seed(rows.keys[index], number, index)
        pairs.append(struct.pack("<QQ", rows.keys[index], xxhash.xxh64_intdigest(rows.contents[index], seed=seed)))
        payloads.append(rows.contents[index])
    is_last = first + len(pairs) == len(rows.keys)
    header = struct.pack("<QQ", number, oracle_block_word(number, max(rows.epochs), block, len(pairs), is_last))
    if layout.pages_per_block == 1:
        found = header + b"".join(pairs).ljust(16 * layout.rows_per_block, b"\0") + b"".join(payloads)
    else:
        found = header + b"".join(pair + payload for pair, payload in zip(pairs, payloads, strict=True))
    return found.ljust(size, b"\0")


def oracle_segment(layout: RowLayout, rows: Rows, number: int = NUMBER) -> bytes:
    blocks = range(-(-len(rows.keys) // layout.rows_per_block))
    return oracle_index(layout, rows, number) + b"".join(oracle_block(layout, rows, number, block) for block in blocks)


def some_rows(layout: RowLayout, count: int, epochs: list[int]) -> Rows:
    generator = np.random.default_rng(count)
    keys = generator.choice(1 << 45, count, replace=False).tolist()
    contents = [generator.bytes(layout.row_bytes) for _ in keys]
    return Rows(keys, [epochs[i % len(epochs)] for i in range(count)], contents)


def built(layout: RowLayout, rows: Rows, number: int = NUMBER) -> bytes:
    """The value of a segment, out of arenas where its rows lie in reverse; every byte of it is written."""
    count, row_words = len(rows.keys), layout.row_bytes // 8
    arena = np.frombuffer(b"".join(reversed(rows.contents)), np.uint64).reshape(count, row_words)
    weights, state = arena[:, : layout.weight_words].ravel(), arena[:, layout.weight_words :].ravel()
    epochs = np.array(rows.epochs if len(set(rows.epochs)) > 1 else rows.epochs[:1], np.uint64)
    pages = layout.segment_pages(count, is_mixed=len(epochs) > 1)
    image = np.full(pages * layout.page_bytes // 8 - 2, 0xDEAD, np.uint64)
    slots = np.arange(count, dtype=np.int32)[::-1].copy()
    build_segment(geometry(layout, 0), number, epochs, np.array(rows.keys), slots, weights, state, image)
    return image.tobytes()


def counts_of(layout: RowLayout) -> list[int]:
    """One row; a block and a row; all that a segment takes, and one less."""
    return sorted({1, min(layout.rows_per_block + 1, layout.rows_per_segment), layout.rows_per_segment - 1 or 1,
                   layout.rows_per_segment})  # fmt: skip


@pytest.mark.parametrize("epochs", [[9], [3, 9, 1 << 39]], ids=["one epoch", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_segment_is_what_the_format_says(layout: RowLayout, epochs: list[int]) -> None:
    for count in counts_of(layout):
        rows = some_rows(layout, count, epochs)
        assert built(layout, rows) == oracle_segment(layout, rows)


@kernel
def says_itself(number: np.uint64, word: np.uint64, rows: int) -> bool:
    newest, block, is_last = unpack_block_word(word)
    return bool(block_word(number, newest, block, rows, is_last) == word)


@kernel
def unpacked(word: np.uint64) -> tuple[np.uint64, int, bool]:
    return unpack_block_word(word)


def headers() -> "Iterator[tuple[int, int, np.uint64, np.uint64]]":
    """Of a segment of two full blocks and one of four rows: number of each, of its rows, and the words before it."""
    layout = LAYOUTS["no padding"]
    counts = [layout.rows_per_block, layout.rows_per_block, 4]
    value = built(layout, some_rows(layout, sum(counts), [1000]))
    pages = np.frombuffer(bytes(16) + value, np.uint64).reshape(-1, layout.page_bytes // 8)[-3:]
    yield from ((block, count, *page[:2]) for block, (count, page) in enumerate(zip(counts, pages, strict=True)))


def test_a_block_tells_its_segment_epoch_number_and_rows() -> None:
    for block, rows, number, word in headers():
        assert number == NUMBER
        assert unpacked(word) == (np.uint64(1000), block, block == 2)
        assert [each for each in range(1, 16) if says_itself(number, word, each)] == [rows]


def test_a_changed_bit_of_a_blocks_header_is_seen() -> None:
    for _, rows, number, word in headers():
        for bit in range(64):
            changed = np.uint64(1) << np.uint64(bit)
            assert not says_itself(number ^ changed, word, rows)
            assert not says_itself(number, word ^ changed, rows)


def in_a_file(layout: RowLayout, value: bytes, page: int = PAGE) -> Words:
    """An image of a file that ends with this segment."""
    pages = (16 + len(value)) // layout.page_bytes
    header = struct.pack("<QHHHH", page, 0, 0x04, pages % 2**16, pages >> 16)
    return np.frombuffer(bytes(page * layout.page_bytes) + header + value, np.uint64).copy()


def status_of(
    layout: RowLayout, words: Words, *, page: int = PAGE, pages: int | None = None, number: int = NUMBER
) -> int:
    limit = len(words) * 8 // layout.page_bytes
    pages = limit - page if pages is None else pages
    return int(_check_index(words, layout.page_bytes // 8, limit, page, pages, np.uint64(number)))


@pytest.mark.parametrize("epochs", [[9], [3, 9]], ids=["one epoch", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_flipped_bit_of_an_index_is_seen(layout: RowLayout, epochs: list[int]) -> None:
    rows = some_rows(layout, min(layout.rows_per_segment, 30), epochs)
    words = in_a_file(layout, oracle_segment(layout, rows))
    assert status_of(layout, words) == SegmentStatus.DONE
    start = PAGE * layout.page_bytes // 8
    bits_of = {start: (0, 18, 33), start + 1: (16, 18, 33)}  # of LMDB's header: page number, flags, number of pages
    for word in range(start, start + 2 + 6 + len(rows.keys) * len(epochs)):
        expected = SegmentStatus.BAD_PAGE_HEADER if word in bits_of else SegmentStatus.BAD_INDEX
        for bit in bits_of.get(word, range(0, 64, 5)):
            words[word] ^= np.uint64(1 << bit)
            assert status_of(layout, words) == expected, (word - start, bit)
            words[word] ^= np.uint64(1 << bit)


def sealed(value: bytes, number: int, *changes: tuple[int, int], count: int = 30) -> bytes:
    """An index with words changed, and the checksum that it then has."""
    words = np.frombuffer(value, np.uint64).copy()
    for word, content in changes:
        words[word] = content
    covered = words[1 : 6 + count].tobytes()
    words[0] = xxhash.xxh64_intdigest(covered, seed=number)
    return words.tobytes()


def damages() -> Iterator[tuple[str, Callable[[RowLayout, bytes], Any], SegmentStatus]]:
    """What a right checksum does not help."""
    yield (
        "another segment's number",
        lambda layout, value: {"value": value, "number": NUMBER + 1},
        SegmentStatus.BAD_INDEX,
    )
    yield (
        "a number that the tree does not say",
        lambda layout, value: {"value": sealed(value, NUMBER, (2, NUMBER + 1))},
        SegmentStatus.BAD_INDEX,
    )
    yield "another magic", lambda layout, value: {"value": sealed(value, NUMBER, (1, 77))}, SegmentStatus.BAD_INDEX
    yield "no rows", lambda layout, value: {"value": sealed(value, NUMBER, (3, 0), count=0)}, SegmentStatus.BAD_INDEX
    yield (
        "more rows than pages",
        lambda layout, value: {"value": sealed(value, NUMBER, (3, 1 << 31))},
        SegmentStatus.BAD_INDEX,
    )
    yield "fewer pages", lambda layout, value: {"value": value, "pages": 1}, SegmentStatus.BAD_PAGE_HEADER
    yield "beyond the end", lambda layout, value: {"value": value, "pages": 1000}, SegmentStatus.OUT_OF_FILE
    yield "in place of a meta page", lambda layout, value: {"value": value, "page": 1}, SegmentStatus.OUT_OF_FILE


@pytest.mark.parametrize(
    ("make", "expected"), [pytest.param(make, status, id=name) for name, make, status in damages()]
)
def test_what_is_no_such_segment(make: Callable[[RowLayout, bytes], Any], expected: SegmentStatus) -> None:
    layout = LAYOUTS["one page"]
    change = make(layout, oracle_segment(layout, some_rows(layout, 30, [9])))
    words = in_a_file(layout, change.pop("value"), change.get("page", PAGE))
    assert status_of(layout, words, **change) == expected
