"""Kernels without reference counting: they may create no array, and are several times as fast.

Passing a tuple of arrays to a helper makes numba count references to each, by an atomic instruction. The cache's
kernels are built of small helpers over one tuple of arrays that outlive the call, and allocate nothing.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba

from .._jit import JIT_ENABLED

__all__ = ["inline", "kernel", "prefetch_item"]

_NO_COUNTING: Final[dict[str, Any]] = {"_nrt": False}

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """As ``_jit.kernel``; the function must not create arrays, strings or other counted objects."""
    compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy", **_NO_COUNTING)(function)
    return compiled


inline = kernel

if JIT_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def prefetch_item(typing_context: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
        """Bring the cache line of ``array[index]`` nearer, to be changed soon; never faults."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
            int32 = ir.IntType(32)
            shape = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], shape)
            write, keep_in_all_levels, data_cache = int32(1), int32(3), int32(1)
            builder.call(function, [pointer, write, keep_in_all_levels, data_cache])
            return context.get_dummy_value()

        return types.void(array, index), generate

else:

    def prefetch_item(array: Any, index: Any) -> None:
        """Nothing: a hint to the processor."""
