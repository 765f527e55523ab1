"""Calling helpers of kernels, which only kernels can call."""

from collections.abc import Callable
from typing import Any

from tierstore.kernels.jit import JIT_ENABLED, kernel


def from_python(helper: Callable[..., Any]) -> Callable[..., Any]:
    """The helper, as a function that Python can call."""
    if not JIT_ENABLED:
        return helper

    def call(*args: Any) -> Any:
        return helper(*args)

    return kernel(call)
