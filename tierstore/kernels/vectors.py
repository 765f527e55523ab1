"""Several bytes of a quantized row in one instruction: sixteen columns, a scale.

The compiler would make vectors of a loop over columns too, but only behind a check that row and result do not overlap,
made anew for each row, and for no fewer columns than four of its vectors hold: twice the time for rows of 16 to 64. A
float that it is to put together from single bytes takes a load, and a test for a negative index, for each of them.
"""

from typing import Any, Final

import numpy as np

from .arrays import Bytes, Floats
from .jit import JIT_ENABLED, fused_multiply_add

__all__ = ["LANES", "add_bytes", "add_nibbles", "float_at", "half_bits_at"]

LANES: Final = 16

if JIT_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    _INT32: Final = ir.IntType(32)
    _FLOATS: Final = ir.VectorType(ir.FloatType(), LANES)

    def _pointer(context: Any, builder: Any, array_type: Any, array: Any, place: Any, what: Any) -> Any:
        data = context.make_array(array_type)(context, builder, array).data
        return builder.bitcast(builder.gep(data, [place]), what.as_pointer())

    def _read(context: Any, builder: Any, signature: Any, args: Any, what: Any) -> Any:
        """What lies in the row from ``place`` on; it need not be aligned."""
        value = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], what))
        value.align = 1
        return value

    @intrinsic
    def float_at(typing_context: Any, row: Any, place: Any) -> Any:  # noqa: ARG001
        """The float32 whose bytes begin at ``row[place]``; no bounds check."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _read(context, builder, signature, args, ir.FloatType())

        return types.float32(row, types.intp), generate

    @intrinsic
    def half_bits_at(typing_context: Any, row: Any, place: Any) -> Any:  # noqa: ARG001
        """The uint16 whose bytes begin at ``row[place]``; no bounds check."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _read(context, builder, signature, args, ir.IntType(16))

        return types.uint16(row, types.intp), generate

    def _read_bytes(context: Any, builder: Any, signature: Any, args: Any, count: int) -> Any:
        return _read(context, builder, signature, args, ir.VectorType(ir.IntType(8), count))

    def _shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
        return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_INT32, LANES), places))

    def _filled(builder: Any, value: Any) -> Any:
        """All lanes ``value``."""
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        return _shuffled(builder, builder.insert_element(nothing, value, _INT32(0)), nothing, [0] * LANES)

    def _add(context: Any, builder: Any, signature: Any, args: Any, levels: Any) -> Any:
        """``out += levels * scale + bias``, bias first, from the column on."""
        scale, bias = _filled(builder, args[2]), _filled(builder, args[3])
        pointer = _pointer(context, builder, signature.args[4], args[4], args[5], _FLOATS)
        before = builder.load(pointer)
        shape = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{LANES}f32")
        numbers = builder.uitofp(levels, _FLOATS)
        stored = builder.store(builder.call(multiply_add, [numbers, scale, builder.fadd(before, bias)]), pointer)
        before.align = stored.align = 4
        return context.get_dummy_value()

    def _signature(row: Any, out: Any) -> Any:
        return types.void(row, types.intp, types.float32, types.float32, out, types.intp)

    @intrinsic
    def add_bytes(
        typing_context: Any, row: Any, place: Any, scale: Any, bias: Any, out: Any, column: Any  # noqa: ARG001
    ) -> Any:  # fmt: skip
        """``out[column + i] = fma(row[place + i], scale, out[column + i] + bias)`` for 16 columns; no bounds check."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _add(context, builder, signature, args, _read_bytes(context, builder, signature, args, LANES))

        return _signature(row, out), generate

    @intrinsic
    def add_nibbles(
        typing_context: Any, row: Any, place: Any, scale: Any, bias: Any, out: Any, column: Any  # noqa: ARG001
    ) -> Any:  # fmt: skip
        """``add_bytes`` of 16 columns in 8 bytes, the lower four bits of each first."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pairs = _read_bytes(context, builder, signature, args, LANES // 2)
            low = builder.and_(pairs, ir.Constant(pairs.type, [15] * (LANES // 2)))
            high = builder.lshr(pairs, ir.Constant(pairs.type, [4] * (LANES // 2)))
            places = [place for pair in range(LANES // 2) for place in (pair, pair + LANES // 2)]
            return _add(context, builder, signature, args, _shuffled(builder, low, high, places))

        return _signature(row, out), generate

else:

    def float_at(row: Bytes, place: int) -> Any:
        """The float32 whose bytes begin at ``row[place]``."""
        return row[place : place + 4].copy().view(np.float32)[0]

    def half_bits_at(row: Bytes, place: int) -> Any:
        """The uint16 whose bytes begin at ``row[place]``."""
        return row[place : place + 2].copy().view(np.uint16)[0]

    def add_bytes(row: Bytes, place: int, scale: np.float32, bias: np.float32, out: Floats, column: int) -> None:
        """``out[column + i] = fma(row[place + i], scale, out[column + i] + bias)`` for 16 columns."""
        for i in range(LANES):
            level = np.float32(row[place + i])
            out[column + i] = fused_multiply_add(level, scale, out[column + i] + bias)

    def add_nibbles(row: Bytes, place: int, scale: np.float32, bias: np.float32, out: Floats, column: int) -> None:
        """``add_bytes`` of 16 columns in 8 bytes, the lower four bits of each first."""
        for i in range(LANES):
            level = np.float32(row[place + i // 2] >> (4 * (i % 2)) & 15)
            out[column + i] = fused_multiply_add(level, scale, out[column + i] + bias)
