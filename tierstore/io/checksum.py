"""XXH64 of words and texts, and the checksum of a row, for use inside kernels.

Sources: the xxHash specification (Yann Collet), section "XXH64 Algorithm Description"; CRC32C is in RFC 3720. Of rows
only whole words are hashed. Words are little-endian on disk; on such a machine they are hashed as they lie.
"""

import platform
from typing import Any, Final

import numba
import numpy as np
from numba.core.codegen import get_host_cpu_features

from ..kernels.arrays import Bytes, Words
from ..kernels.jit import JIT_ENABLED, inline

PRIME_1: Final = np.uint64(0x9E3779B185EBCA87)
PRIME_2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3: Final = np.uint64(0x165667B19E3779F9)
_PRIME_4: Final = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5: Final = np.uint64(0x27D4EB2F165667C5)
_LOW: Final = np.uint64(0xFFFF_FFFF)


@inline
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inline
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * PRIME_2, 31) * PRIME_1


@inline
def _join(lane_1: np.uint64, lane_2: np.uint64, lane_3: np.uint64, lane_4: np.uint64) -> np.uint64:
    total = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
    for lane in (lane_1, lane_2, lane_3, lane_4):
        total = (total ^ _round(np.uint64(0), lane)) * PRIME_1 + _PRIME_4
    return total


@inline
def _tail(total: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(total ^ _round(np.uint64(0), word), 27) * PRIME_1 + _PRIME_4


@inline
def _avalanche(total: np.uint64) -> np.uint64:
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
            lane_1 = _round(lane_1, words[at])
            lane_2 = _round(lane_2, words[at + np.uint64(1)])
            lane_3 = _round(lane_3, words[at + np.uint64(2)])
            lane_4 = _round(lane_4, words[at + np.uint64(3)])
            at += np.uint64(4)
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + _PRIME_5
    total += np.uint64(8 * num_words)
    while at < end:
        total = _tail(total, words[at])
        at += np.uint64(1)
    return _avalanche(total)


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
            lane_1 = _round(lane_1, _word(letters, at, 8))
            lane_2 = _round(lane_2, _word(letters, at + 8, 8))
            lane_3 = _round(lane_3, _word(letters, at + 16, 8))
            lane_4 = _round(lane_4, _word(letters, at + 24, 8))
            at += 32
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + _PRIME_5
    total += np.uint64(end - begin)
    while at + 8 <= end:
        total = _tail(total, _word(letters, at, 8))
        at += 8
    if at + 4 <= end:
        total = _rotate(total ^ (_word(letters, at, 4) * PRIME_1), 23) * PRIME_2 + _PRIME_3
        at += 4
    while at < end:
        total = _rotate(total ^ (np.uint64(letters[at]) * _PRIME_5), 11) * PRIME_1
        at += 1
    return _avalanche(total)


_TABLES: Final = np.zeros((8, 256), np.uint64)
"""[i, b]: what a byte b makes of a register of zeros when it and i bytes of zeros are shifted through."""
_TABLES[0] = np.arange(256)
for _ in range(8):
    _TABLES[0] = (_TABLES[0] >> np.uint64(1)) ^ (_TABLES[0] & np.uint64(1)) * np.uint64(0x82F63B78)
for _i in range(1, 8):
    _TABLES[_i] = (_TABLES[_i - 1] >> np.uint64(8)) ^ _TABLES[0][_TABLES[_i - 1] & np.uint64(0xFF)]


@inline
def crc32c_in_software(register: np.uint64, word: np.uint64) -> np.uint64:
    mixed, found = register ^ word, np.uint64(0)
    for i in range(8):
        found ^= _TABLES[7 - i, (mixed >> np.uint64(8 * i)) & np.uint64(0xFF)]
    return found


_FEATURES: Final = f"{get_host_cpu_features() if numba.config.CPU_FEATURES is None else numba.config.CPU_FEATURES},"

if JIT_ENABLED and {"x86_64": "+sse4.2,", "aarch64": "+crc,"}.get(platform.machine(), "?") in _FEATURES:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def crc32c(typing_context: Any, register: Any, word: Any) -> Any:  # noqa: ARG001
        """The register of a CRC32C, 32 bits, after eight more bytes; not inverted, neither first nor last."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            int32, int64 = ir.IntType(32), ir.IntType(64)
            declare = builder.module.declare_intrinsic
            if platform.machine() == "x86_64":
                function = declare("llvm.x86.sse42.crc32.64.64", (), ir.FunctionType(int64, [int64, int64]))
                return builder.call(function, args)
            function = declare("llvm.aarch64.crc32cx", (), ir.FunctionType(int32, [int32, int64]))
            return builder.zext(builder.call(function, [builder.trunc(args[0], int32), args[1]]), int64)

        return types.uint64(types.uint64, types.uint64), generate

else:
    crc32c = crc32c_in_software


@inline
def mix_key(first: np.uint64, second: np.uint64) -> np.uint64:
    """A well-mixed word for an ordered pair."""
    return _avalanche(_round(_round(_PRIME_5, first), second))


@inline
def row_checksum(words: Words, start: int, num_words: int, seed: np.uint64) -> np.uint64:
    """CRC32C of ``words[start : start + num_words]``, in four registers, as each waits for its own word before; two of
    them begin with half of the seed each. They are multiplied in the end: CRC32C is linear, so that equal changes to
    words of two registers would leave any CRC32C of both as it was."""
    at = np.uint64(start)  # unsigned: a signed index would be compared with 0 at each access
    one, two, three, four = seed & _LOW, seed >> np.uint64(32), np.uint64(0), np.uint64(0)
    for _ in range(num_words // 4):
        one, two = crc32c(one, words[at]), crc32c(two, words[at + np.uint64(1)])
        three, four = crc32c(three, words[at + np.uint64(2)]), crc32c(four, words[at + np.uint64(3)])
        at += np.uint64(4)
    for _ in range(num_words % 4):
        one, two, three, four = two, three, four, crc32c(one, words[at])
        at += np.uint64(1)
    return mix_key(one | two << np.uint64(32), three | four << np.uint64(32))


@inline
def is_row(words: Words, start: int, num_words: int, seed: np.uint64, checksum: np.uint64) -> bool:
    """Whether words are those of a row with this checksum: ``row_checksum``, or XXH64 as older releases wrote it."""
    if row_checksum(words, start, num_words, seed) == checksum:
        return True
    return words_hash(words, start, num_words, seed) == checksum  # type: ignore[no-any-return]
