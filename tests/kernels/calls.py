"""Helpers of kernels, called from Python."""

from typing import Any

from tierstore.kernels.jit import JIT_ENABLED, kernel


def from_python(helper: Any) -> Any:
    """A helper of kernels, which only they can call, as a function that Python can."""

    def call(*args: Any) -> Any:
        return helper(*args)

    return kernel(call) if JIT_ENABLED else helper
