"""XXH64 of words and texts, for use inside kernels.

Source: the xxHash specification (Yann Collet), section "XXH64 Algorithm Description". Words are little-endian; on such
a machine they are hashed as they lie.
"""

from typing import Final

import numpy as np

from .arrays import Bytes, Words
from .jit import inline

PRIME_1: Final = np.uint64(0x9E3779B185EBCA87)
PRIME_2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3: Final = np.uint64(0x165667B19E3779F9)
_PRIME_4: Final = np.uint64(0x85EBCA77C2B2AE63)
PRIME_5: Final = np.uint64(0x27D4EB2F165667C5)


@inline
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inline
def round_of(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * PRIME_2, 31) * PRIME_1


@inline
def _join(lane_1: np.uint64, lane_2: np.uint64, lane_3: np.uint64, lane_4: np.uint64) -> np.uint64:
    total = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
    for lane in (lane_1, lane_2, lane_3, lane_4):
        total = (total ^ round_of(np.uint64(0), lane)) * PRIME_1 + _PRIME_4
    return total


@inline
def _tail(total: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(total ^ round_of(np.uint64(0), word), 27) * PRIME_1 + _PRIME_4


@inline
def avalanche(total: np.uint64) -> np.uint64:
    total = (total ^ (total >> np.uint64(33))) * PRIME_2
    total = (total ^ (total >> np.uint64(29))) * _PRIME_3
    return total ^ (total >> np.uint64(32))


@inline
def words_hash(words: Words, start: int, num_words: int, seed: np.uint64) -> np.uint64:
    """XXH64 of ``words[start : start + num_words]``."""
    at = np.uint64(start)  # unsigned: a signed index would be compared with 0 at each access
    end = at + np.uint64(num_words)
    if num_words >= 4:
        lane_1, lane_2, lane_3, lane_4 = seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1
        while at + np.uint64(4) <= end:
            lane_1 = round_of(lane_1, words[at])
            lane_2 = round_of(lane_2, words[at + np.uint64(1)])
            lane_3 = round_of(lane_3, words[at + np.uint64(2)])
            lane_4 = round_of(lane_4, words[at + np.uint64(3)])
            at += np.uint64(4)
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + PRIME_5
    total += np.uint64(8 * num_words)
    while at < end:
        total = _tail(total, words[at])
        at += np.uint64(1)
    return avalanche(total)


@inline
def _word(letters: Bytes, at: int, size: int) -> np.uint64:
    word = np.uint64(0)
    for i in range(size):
        word |= np.uint64(letters[at + i]) << np.uint64(8 * i)
    return word


@inline
def text_hash(letters: Bytes, begin: int, end: int, seed: np.uint64) -> np.uint64:
    """XXH64 of ``letters[begin:end]``."""
    at = begin
    if end - begin >= 32:
        lane_1, lane_2, lane_3, lane_4 = seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1
        while at + 32 <= end:
            lane_1 = round_of(lane_1, _word(letters, at, 8))
            lane_2 = round_of(lane_2, _word(letters, at + 8, 8))
            lane_3 = round_of(lane_3, _word(letters, at + 16, 8))
            lane_4 = round_of(lane_4, _word(letters, at + 24, 8))
            at += 32
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + PRIME_5
    total += np.uint64(end - begin)
    while at + 8 <= end:
        total = _tail(total, _word(letters, at, 8))
        at += 8
    if at + 4 <= end:
        total = _rotate(total ^ (_word(letters, at, 4) * PRIME_1), 23) * PRIME_2 + _PRIME_3
        at += 4
    while at < end:
        total = _rotate(total ^ (np.uint64(letters[at]) * PRIME_5), 11) * PRIME_1
        at += 1
    return avalanche(total)
