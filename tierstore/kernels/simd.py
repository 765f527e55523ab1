"""Vectors of float32 as values in kernels: sums stay in registers while a loop goes over rows.

A loop over columns inside a loop over rows reads and writes its sum at each row, and numba must assume that sum and row
may overlap. With these, the sums of 16 or 4 columns are one value. Each operation is the IEEE one on each element, no
two are contracted, so results have the same bits as the plain loop's. LLVM makes of them what the processor has.

===============================  ==========================================================
``load16(rows, i, j, half)``     ``rows[i, j : j + 16]``, rows as in ``floats``, C-contiguous
``store16(rows, i, j, v, half)`` the other way round, rounded as ``floats`` does
``add16``, ``subtract16``,       element by element
``multiply16``, ``divide16``
``sqrt16``                       correctly rounded square roots
``fill16(value)``                16 times the same float32
===============================  ==========================================================

and the same with 4, but for roots and differences. No bounds are checked.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import floats
from .arrays import Floats, Weights
from .jit import JIT_ENABLED

__all__ = [
    "NARROW",
    "WIDE",
    "add4",
    "add16",
    "divide4",
    "divide16",
    "fill4",
    "fill16",
    "item",
    "load4",
    "load16",
    "multiply4",
    "multiply16",
    "prefetch_line",
    "put",
    "sqrt16",
    "store4",
    "store16",
    "subtract16",
]

WIDE: Final = 16
"""float32 of a cache line."""
NARROW: Final = 4


class _Operations(NamedTuple):
    load: Callable[..., Any]
    store: Callable[..., Any]
    add: Callable[..., Any]
    subtract: Callable[..., Any]
    multiply: Callable[..., Any]
    divide: Callable[..., Any]
    sqrt: Callable[..., Any]
    fill: Callable[..., Any]


if JIT_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic, models, register_model

    from .jit import require_contiguous

    class _Vector(types.Type):  # type: ignore[misc, unused-ignore]
        def __init__(self, lanes: int) -> None:
            self.lanes = lanes
            super().__init__(name=f"float32x{lanes}")

    @register_model(_Vector)
    class _VectorModel(models.PrimitiveModel):  # type: ignore[misc, unused-ignore]
        def __init__(self, manager: Any, vector: _Vector) -> None:
            super().__init__(manager, vector, ir.VectorType(ir.FloatType(), vector.lanes))

    def _address(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
        """Of element ``[row, column]``."""
        made = context.make_array(array_type)(context, builder, array)
        stride = cgutils.unpack_tuple(builder, made.strides)[0]
        start = builder.bitcast(made.data, ir.IntType(8).as_pointer())
        size = ir.Constant(stride.type, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
        return builder.gep(start, [builder.add(builder.mul(row, stride), builder.mul(column, size))])

    def _widen(builder: Any, halves: Any, half: Any, lanes: int) -> Any:
        """``floats.bits_to_float`` of each element."""
        words, float_words = ir.VectorType(ir.IntType(32), lanes), ir.VectorType(ir.FloatType(), lanes)

        def constant(value: int) -> Any:
            return ir.Constant(words, [value] * lanes)

        wide = builder.zext(halves, words)
        brain = builder.shl(wide, constant(16))
        sign = builder.shl(builder.and_(wide, constant(0x8000)), constant(16))
        magnitude = builder.shl(builder.and_(wide, constant(0x7FFF)), constant(13))
        bias = builder.bitcast(constant(0x77800000), float_words)
        scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, float_words), bias), words)
        is_special = builder.icmp_unsigned(">=", magnitude, constant(0x0F800000))
        finite_or_not = builder.select(is_special, builder.add(magnitude, constant(0x70000000)), scaled)
        is_brain = builder.icmp_signed("==", half, ir.Constant(half.type, floats.BFLOAT16))
        return builder.bitcast(builder.select(is_brain, brain, builder.or_(sign, finite_or_not)), float_words)

    def _narrow(builder: Any, values: Any, half: Any, lanes: int) -> Any:
        """``floats.float_to_bits`` of each element."""
        words, floats_type = ir.VectorType(ir.IntType(32), lanes), ir.VectorType(ir.FloatType(), lanes)

        def constant(value: int) -> Any:
            return ir.Constant(words, [value] * lanes)

        def odd(shift: int) -> Any:
            return builder.and_(builder.lshr(magnitude, constant(shift)), constant(1))

        bits = builder.bitcast(values, words)
        sign = builder.lshr(builder.and_(bits, constant(0x80000000)), constant(16))
        magnitude = builder.and_(bits, constant(0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
        rounded = builder.add(builder.add(magnitude, constant(0x7FFF)), odd(16))
        brain = builder.select(is_nan, constant(0x7FC0), builder.lshr(rounded, constant(16)))
        rebiased = builder.sub(builder.add(builder.add(magnitude, constant(0xFFF)), odd(13)), constant(0x38000000))
        float16 = builder.lshr(rebiased, constant(13))
        one_half = builder.bitcast(constant(0x3F000000), floats_type)
        half_sum = builder.bitcast(builder.fadd(builder.bitcast(magnitude, floats_type), one_half), words)
        is_small = builder.icmp_unsigned("<", magnitude, constant(0x38800000))
        float16 = builder.select(is_small, builder.sub(half_sum, constant(0x3F000000)), float16)
        is_large = builder.icmp_unsigned(">=", magnitude, constant(0x47800000))
        float16 = builder.select(is_large, constant(0x7C00), float16)
        float16 = builder.select(is_nan, constant(0x7E00), float16)
        is_brain = builder.icmp_signed("==", half, ir.Constant(half.type, floats.BFLOAT16))
        return builder.trunc(
            builder.or_(sign, builder.select(is_brain, brain, float16)), ir.VectorType(ir.IntType(16), lanes)
        )

    def _operations(lanes: int) -> _Operations:
        vector = _Vector(lanes)

        @intrinsic
        def load(typing_context: Any, rows: Any, row: Any, column: Any, half: Any) -> Any:  # noqa: ARG001
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                element = context.get_data_type(signature.args[0].dtype)
                place = _address(context, builder, signature.args[0], *args[:3])
                loaded = builder.load(builder.bitcast(place, ir.VectorType(element, lanes).as_pointer()))
                loaded.align = context.get_abi_sizeof(element)
                return loaded if element == ir.FloatType() else _widen(builder, loaded, args[3], lanes)

            return vector(rows, types.int64, types.int64, types.int64), generate

        @intrinsic
        def store(typing_context: Any, rows: Any, row: Any, column: Any, value: Any, half: Any) -> Any:  # noqa: ARG001
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                element = context.get_data_type(signature.args[0].dtype)
                place = _address(context, builder, signature.args[0], *args[:3])
                kept = args[3] if element == ir.FloatType() else _narrow(builder, args[3], args[4], lanes)
                stored = builder.store(kept, builder.bitcast(place, kept.type.as_pointer()))
                stored.align = context.get_abi_sizeof(element)
                return context.get_dummy_value()

            return types.void(rows, types.int64, types.int64, vector, types.int64), generate

        def elementwise(name: str) -> Callable[..., Any]:
            @intrinsic
            def operation(typing_context: Any, left: Any, right: Any) -> Any:  # noqa: ARG001
                def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
                    return getattr(builder, name)(*args)

                return vector(vector, vector), generate

            made: Callable[..., Any] = operation
            return made

        @intrinsic
        def fill(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
                filled = ir.Constant(context.get_value_type(vector), ir.Undefined)
                for lane in range(lanes):
                    filled = builder.insert_element(filled, args[0], ir.Constant(ir.IntType(32), lane))
                return filled

            return vector(types.float32), generate

        @intrinsic
        def sqrt(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
                shape = ir.FunctionType(args[0].type, [args[0].type])
                function = cgutils.get_or_insert_function(builder.module, shape, f"llvm.sqrt.v{lanes}f32")
                return builder.call(function, args)

            return vector(vector), generate

        add, subtract, multiply, divide = (elementwise(name) for name in ("fadd", "fsub", "fmul", "fdiv"))
        return _Operations(load, store, add, subtract, multiply, divide, sqrt, fill)

    @intrinsic
    def item(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
        """``array[index]``, index not negative: numba compiles a test for that into each access."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.load(builder.gep(data, [args[1]]))

        require_contiguous(array)
        return array.dtype(array, types.int64), generate

    @intrinsic
    def put(typing_context: Any, array: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
        """``array[index] = value``, index not negative."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            builder.store(args[2], builder.gep(data, [args[1]]))
            return context.get_dummy_value()

        require_contiguous(array)
        return types.void(array, types.int64, array.dtype), generate

    @intrinsic
    def prefetch_line(typing_context: Any, rows: Any, row: Any, column: Any) -> Any:  # noqa: ARG001
        """Bring the cache line of ``rows[row, column]`` nearer; never faults."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = _address(context, builder, signature.args[0], *args)
            int32 = ir.IntType(32)
            shape = ir.FunctionType(ir.VoidType(), [place.type, int32, int32, int32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], shape)
            read, keep_in_all_levels, data_cache = int32(0), int32(3), int32(1)
            builder.call(function, [place, read, keep_in_all_levels, data_cache])
            return context.get_dummy_value()

        return types.void(rows, types.int64, types.int64), generate

else:

    def _operations(lanes: int) -> _Operations:
        def load(rows: Weights, row: int, column: int, half: int) -> Floats:
            return np.array([floats.load(rows[row], c, half) for c in range(column, column + lanes)], np.float32)

        def store(rows: Weights, row: int, column: int, value: Floats, half: int) -> None:
            for lane in range(lanes):
                floats.store(rows[row], column + lane, value[lane], half)

        def fill(value: np.float32) -> Floats:
            return np.full(lanes, value, np.float32)

        return _Operations(load, store, np.add, np.subtract, np.multiply, np.divide, np.sqrt, fill)

    def item(array: NDArray[Any], index: int) -> Any:
        """``array[index]``."""
        return array[index]

    def put(array: NDArray[Any], index: int, value: Any) -> None:
        """``array[index] = value``."""
        array[index] = value

    def prefetch_line(rows: Weights, row: int, column: int) -> None:
        """Nothing: a hint to the processor."""


load16, store16, add16, subtract16, multiply16, divide16, sqrt16, fill16 = _operations(WIDE)
load4, store4, add4, _, multiply4, divide4, _, fill4 = _operations(NARROW)
