"""Kernels around products of int8: rows quantized with one scale each, and sums of products back as float32."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Int32s
from .jit import uncounted_kernel as kernel

LEVELS: Final = 127
"""Largest magnitude of a quantized number, on both sides of zero."""
_SMALLEST_BITS: Final = int(np.float32(1e-30).view(np.int32))


@kernel
def quantize_rows(values: Floats, bits: Int32s, levels: NDArray[np.int8], scales: Floats) -> None:
    """``levels[i] * scales[i]`` is ``values[i]``, float32 [n, dim], to within half a scale, which is the row's largest
    magnitude over ``LEVELS``. Rows whose numbers are all below 1e-30 become zeros. A row with NaN or infinity has a
    scale of NaN. ``bits`` is ``values`` seen as int32."""
    for i in range(values.shape[0]):
        largest = np.int32(_SMALLEST_BITS)
        for column in range(values.shape[1]):  # by their bits: LLVM makes vectors of integers' maximum, not of floats'
            largest = max(largest, np.int32(bits[i, column] & np.int32(0x7FFFFFFF)))
        magnitude = np.int32(largest).view(np.float32)
        scales[i] = magnitude / np.float32(LEVELS) + (magnitude - magnitude)  # infinity - infinity is NaN
        factor = np.float32(LEVELS) / magnitude
        for column in range(values.shape[1]):
            levels[i, column] = np.int8(np.rint(values[i, column] * factor))


@kernel
def scale_sums(sums: Int32s, row_scales: Floats, column_scales: Floats, bias: Floats, out: Floats) -> None:
    """``out = sums * row_scales[:, None] * column_scales + bias``, float32 [n, columns]."""
    for i in range(sums.shape[0]):
        scale = row_scales[i]
        for column in range(sums.shape[1]):
            out[i, column] = np.float32(sums[i, column]) * (scale * column_scales[column]) + bias[column]
