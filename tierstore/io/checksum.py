"""XXH64 over 64-bit words, for use inside kernels.

Source: the xxHash specification (Yann Collet), section "XXH64 Algorithm Description". Only whole words are hashed, so
of the tail only the 8-byte step is needed. Words are little-endian on disk; on such a machine they are hashed as they
lie.
"""

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from .._jit import inline

__all__ = ["absent_checksum", "bytes_checksum", "mix_key", "row_checksum", "two_row_checksums"]

Words = NDArray[np.uint64]

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)
_WORD_BYTES: Final = np.uint64(8)
_R1: Final = np.uint64(1)
_R7: Final = np.uint64(7)
_R12: Final = np.uint64(12)
_R18: Final = np.uint64(18)
_R27: Final = np.uint64(27)
_R29: Final = np.uint64(29)
_R31: Final = np.uint64(31)
_R32: Final = np.uint64(32)
_R33: Final = np.uint64(33)
_R64: Final = np.uint64(64)
_W1: Final = np.uint64(1)
_W2: Final = np.uint64(2)
_W3: Final = np.uint64(3)
_W4: Final = np.uint64(4)


@inline
def _rotate(value: np.uint64, bits: np.uint64) -> np.uint64:
    return (value << bits) | (value >> (_R64 - bits))


@inline
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * _P2, _R31) * _P1


@inline
def _merge(total: np.uint64, lane: np.uint64) -> np.uint64:
    return (total ^ _round(np.uint64(0), lane)) * _P1 + _P4


@inline
def _join(lane_1: np.uint64, lane_2: np.uint64, lane_3: np.uint64, lane_4: np.uint64) -> np.uint64:
    total = _rotate(lane_1, _R1) + _rotate(lane_2, _R7) + _rotate(lane_3, _R12) + _rotate(lane_4, _R18)
    return _merge(_merge(_merge(_merge(total, lane_1), lane_2), lane_3), lane_4)


@inline
def _tail(total: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(total ^ _round(np.uint64(0), word), _R27) * _P1 + _P4


@inline
def _avalanche(total: np.uint64) -> np.uint64:
    total = (total ^ (total >> _R33)) * _P2
    total = (total ^ (total >> _R29)) * _P3
    return total ^ (total >> _R32)


@inline
def row_checksum(words: Words, start: int, num_words: int, seed: np.uint64) -> np.uint64:
    """XXH64 of ``words[start : start + num_words]``."""
    at = np.uint64(start)  # unsigned: a signed index would be compared with 0 at each access
    end = at + np.uint64(num_words)
    if num_words >= 4:
        lane_1, lane_2, lane_3, lane_4 = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + _W4 <= end:
            lane_1 = _round(lane_1, words[at])
            lane_2 = _round(lane_2, words[at + _W1])
            lane_3 = _round(lane_3, words[at + _W2])
            lane_4 = _round(lane_4, words[at + _W3])
            at += _W4
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + _P5
    total += np.uint64(num_words) * _WORD_BYTES
    while at < end:
        total = _tail(total, words[at])
        at += _W1
    return _avalanche(total)


@inline
def two_row_checksums(
    words: Words, start_a: int, start_b: int, num_words: int, seed_a: np.uint64, seed_b: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """``row_checksum`` of two rows, interleaved: one alone waits for its own multiplications."""
    a, b = np.uint64(start_a), np.uint64(start_b)
    end = a + np.uint64(num_words)
    if num_words >= 4:
        a_1, a_2, a_3, a_4 = seed_a + _P1 + _P2, seed_a + _P2, seed_a, seed_a - _P1
        b_1, b_2, b_3, b_4 = seed_b + _P1 + _P2, seed_b + _P2, seed_b, seed_b - _P1
        while a + _W4 <= end:
            a_1, b_1 = _round(a_1, words[a]), _round(b_1, words[b])
            a_2, b_2 = _round(a_2, words[a + _W1]), _round(b_2, words[b + _W1])
            a_3, b_3 = _round(a_3, words[a + _W2]), _round(b_3, words[b + _W2])
            a_4, b_4 = _round(a_4, words[a + _W3]), _round(b_4, words[b + _W3])
            a += _W4
            b += _W4
        total_a, total_b = _join(a_1, a_2, a_3, a_4), _join(b_1, b_2, b_3, b_4)
    else:
        total_a, total_b = seed_a + _P5, seed_b + _P5
    total_a += np.uint64(num_words) * _WORD_BYTES
    total_b += np.uint64(num_words) * _WORD_BYTES
    while a < end:
        total_a, total_b = _tail(total_a, words[a]), _tail(total_b, words[b])
        a += _W1
        b += _W1
    return _avalanche(total_a), _avalanche(total_b)


@inline
def absent_checksum(seed: np.uint64) -> np.uint64:
    """XXH64 of no bytes: what stands in the checksum word of a row that was never written."""
    return _avalanche(seed + _P5)


@inline
def mix_key(block_key: np.uint64, epoch: np.uint64) -> np.uint64:
    """A well-mixed word for one (block, epoch); their sum over a table is the table's directory hash."""
    return _avalanche(_round(_round(_P5, block_key), epoch))


def bytes_checksum(data: bytes) -> int:
    """XXH64 with seed 0, of metadata."""
    return xxhash.xxh64_intdigest(data)
