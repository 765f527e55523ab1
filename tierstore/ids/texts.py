"""Kernels over letters: the integer that a text is written as, else its XXH64; and the rows that integers spread over.

Shapes: n texts.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bytes, Int64s
from ..kernels.hashing import mix64
from ..kernels.jit import inline, kernel
from ..kernels.xxh64 import text_hash

STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # between the hashes' counters of two columns
MOST: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
MISSING: Final = -1  # what a reader puts where a category is absent, before it is left out

_MAX_DIGITS: Final = 19
MAX_CATEGORY: Final = np.iinfo(np.int64).max
_MAX_CATEGORY: Final = np.uint64(MAX_CATEGORY)  # for the kernel
_ZERO: Final = 48
_POINT: Final = 46
_MINUS: Final = 45


class CategoryRule(NamedTuple):
    """What values become.

    Attributes:
        are_ids: categories are ids, any int64: negative integers are taken, and Criteo's hexadecimal numbers are
            texts. Otherwise categories are from 0 on.
        seed: of the hashes of texts, in [0, 2**63).
    """

    are_ids: bool = False
    seed: int = 0

    @property
    def least(self) -> int:
        """The least category."""
        return -MAX_CATEGORY - 1 if self.are_ids else 0


FROM_ZERO: Final = CategoryRule()


def text_categories(texts: Sequence[bytes], rule: CategoryRule) -> Int64s:
    """``read_texts`` of texts one by one."""
    return read_texts(np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]), rule)


def read_texts(letters: Bytes, offsets: Int64s, rule: CategoryRule, *, floats: bool = False) -> Int64s:
    """The categories [n] that texts stand for, where text i is ``letters[offsets[i]:offsets[i + 1]]``, in UTF-8.

    A text that is written as an integer below 2**63, without sign and leading zeros, is that integer (with ``floats``
    also "12.0"). Any other one is the upper 63 bits of its XXH64. As ids, integers may be any int64, and hashes are
    all 64 bits. An empty text is ``MISSING``, as an id may be.
    """
    categories = np.empty(len(offsets) - 1, np.int64)
    _read_texts(letters, offsets, floats, rule.are_ids, np.uint64(rule.seed), categories)
    return categories


@kernel
def _read_texts(
    letters: Bytes, offsets: Int64s, floats: bool, are_ids: bool, seed: np.uint64, categories: Int64s
) -> None:
    for i in range(len(categories)):
        begin, end = offsets[i], offsets[i + 1]
        categories[i] = read_text(letters, begin, end, floats, are_ids, seed) if begin < end else MISSING


@inline
def read_text(letters: Bytes, begin: int, end: int, floats: bool, are_ids: bool, seed: np.uint64) -> np.int64:
    """``read_texts`` of ``letters[begin:end]``, which is not empty."""
    is_float = floats and end - begin > 2 and letters[end - 2] == _POINT and letters[end - 1] == _ZERO
    is_integer, number = _read_integer(letters, begin, end - 2 if is_float else end, are_ids)
    if is_integer:
        return number
    hashed = text_hash(letters, begin, end, seed)
    return np.int64(hashed if are_ids else hashed >> np.uint64(1))


@inline
def _read_integer(letters: Bytes, begin: int, end: int, signed: bool) -> tuple[Any, np.int64]:
    """Whether the text is written as an integer, and which."""
    is_negative = signed and begin < end and letters[begin] == _MINUS
    if is_negative:
        begin += 1
    digits = end - begin
    if digits == 0 or digits > _MAX_DIGITS or (letters[begin] == _ZERO and (digits > 1 or is_negative)):
        return False, np.int64(0)
    number = np.uint64(0)
    for at in range(begin, end):
        digit = np.int64(letters[at]) - _ZERO
        if digit < 0 or digit > 9:
            return False, np.int64(0)
        number = np.uint64(number * np.uint64(10) + np.uint64(digit))
    if is_negative:
        return number <= _MAX_CATEGORY + np.uint64(1), -np.int64(number)
    return number <= _MAX_CATEGORY, np.int64(number)


@kernel
def mix_rows(
    categories: Int64s, lengths: Int64s, num_embeddings: Int64s, columns: tuple[int, int], mix: bool, ids: Int64s
) -> int:
    """``ids[i]`` is the row of ``categories[i]``, of these columns only, of which each has so many. Returns -1, or the
    first that is no row."""
    begin = 0
    for column in range(columns[0], columns[1]):
        end, rows = begin + lengths[column], num_embeddings[column]
        own, found = categories[begin:end], ids[begin:end]
        if mix:
            spread(own, rows, column, found)
        else:
            for i in range(len(own)):
                if np.uint64(own[i]) >= np.uint64(rows):
                    return begin + i
                found[i] = own[i]
        begin = end
    return -1


@kernel
def spread(categories: Int64s, num_embeddings: int, column: int, ids: Int64s) -> None:
    """``ids[i]`` is the row of ``categories[i]`` with ``data.hashing = "mix"``; both may be one array."""
    rows, first = np.uint64(num_embeddings), np.uint64(column) * STEP
    inverse = MOST // rows
    for i in range(len(categories)):
        ids[i] = np.int64(modulo(mix64(np.uint64(categories[i]) + first), rows, inverse))


@kernel
def modulo(number: np.uint64, divisor: np.uint64, inverse: np.uint64) -> np.uint64:
    """``number % divisor``, given ``MOST // divisor``; no division, so that it runs on vectors. The upper half of
    ``number * inverse`` is the quotient, or one less (Barrett: Implementing the RSA Algorithm on a Standard
    Digital Signal Processor, CRYPTO 1986)."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    number_low, number_high, inverse_low, inverse_high = number & low, number >> half, inverse & low, inverse >> half
    middle = number_high * inverse_low + ((number_low * inverse_low) >> half)
    other = number_low * inverse_high + (middle & low)
    quotient = number_high * inverse_high + (middle >> half) + (other >> half)
    rest = np.uint64(number - quotient * divisor)
    return np.uint64(rest - divisor) if rest >= divisor else rest
