"""Vectors of float32 as values in kernels: sums stay in registers while a loop goes over rows.

A loop over columns inside a loop over rows reads and writes its sum at each row, and numba must assume that sum and row
may overlap. With these, the sums of some columns are one value, of 4, 16 or 64 *lanes*; with one lane it is a
float32. Each operation is the IEEE one on each element, no two are contracted, so results have the same bits as the
plain loop's. LLVM makes of them what the processor has.

==========================================  ===================================================================
``load(rows, i, j, dtype_code, lanes)``     ``rows[i, j : j + lanes]``, rows as in ``floats``, C-contiguous
``store(rows, i, j, v, dtype_code, lanes)`` the other way round, rounded as ``floats`` does
``fill(value, lanes)``                      so many times the same float32
``+ - * /``                                 element by element; one side may be a float32
``root(v)``                                 correctly rounded square roots
``halved(v)``                               the upper half added to the lower one, again and again until one is left
``bytes16(row, place)``                     16 bytes of a row (uint8 [n]) as numbers
``nibbles16(row, place)``                   16 numbers of four bits in 8 bytes, the lower half of each byte first
``fma16(v, factor, term)``                  ``v * factor + term``, rounded once; ``factor`` is a float32
==========================================  ===================================================================

``lanes`` is a constant where a kernel is compiled (``jit.uncounted_template`` passes it on). No bounds are checked.
"""

import operator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import floats
from .arrays import Bytes, Floats, Weights
from .jit import JIT_ENABLED, fused_multiply_add

WIDE: Final = 16  # float32 of a cache line
WIDEST: Final = 64  # most lanes of a vector

