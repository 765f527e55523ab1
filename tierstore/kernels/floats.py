"""Weights of any storage type as float32, inside kernels.

A weight array is float32, or uint16 holding the bits of float16 or bfloat16; ``dtype_code`` says which. Both
directions are exact where possible and else round to nearest, ties to even (IEEE 754), as torch does. ``simd`` loads
and stores elements of either.
"""

from typing import Final

import numpy as np

from .jit import inline

FLOAT32: Final = 0
FLOAT16: Final = 1
BFLOAT16: Final = 2
INT8: Final = 3
INT4: Final = 4
"""The last two are quantized rows, which ``quantized`` has kernels for; nothing else knows them."""

_CODES: Final = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}


def code_of_dtype(dtype: str) -> int:
    """The ``dtype_code`` argument for a layout's dtype."""
    return _CODES[dtype]


@inline
def bits_to_float(bits: np.uint16, dtype_code: int) -> np.float32:
    """float32 value of a uint16 bit pattern."""
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
