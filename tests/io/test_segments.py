"""A segment's bytes, built and checked by the kernels, against a plain description of the format.

A block says of itself what it is, so that its rows are known without the index of their segment.
"""

import struct
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from tests.io.support import oracle_checksum, oracle_mix, oracle_seed
from tierstore.io.segments import build_segment, geometry
from tierstore.layout import RowLayout

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

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


def oracle_block_word(number: int, newest: int, block: int, rows: int, is_last: bool) -> int:
    word = newest << 24 | is_last << 7 | block
    return word | (oracle_mix(number, word | rows << 8) & 0xFFFF) << 8


def oracle_index(layout: RowLayout, rows: Rows, number: int) -> bytes:
    is_mixed = len(set(rows.epochs)) > 1
    count = len(rows.keys) | is_mixed << 32
    body = struct.pack("<8sQQQQ", b"tierlogs", number, count, max(rows.epochs), min(rows.epochs))
    body += struct.pack(f"<{len(rows.keys)}Q", *rows.keys)
    body += struct.pack(f"<{len(rows.keys)}Q", *rows.epochs) if is_mixed else b""
    index = struct.pack("<Q", xxhash.xxh64_intdigest(body, seed=number)) + body
    return index + bytes(-(16 + len(index)) % layout.page_bytes)


def oracle_block(layout: RowLayout, rows: Rows, number: int, block: int) -> bytes:
    first, size = block * layout.rows_per_block, layout.pages_per_block * layout.page_bytes
    pairs, payloads = [], []
    for index in range(first, min(first + layout.rows_per_block, len(rows.keys))):
        seed = oracle_seed(rows.keys[index], number, index)
        pairs.append(struct.pack("<QQ", rows.keys[index], oracle_checksum(rows.contents[index], seed)))
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
    return sorted({1, min(layout.rows_per_block + 1, layout.rows_per_segment), layout.rows_per_segment - 1 or 1,
                   layout.rows_per_segment})  # fmt: skip


@pytest.mark.parametrize("epochs", [[9], [3, 9, 1 << 39]], ids=["one epoch", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_segment_is_what_the_format_says(layout: RowLayout, epochs: list[int]) -> None:
    for count in counts_of(layout):
        rows = some_rows(layout, count, epochs)
        assert built(layout, rows) == oracle_segment(layout, rows)
