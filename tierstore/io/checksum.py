"""XXH64 over 64-bit words, for use inside kernels.

Source: the xxHash specification (Yann Collet), section "XXH64 Algorithm Description". Only whole words are hashed, so
of the tail only the 8-byte step is needed. Words are little-endian on disk; on such a machine they are hashed as they lie.
"""

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from .._jit import inline

__all__ = ["absent_checksum", "bytes_checksum", "mix_key", "row_checksum"]

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
def _avalanche(total: np.uint64) -> np.uint64:
    total = (total ^ (total >> _R33)) * _P2
    total = (total ^ (total >> _R29)) * _P3
    return total ^ (total >> _R32)


@inline
def row_checksum(words: Words, num_words: int, seed: np.uint64) -> np.uint64:
    """XXH64 of ``words[:num_words]``."""
    i = 0
    if num_words >= 4:
        lane_1 = seed + _P1 + _P2
        lane_2 = seed + _P2
        lane_3 = seed
        lane_4 = seed - _P1
        while i + 4 <= num_words:
            lane_1 = _round(lane_1, words[i])
            lane_2 = _round(lane_2, words[i + 1])
            lane_3 = _round(lane_3, words[i + 2])
            lane_4 = _round(lane_4, words[i + 3])
            i += 4
        total = _rotate(lane_1, _R1) + _rotate(lane_2, _R7) + _rotate(lane_3, _R12) + _rotate(lane_4, _R18)
        total = _merge(_merge(_merge(_merge(total, lane_1), lane_2), lane_3), lane_4)
    else:
        total = seed + _P5
    total += np.uint64(num_words) * _WORD_BYTES
    while i < num_words:
        total = _rotate(total ^ _round(np.uint64(0), words[i]), _R27) * _P1 + _P4
        i += 1
    return _avalanche(total)


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
