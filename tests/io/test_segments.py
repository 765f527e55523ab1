"""A block says of itself what it is, so that its rows are known without the index of their segment."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore._jit import kernel
from tierstore.io.segments import block_word, build_segment, geometry, unpack_block_word
from tierstore.rows import PAGE_HEADER_WORDS, RowLayout

pytestmark = pytest.mark.kernel

LAYOUT = RowLayout(dim=64)
NUMBER, NEWEST = 5 << 32 | 7, 1000


@kernel
def says_itself(number: np.uint64, word: np.uint64, rows: int) -> bool:
    newest, block, is_last = unpack_block_word(word)
    return bool(block_word(number, newest, block, rows, is_last) == word)


@kernel
def unpacked(word: np.uint64) -> tuple[np.uint64, int, bool]:
    return unpack_block_word(word)


@pytest.fixture(scope="module")
def headers() -> NDArray[np.uint64]:
    """The two words before each block of a segment of two full blocks and one of four rows."""
    num = 2 * LAYOUT.rows_per_block + 4
    geo = geometry(LAYOUT, 0)
    image = np.empty(LAYOUT.segment_pages(num) * geo.page_words - PAGE_HEADER_WORDS, np.uint64)
    weights = np.ones(num * LAYOUT.weight_words, np.uint64)
    slots, epochs = np.arange(num, dtype=np.int32), np.array([NEWEST], np.uint64)
    build_segment(geo, NUMBER, epochs, np.arange(num), slots, weights, weights[:0], image)
    first = LAYOUT.segment_pages(num) - 3
    return np.append(np.zeros(PAGE_HEADER_WORDS, np.uint64), image).reshape(-1, geo.page_words)[first:, :2]


def test_a_block_tells_its_segment_epoch_number_and_rows(headers: NDArray[np.uint64]) -> None:
    for block, (number, word) in enumerate(headers):
        assert number == NUMBER
        assert unpacked(word) == (np.uint64(NEWEST), block, block == 2)
        rows = 4 if block == 2 else LAYOUT.rows_per_block
        told = [each for each in range(1, LAYOUT.rows_per_block + 1) if says_itself(number, word, each)]
        assert told == [rows]


def test_a_changed_bit_of_a_blocks_header_is_seen(headers: NDArray[np.uint64]) -> None:
    for block, (number, word) in enumerate(headers):
        rows = 4 if block == 2 else LAYOUT.rows_per_block
        for bit in range(64):
            changed = np.uint64(1) << np.uint64(bit)
            assert not says_itself(number ^ changed, word, rows)
            assert not says_itself(number, word ^ changed, rows)
