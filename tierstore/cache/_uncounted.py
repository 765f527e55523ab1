"""Kernels without reference counting: they may create no array, and are several times as fast.

Passing a tuple of arrays to a helper makes numba count references to each, by an atomic instruction. The cache's
kernels are built of small helpers over one tuple of arrays that outlive the call, and allocate nothing.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba

__all__ = ["inline", "kernel"]

_NO_COUNTING: Final[dict[str, Any]] = {"_nrt": False}

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """As ``_jit.kernel``; the function must not create arrays, strings or other counted objects."""
    compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy", **_NO_COUNTING)(function)
    return compiled


inline = kernel
