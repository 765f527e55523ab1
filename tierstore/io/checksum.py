"""The checksum of a row, for use inside kernels. CRC32C is in RFC 3720. Of rows only whole words are hashed, which are
little-endian on disk; on such a machine they are hashed as they lie."""

import platform
from typing import Any, Final

import numba
import numpy as np
from numba.core.codegen import get_host_cpu_features

from ..kernels.arrays import Words
from ..kernels.jit import JIT_ENABLED, inline
from ..kernels.xxh64 import PRIME_5, avalanche, round_of, words_hash

_LOW: Final = np.uint64(0xFFFF_FFFF)
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
    return avalanche(round_of(round_of(PRIME_5, first), second))


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