if JIT_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
    from numba.extending import intrinsic, lower_builtin, models, register_model

    from .jit import address_of, require_contiguous

    _INT32: Final = ir.IntType(32)

    class _Vector(types.Type):  # type: ignore[misc, unused-ignore]
        def __init__(self, lanes: int) -> None:
            self.lanes = lanes
            super().__init__(name=f"float32x{lanes}")

    @register_model(_Vector)
    class _VectorModel(models.PrimitiveModel):  # type: ignore[misc, unused-ignore]
        def __init__(self, manager: Any, vector: _Vector) -> None:
            super().__init__(manager, vector, _of(ir.FloatType(), vector.lanes))

    _VECTORS: Final = {lanes: _Vector(lanes) for lanes in (4, 16, 64)}

    def _type_of(lanes: Any) -> Any:
        return types.float32 if lanes.literal_value == 1 else _VECTORS[lanes.literal_value]

    def _of(element: Any, lanes: int) -> Any:
        return element if lanes == 1 else ir.VectorType(element, lanes)

    def _like(words: Any, value: int) -> Any:
        return ir.Constant(words, value if isinstance(words, ir.IntType) else [value] * words.count)

    def _spread(builder: Any, value: Any, vector: Any) -> Any:
        """A float32 in each lane of a vector type of LLVM's."""
        nothing = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(nothing, value, _INT32(0))
        return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_INT32, vector.count), None))

    def _add_operator(function: Any, name: str) -> None:
        """Teach numba an operator between vectors, and between a vector and a float32 on either side."""

        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = context.get_value_type(signature.return_type)
            return getattr(builder, name)(
                *(each if each.type == vector else _spread(builder, each, vector) for each in args)
            )

        scalar = types.float32
        shapes = [(v, *pair) for v in _VECTORS.values() for pair in ((v, v), (v, scalar), (scalar, v))]
        cases = [signature(*shape) for shape in shapes]
        infer_global(function)(type("Operator", (ConcreteTemplate,), {"cases": cases}))
        for _, left, right in shapes:
            lower_builtin(function, left, right)(lower)

    for _function, _name in (
        (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")
    ):  # fmt: skip
        _add_operator(_function, _name)

    def _widen(builder: Any, halves: Any, dtype_code: Any, lanes: int) -> Any:
        """``floats.bits_to_float`` of each element."""
        words, float_words = _of(_INT32, lanes), _of(ir.FloatType(), lanes)

        def constant(value: int) -> Any:
            return _like(words, value)

        wide = builder.zext(halves, words)
        brain = builder.shl(wide, constant(16))
        sign = builder.shl(builder.and_(wide, constant(0x8000)), constant(16))
        magnitude = builder.shl(builder.and_(wide, constant(0x7FFF)), constant(13))
        bias = builder.bitcast(constant(0x77800000), float_words)
        scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, float_words), bias), words)
        is_special = builder.icmp_unsigned(">=", magnitude, constant(0x0F800000))
        finite_or_not = builder.select(is_special, builder.add(magnitude, constant(0x70000000)), scaled)
        is_brain = builder.icmp_signed("==", dtype_code, ir.Constant(dtype_code.type, floats.BFLOAT16))
        return builder.bitcast(builder.select(is_brain, brain, builder.or_(sign, finite_or_not)), float_words)

    def _narrow(builder: Any, values: Any, dtype_code: Any, lanes: int) -> Any:
        """``floats.float_to_bits`` of each element."""
        words, floats_type = _of(_INT32, lanes), _of(ir.FloatType(), lanes)

        def constant(value: int) -> Any:
            return _like(words, value)

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
        is_brain = builder.icmp_signed("==", dtype_code, ir.Constant(dtype_code.type, floats.BFLOAT16))
        return builder.trunc(builder.or_(sign, builder.select(is_brain, brain, float16)), _of(ir.IntType(16), lanes))

    @intrinsic(prefer_literal=True)
    def load(typing_context: Any, rows: Any, row: Any, column: Any, dtype_code: Any, lanes: Any) -> Any:  # noqa: ARG001
        count = lanes.literal_value

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            element = context.get_data_type(signature.args[0].dtype)
            place = address_of(context, builder, signature.args[0], *args[:3])
            loaded = builder.load(builder.bitcast(place, _of(element, count).as_pointer()))
            loaded.align = context.get_abi_sizeof(element)
            return loaded if element == ir.FloatType() else _widen(builder, loaded, args[3], count)

        return _type_of(lanes)(rows, types.int64, types.int64, types.int64, lanes), generate

    @intrinsic(prefer_literal=True)
    def store(typing_context: Any, rows: Any, row: Any, column: Any, value: Any, dtype_code: Any, lanes: Any) -> Any:  # noqa: ARG001
        count = lanes.literal_value

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            element = context.get_data_type(signature.args[0].dtype)
            place = address_of(context, builder, signature.args[0], *args[:3])
            kept = args[3] if element == ir.FloatType() else _narrow(builder, args[3], args[4], count)
            stored = builder.store(kept, builder.bitcast(place, kept.type.as_pointer()))
            stored.align = context.get_abi_sizeof(element)
            return context.get_dummy_value()

        return types.void(rows, types.int64, types.int64, _type_of(lanes), types.int64, lanes), generate

    @intrinsic(prefer_literal=True)
    def fill(typing_context: Any, value: Any, lanes: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = context.get_value_type(signature.return_type)
            return args[0] if vector == args[0].type else _spread(builder, args[0], vector)

        return _type_of(lanes)(types.float32, lanes), generate

    def _call(builder: Any, name: str, *args: Any) -> Any:
        kind = args[0].type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        shape = ir.FunctionType(kind, [kind] * len(args))
        return builder.call(cgutils.get_or_insert_function(builder.module, shape, f"llvm.{name}.{suffix}"), args)

    @intrinsic
    def root(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return _call(builder, "sqrt", *args)

        return value(value), generate

    @intrinsic
    def halved(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            left, lanes = args[0], value.lanes
            while lanes > 1:
                lanes //= 2
                lower, upper = ([_INT32(half + lane) for lane in range(lanes)] for half in (0, lanes))
                order = ir.VectorType(_INT32, lanes)
                halves = (builder.shuffle_vector(left, left, ir.Constant(order, places)) for places in (lower, upper))
                left = builder.fadd(*halves)
            return builder.extract_element(left, _INT32(0))

        return types.float32(value), generate

    @intrinsic
    def fma16(typing_context: Any, value: Any, factor: Any, term: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return _call(builder, "fma", args[0], _spread(builder, args[1], args[0].type), args[2])

        return value(value, types.float32, value), generate

    def _reader(kind: Any, element: Any, count: int, finish: Any = lambda _, value: value) -> Any:
        """Reads so many elements that begin at a byte of a row."""

        @intrinsic
        def read(typing_context: Any, row: Any, place: Any) -> Any:  # noqa: ARG001
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                data = context.make_array(signature.args[0])(context, builder, args[0]).data
                pointer = builder.bitcast(builder.gep(data, [args[1]]), _of(element, count).as_pointer())
                value = builder.load(pointer)
                value.align = 1
                return finish(builder, value)

            return kind(row, types.intp), generate

        return read

    def _as_floats(builder: Any, levels: Any) -> Any:
        return builder.uitofp(levels, ir.VectorType(ir.FloatType(), WIDE))

    def _split(builder: Any, pairs: Any) -> Any:
        low = builder.and_(pairs, _like(pairs.type, 15))
        high = builder.lshr(pairs, _like(pairs.type, 4))
        places = [place for pair in range(WIDE // 2) for place in (pair, pair + WIDE // 2)]
        order = ir.Constant(ir.VectorType(_INT32, WIDE), places)
        return _as_floats(builder, builder.shuffle_vector(low, high, order))

    float_at = _reader(types.float32, ir.FloatType(), 1)
    half_bits_at = _reader(types.uint16, ir.IntType(16), 1)
    bytes16 = _reader(_VECTORS[WIDE], ir.IntType(8), WIDE, _as_floats)
    nibbles16 = _reader(_VECTORS[WIDE], ir.IntType(8), WIDE // 2, _split)

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

else:
    root = np.sqrt

    def load(rows: Weights, row: int, column: int, dtype_code: int, lanes: int) -> Any:
        values: Any = rows[row, column : column + lanes]
        if values.dtype != np.float32:
            values = np.array([floats.bits_to_float(bits, dtype_code) for bits in values], np.float32)
        assert len(values) == lanes
        return values[0] if lanes == 1 else values.copy()

    def store(rows: Weights, row: int, column: int, value: Any, dtype_code: int, lanes: int) -> None:
        for lane, each in enumerate(np.broadcast_to(value, lanes)):
            rows[row, column + lane] = each if rows.dtype == np.float32 else floats.float_to_bits(each, dtype_code)

    def fill(value: np.float32, lanes: int) -> Any:
        return value if lanes == 1 else np.full(lanes, value, np.float32)

    def halved(value: Floats) -> Any:
        while len(value) > 1:
            value = value[: len(value) // 2] + value[len(value) // 2 :]
        return value[0]

    def float_at(row: Bytes, place: int) -> Any:
        return row[place : place + 4].copy().view(np.float32)[0]

    def half_bits_at(row: Bytes, place: int) -> Any:
        return row[place : place + 2].copy().view(np.uint16)[0]

    def bytes16(row: Bytes, place: int) -> Floats:
        return row[place : place + WIDE].astype(np.float32)

    def nibbles16(row: Bytes, place: int) -> Floats:
        pairs = row[place : place + WIDE // 2]
        return np.stack([pairs & 15, pairs >> 4], axis=1).ravel().astype(np.float32)

    def fma16(value: Floats, factor: np.float32, term: Floats) -> Floats:
        return np.array([fused_multiply_add(value[i], factor, term[i]) for i in range(WIDE)], np.float32)

    def item(array: NDArray[Any], index: int) -> Any:
        """``array[index]``."""
        return array[index]

    def put(array: NDArray[Any], index: int, value: Any) -> None:
        """``array[index] = value``."""
        array[index] = value
