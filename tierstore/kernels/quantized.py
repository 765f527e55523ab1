"""Kernels over quantized rows: pooled lookup, copies out as float32, packing; and around products of int8.

A row is ``dim`` numbers of 8 or 4 bits with one scale and one bias, in torch's formats (``layout``). Column c stands
for ``q[c] * scale + bias``, rounded once, as ``torch.ops.quantized.embedding_bag_byte_unpack`` has it. A bag adds
``bias`` first and ``q[c] * scale`` to that, the second rounded together with its product, as torch's pooled lookups do
on a CPU with fused multiply-add; per-sample weights are multiplied into scale and bias. So sums have torch's bits.

``dtype_code`` is ``floats.INT8`` or ``floats.INT4``, ``weights`` uint8 [S, bytes of a row].
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import floats
from .arrays import Bytes, Floats, Int32s, Int64s, Weights
from .jit import fused_multiply_add, prefetch_item
from .jit import uncounted_inline as inline
from .jit import uncounted_kernel as kernel
from .simd import WIDE, bytes16, float_at, fma16, half_bits_at, load, nibbles16, store
from .slots import MAX, MEAN
from .slots import dot_rows as dot_float_rows

_FLOAT_MAX: Final = float(np.finfo(np.float32).max)
_AHEAD: Final = 16  # rows are fetched into the processor's caches so long before they are added
_LINE_BYTES: Final = 64
LEVELS: Final = 127  # largest magnitude of a number of ``quantize_rows``
_SMALLEST_BITS: Final = int(np.float32(1e-30).view(np.int32))


@inline
def _scale_and_bias(row: Bytes, dim: int, dtype_code: int) -> Any:
    """Two float32."""
    if dtype_code == floats.INT8:
        return float_at(row, dim), float_at(row, dim + 4)
    scale, bias = half_bits_at(row, (dim + 1) // 2), half_bits_at(row, (dim + 1) // 2 + 2)
    return floats.bits_to_float(scale, floats.FLOAT16), floats.bits_to_float(bias, floats.FLOAT16)


@inline
def _level(row: Bytes, column: int, dtype_code: int) -> np.float32:
    if dtype_code == floats.INT8:
        return np.float32(row[column])
    return np.float32(np.uint8(row[column // 2] >> np.uint8(4 * (column % 2))) & np.uint8(15))


@inline
def _add_row(row: Bytes, factor: np.float32, dim: int, dtype_code: int, out: Floats, sample: int, target: Any) -> None:
    """``out[sample, target : target + dim] += factor * row``."""
    scale, bias = _scale_and_bias(row, dim, dtype_code)
    scale, bias = factor * scale, factor * bias
    whole = dim - dim % WIDE
    for column in range(0, whole, WIDE):
        levels = bytes16(row, column) if dtype_code == floats.INT8 else nibbles16(row, column // 2)
        pooled = load(out, sample, target + column, floats.FLOAT32, WIDE)
        store(out, sample, target + column, fma16(levels, scale, pooled + bias), floats.FLOAT32, WIDE)
    for column in range(whole, dim):
        pooled = out[sample, target + column] + bias
        out[sample, target + column] = fused_multiply_add(_level(row, column, dtype_code), scale, pooled)


@inline
def _keep_largest(row: Bytes, dim: int, dtype_code: int, position: int, pooled: Floats, best: Int32s) -> None:
    """``pooled = max(pooled, row)``; ``best`` (int32 [dim], -1 at first) is where each maximum was found."""
    scale, bias = _scale_and_bias(row, dim, dtype_code)
    for column in range(dim):
        value = fused_multiply_add(_level(row, column, dtype_code), scale, np.float32(0) + bias)
        if best[column] < 0 or value > pooled[column]:
            pooled[column] = value
            best[column] = position


@inline
def _fetch_row(weights: Bytes, slot: int) -> None:
    row_bytes = weights.shape[1]
    for place in range(0, row_bytes, _LINE_BYTES):
        prefetch_item(weights, np.int64(slot) * row_bytes + place)


@kernel
def pool_rows(
    begin: int, end: int, first: int, last: int, bag_starts: Int64s, slots: Int32s, scale: Floats, mode: int,
    weights: Bytes, dim: int, dtype_code: int, columns: Int32s, batch: int, out: Floats, arg_max: Int32s,
) -> None:  # fmt: skip
    """``slots.pool_rows`` of quantized rows."""
    for bag in range(begin, end):
        low, high = max(bag_starts[bag], first), min(bag_starts[bag + 1], last)
        sample, column_first = bag % batch, np.int64(columns[bag // batch])
        pooled = out[sample, column_first : column_first + dim]
        if bag_starts[bag] >= first:
            pooled[:] = np.float32(0)
            if mode == MAX:
                arg_max[bag, :] = -1
        for position in range(low, high):
            if position + _AHEAD < last:
                _fetch_row(weights, slots[position + _AHEAD - first])
            row = weights[slots[position - first]]
            if mode != MAX:
                factor = scale[position] if scale.shape[0] else np.float32(1)
                _add_row(row, factor, dim, dtype_code, out, sample, column_first)
            else:
                _keep_largest(row, dim, dtype_code, position, pooled, arg_max[bag])
        if mode == MEAN and low < high and high == bag_starts[bag + 1]:
            count = np.float32(high - bag_starts[bag])
            for column in range(dim):
                pooled[column] /= count


@kernel
def unpack_rows(slots: Int32s, weights: Weights, dim: int, dtype_code: int, out: Floats) -> None:
    """``out[i]`` (float32 [n, dim]) is row ``slots[i]``."""
    out[:] = 0
    for i in range(slots.shape[0]):
        _add_row(weights[slots[i]], np.float32(1), dim, dtype_code, out, i, 0)


def dot_rows(
    begin: int, end: int, first: int, last: int, bag_starts: Int64s, slots: Int32s, weights: Bytes, dim: int,
    dtype_code: int, *others: Any,
) -> None:  # fmt: skip
    """``slots.dot_rows`` of quantized rows."""
    rows, places = np.empty((len(slots), dim), np.float32), np.arange(len(slots), dtype=np.int32)
    unpack_rows(slots, weights, dim, dtype_code, rows)
    dot_float_rows(begin, end, first, last, bag_starts, places, rows, dim, floats.FLOAT32, *others)


@inline
def _put_half(row: Bytes, place: int, bits: np.uint16) -> None:
    row[place], row[place + 1] = np.uint8(bits & np.uint16(255)), np.uint8(bits >> np.uint16(8))


@inline
def _put_float(row: Bytes, place: int, value: np.float32) -> None:
    bits = np.float32(value).view(np.uint32)
    _put_half(row, place, np.uint16(bits & np.uint32(0xFFFF)))
    _put_half(row, place + 2, np.uint16(bits >> np.uint32(16)))


@inline
def _pack_bytes(values: Floats, low: np.float32, high: np.float32, dim: int, row: Bytes) -> bool:
    """``embedding_bag_byte_prepack`` of one row; False if its scale would not be finite."""
    width = np.float32(high - low)
    if width > _FLOAT_MAX:
        return False
    inverse = np.float32(255) / np.float32(width + np.float32(1e-8))
    for column in range(dim):
        row[column] = np.uint8(np.rint(np.float32(values[column] - low) * inverse))
    _put_float(row, dim, width / np.float32(255))
    _put_float(row, dim + 4, low)
    return True


@inline
def _pack_nibbles(values: Floats, low: np.float32, high: np.float32, dim: int, row: Bytes) -> bool:
    """``embedding_bag_4bit_prepack`` of one row; False if scale or bias is beyond float16."""
    bias_bits = floats.float_to_bits(low, floats.FLOAT16)
    bias = floats.bits_to_float(bias_bits, floats.FLOAT16)
    width = np.float32(high - bias)
    scale_bits = floats.float_to_bits(width / np.float32(15) if width != 0 else np.float32(1), floats.FLOAT16)
    if scale_bits & 0x7FFF == 0:
        scale_bits = floats.float_to_bits(np.float32(1), floats.FLOAT16)
    if (scale_bits & 0x7C00) == 0x7C00 or (bias_bits & 0x7C00) == 0x7C00:
        return False
    inverse = np.float32(1) / floats.bits_to_float(scale_bits, floats.FLOAT16)
    if inverse > _FLOAT_MAX:
        scale_bits, inverse = floats.float_to_bits(np.float32(1), floats.FLOAT16), np.float32(1)
    place = (dim + 1) // 2
    row[:place] = 0
    for column in range(dim):
        level = min(max(np.rint(np.float32(values[column] - bias) * inverse), np.float32(0)), np.float32(15))
        row[column // 2] |= np.uint8(np.uint8(level) << np.uint8(4 * (column % 2)))
    _put_half(row, place, scale_bits)
    _put_half(row, place + 2, bias_bits)
    return True


@kernel
def pack_rows(values: Floats, slots: Int32s, weights: Weights, dim: int, dtype_code: int) -> int:
    """Quantize ``values[i]`` (float32 [n, dim]) into ``weights[slots[i]]``; bytes behind a row become 0. -1, or the
    first i whose row holds NaN or infinity, or numbers too large for its scale and bias."""
    for i in range(slots.shape[0]):
        source, row = values[i], weights[slots[i]]
        low = high = source[0]
        is_finite = True
        for column in range(dim):
            value = source[column]
            is_finite = is_finite and abs(value) <= _FLOAT_MAX
            if value < low:
                low = value
            if value > high:
                high = value
        row[:] = 0
        if not is_finite:
            return i
        if dtype_code == floats.INT8:
            is_packed = _pack_bytes(source, low, high, dim, row)
        else:
            is_packed = _pack_nibbles(source, low, high, dim, row)
        if not is_packed:
            return i
    return -1


@kernel
def quantize_rows(values: Floats, bits: Int32s, levels: NDArray[np.int8], scales: Floats) -> None:
    """``levels[i] * scales[i]`` is ``values[i]``, float32 [n, dim], to within half a scale: its largest magnitude over
    ``LEVELS``; NaN for a row with NaN or infinity. Numbers all below 1e-30 become zeros. ``bits``: int32 view."""
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
