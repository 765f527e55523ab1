"""Weights of any storage type as float32, inside kernels, and their rounding back.

A weight array is float32, or uint16 holding the bits of float16 or bfloat16; ``dtype_code`` says which. Both
directions are exact where possible and else round to nearest, ties to even (IEEE 754), as torch does. ``simd`` loads
and stores elements of either.

Updated weights may be rounded stochastically: one between two neighbouring halfs, ``low <= |weight| <= high``, becomes
``high`` with probability ``(|weight| - low) / (high - low)``, else ``low``. So on average it stays what it was, and
steps much smaller than the gap between two halfs add up (G. E. Forsythe, SIAM Review 1, 1959; S. Gupta et al., Deep
Learning with Limited Numerical Precision, ICML 2015). Beyond the largest half, for infinity and for NaN, a weight
becomes what rounding to nearest gives.

Random bits are those of ``init``. They depend on the seed of the table's initializer, the number of the table's update,
the row's key (table index and row) and the column, and on nothing else.
"""

from typing import Final

import numpy as np

from .arrays import Floats, Weights
from .hashing import mix64, unit
from .jit import inline

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 = range(5)  # the last two are of quantized rows, for ``quantized`` alone
NEAREST: Final = 0  # the seed of updates that round to nearest
_DOMAIN: Final = 0x726F756E64696E67  # any constant: first values start from the same seed
_CODES: Final = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}


def code_of_dtype(dtype: str) -> int:
    """The ``dtype_code`` argument for a layout's dtype."""
    return _CODES[dtype]


@inline
def bits_to_float(bits: np.uint16, dtype_code: int) -> np.float32:
    """Of a uint16 bit pattern."""
    wide = np.uint32(bits)
    if dtype_code == BFLOAT16:
        return np.uint32(wide << np.uint32(16)).view(np.float32)
    sign = np.uint32((wide & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32((wide & np.uint32(0x7FFF)) << np.uint32(13))
    if magnitude >= np.uint32(0x0F800000):  # infinity and NaN keep their all-ones exponent
        return np.uint32(sign | np.uint32(magnitude + np.uint32(0x70000000))).view(np.float32)
    # Multiplying by 2**112 moves the exponent bias from 15 to 127 and normalises subnormals.
    scaled = np.float32(magnitude.view(np.float32) * np.uint32(0x77800000).view(np.float32))
    return np.uint32(sign | scaled.view(np.uint32)).view(np.float32)


@inline
def float_to_bits(value: np.float32, dtype_code: int) -> np.uint16:
    """uint16 bit pattern nearest to a float32 value."""
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if dtype_code == BFLOAT16:
        if magnitude > np.uint32(0x7F800000):
            return np.uint16(sign | np.uint32(0x7FC0))
        odd = np.uint32((magnitude >> np.uint32(16)) & np.uint32(1))
        return np.uint16(sign | np.uint32(np.uint32(magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16)))
    if magnitude > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if magnitude >= np.uint32(0x47800000):
        return np.uint16(sign | np.uint32(0x7C00))
    if magnitude < np.uint32(0x38800000):
        # Below 2**-14 adding one half leaves the subnormal's bits, correctly rounded, at the bottom of the sum.
        half_sum = np.float32(magnitude.view(np.float32) + np.float32(0.5))
        return np.uint16(sign | np.uint32(half_sum.view(np.uint32) - np.uint32(0x3F000000)))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    rebiased = np.uint32(magnitude + np.uint32(0xFFF) + odd - np.uint32(0x38000000))
    return np.uint16(sign | np.uint32(rebiased >> np.uint32(13)))


def update_seed(seed: int, step: int) -> int:
    """What one update of a table, numbered from 1, draws its random bits from, given the seed of the table's
    initializer: in [1, 2**64), and so not ``NEAREST``."""
    table_bits = int(mix64(np.uint64(int(mix64(np.uint64(seed % 2**64))) ^ _DOMAIN)))
    return int(mix64(np.uint64(table_bits ^ step % 2**64))) | 1


@inline
def stochastic_bits(value: np.float32, dtype_code: int, random: np.uint64) -> np.uint16:
    """uint16 bit pattern of one of the two halfs (``BFLOAT16`` or ``FLOAT16``) next to a float32 value: the outer one
    if ``random / 2**64`` is below its probability. That is a multiple of 2**-16 in bfloat16, of 2**-13 in float16 from
    2**-14 on, and taken to within 2**-53 below: so many bits of ``random`` matter."""
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude >= np.uint32(0x7F7F0000 if dtype_code == BFLOAT16 else 0x477FE000):  # the largest half
        return float_to_bits(value, dtype_code)
    if dtype_code == BFLOAT16:
        low = np.uint32(magnitude >> np.uint32(16))
        is_up = np.uint32(random >> np.uint64(48)) < np.uint32(magnitude & np.uint32(0xFFFF))
    elif magnitude >= np.uint32(0x38800000):
        low = np.uint32(np.uint32(magnitude - np.uint32(0x38000000)) >> np.uint32(13))
        is_up = np.uint32(random >> np.uint64(51)) < np.uint32(magnitude & np.uint32(0x1FFF))
    else:
        # Halfs below 2**-14 are the multiples of 2**-24: scaled by a power of two, which is exact, they are integers.
        scaled = np.float32(magnitude.view(np.float32) * np.float32(16777216))
        low = np.uint32(scaled)
        is_up = unit(random) < np.float64(np.float32(scaled - np.float32(low)))
    return np.uint16(sign | np.uint32(low + np.uint32(is_up)))


@inline
def store_row(values: Floats, row: Weights, dim: int, dtype_code: int, seed: np.uint64, key: int) -> None:
    """Round the first ``dim`` columns of ``values`` (float32) into ``row`` (uint16), by what ``update_seed`` gave, or
    ``NEAREST``, and the row's key, int64."""
    if seed == np.uint64(NEAREST):
        for column in range(dim):
            row[column] = float_to_bits(values[column], dtype_code)
        return
    row_bits = mix64(np.uint64(seed ^ np.uint64(key)))
    for column in range(dim):
        row[column] = stochastic_bits(values[column], dtype_code, mix64(np.uint64(row_bits + np.uint64(column))))
