"""XXH64 over 64-bit words, and over texts, for use inside kernels.

Source: the xxHash specification (Yann Collet), section "XXH64 Algorithm Description". Of rows only whole words are
hashed, so of their tail only the 8-byte step is needed. Words are little-endian on disk; on such a machine they are
hashed as they lie.
"""

from typing import Any, Final

import numpy as np
import xxhash

from ..kernels.arrays import Bytes, Words
from ..kernels.jit import JIT_ENABLED, inline

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)


@inline
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inline
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * _P2, 31) * _P1


@inline
def _merge(total: np.uint64, lane: np.uint64) -> np.uint64:
    return (total ^ _round(np.uint64(0), lane)) * _P1 + _P4


@inline
def _join(lane_1: np.uint64, lane_2: np.uint64, lane_3: np.uint64, lane_4: np.uint64) -> np.uint64:
    total = _rotate(lane_1, 1) + _rotate(lane_2, 7) + _rotate(lane_3, 12) + _rotate(lane_4, 18)
    return _merge(_merge(_merge(_merge(total, lane_1), lane_2), lane_3), lane_4)


@inline
def _tail(total: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(total ^ _round(np.uint64(0), word), 27) * _P1 + _P4


@inline
def _avalanche(total: np.uint64) -> np.uint64:
    total = (total ^ (total >> np.uint64(33))) * _P2
    total = (total ^ (total >> np.uint64(29))) * _P3
    return total ^ (total >> np.uint64(32))


@inline
def row_checksum(words: Words, start: int, num_words: int, seed: np.uint64) -> np.uint64:
    """XXH64 of ``words[start : start + num_words]``."""
    at = np.uint64(start)  # unsigned: a signed index would be compared with 0 at each access
    end = at + np.uint64(num_words)
    if num_words >= 4:
        lane_1, lane_2, lane_3, lane_4 = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + np.uint64(4) <= end:
            lane_1 = _round(lane_1, words[at])
            lane_2 = _round(lane_2, words[at + np.uint64(1)])
            lane_3 = _round(lane_3, words[at + np.uint64(2)])
            lane_4 = _round(lane_4, words[at + np.uint64(3)])
            at += np.uint64(4)
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + _P5
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
        lane_1, lane_2, lane_3, lane_4 = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 32 <= end:
            lane_1 = _round(lane_1, _word(letters, at, 8))
            lane_2 = _round(lane_2, _word(letters, at + 8, 8))
            lane_3 = _round(lane_3, _word(letters, at + 16, 8))
            lane_4 = _round(lane_4, _word(letters, at + 24, 8))
            at += 32
        total = _join(lane_1, lane_2, lane_3, lane_4)
    else:
        total = seed + _P5
    total += np.uint64(end - begin)
    while at + 8 <= end:
        total = _tail(total, _word(letters, at, 8))
        at += 8
    if at + 4 <= end:
        total = _rotate(total ^ (_word(letters, at, 4) * _P1), 23) * _P2 + _P3
        at += 4
    while at < end:
        total = _rotate(total ^ (np.uint64(letters[at]) * _P5), 11) * _P1
        at += 1
    return _avalanche(total)


if JIT_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    _INT32: Final = ir.IntType(32)
    _INT64: Final = ir.IntType(64)
    _FOUR: Final = ir.VectorType(_INT64, 4)
    _EIGHT: Final = ir.VectorType(_INT64, 8)
    _ALL: Final = ir.Constant(ir.VectorType(_INT32, 8), list(range(8)))

    @intrinsic
    def _hash_stripes(
        typing_context: Any,  # noqa: ARG001
        words: Any,
        start_a: Any,
        start_b: Any,
        count: Any,
        seed_a: Any,
        seed_b: Any,
        lanes: Any,
    ) -> Any:
        """The four lanes of each of two rows after ``count`` stripes of four words, in vectors of eight words.

        LLVM turns these into what the processor has; it does not find them by itself.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            kept = context.make_array(signature.args[6])(context, builder, args[6]).data

            def constant(*values: int) -> Any:
                return ir.Constant(_EIGHT, [value % 2**64 for value in values] * (8 // len(values)))

            def stripe(start: Any, offset: Any) -> Any:
                pointer = builder.gep(data, [builder.add(start, offset)])
                return builder.load(builder.bitcast(pointer, _FOUR.as_pointer()), align=8)

            seeds = ir.Constant(_EIGHT, ir.Undefined)
            for lane in range(8):
                seeds = builder.insert_element(seeds, args[4 + lane // 4], _INT32(lane))
            prime_1, prime_2 = int(_P1), int(_P2)
            state = cgutils.alloca_once(builder, _EIGHT)
            builder.store(builder.add(seeds, constant(prime_1 + prime_2, prime_2, 0, -prime_1)), state)
            with cgutils.for_range(builder, args[3], intp=_INT64) as loop:
                offset = builder.mul(loop.index, _INT64(4))
                eight = builder.shuffle_vector(stripe(args[1], offset), stripe(args[2], offset), _ALL)
                total = builder.add(builder.load(state), builder.mul(eight, constant(prime_2)))
                turned = builder.or_(builder.shl(total, constant(31)), builder.lshr(total, constant(33)))
                builder.store(builder.mul(turned, constant(prime_1)), state)
            builder.store(builder.load(state), builder.bitcast(kept, _EIGHT.as_pointer()), align=8)
            return context.get_dummy_value()

        return types.void(words, start_a, start_b, count, seed_a, seed_b, lanes), generate

else:

    def _hash_stripes(
        words: Words, start_a: int, start_b: int, count: int, seed_a: np.uint64, seed_b: np.uint64, lanes: Words
    ) -> None:
        lanes[:] = np.array([seed_a] * 4 + [seed_b] * 4) + np.array([_P1 + _P2, _P2, 0, -_P1] * 2, np.uint64)
        for i in range(4 * count):
            lanes[i % 4] = _round(lanes[i % 4], words[start_a + i])
            lanes[4 + i % 4] = _round(lanes[4 + i % 4], words[start_b + i])


@inline
def two_row_checksums(
    words: Words, start_a: int, start_b: int, num_words: int, seed_a: np.uint64, seed_b: np.uint64, lanes: Words
) -> tuple[np.uint64, np.uint64]:
    """``row_checksum`` of two rows at once: one alone waits for its own multiplications.

    ``lanes``: uint64 [8], scratch.
    """
    if num_words >= 4:
        stripes = np.int64(num_words // 4)
        _hash_stripes(words, np.int64(start_a), np.int64(start_b), stripes, seed_a, seed_b, lanes)
        total_a = _join(lanes[0], lanes[1], lanes[2], lanes[3])
        total_b = _join(lanes[4], lanes[5], lanes[6], lanes[7])
    else:
        total_a, total_b = seed_a + _P5, seed_b + _P5
    total_a += np.uint64(8 * num_words)
    total_b += np.uint64(8 * num_words)
    for i in range(num_words // 4 * 4, num_words):
        total_a, total_b = _tail(total_a, words[start_a + i]), _tail(total_b, words[start_b + i])
    return _avalanche(total_a), _avalanche(total_b)


@inline
def mix_key(first: np.uint64, second: np.uint64) -> np.uint64:
    """A well-mixed word for an ordered pair."""
    return _avalanche(_round(_round(_P5, first), second))


def bytes_checksum(data: bytes) -> int:
    """XXH64 with seed 0, of metadata."""
    return xxhash.xxh64_intdigest(data)
