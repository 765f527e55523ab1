"""The one way kernels are compiled: nopython, without the GIL, cached on disk.

``NUMBA_DISABLE_JIT=1`` runs every kernel as plain Python; tests use it to check the kernels' logic twice.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba
from numba.core import event

__all__ = ["JIT_ENABLED", "inline", "kernel"]

JIT_ENABLED: Final = not numba.config.DISABLE_JIT
_LOG: Final = logging.getLogger("tierstore")

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile at first call; the machine code is kept beside the source or in the user's cache directory."""
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def inline(function: F) -> F:
    """A helper of kernels, compiled into its callers."""
    return numba.njit(nogil=True, cache=True, error_model="numpy", inline="never")(function)  # type: ignore[no-any-return]


class _CompileNotice(event.Listener):
    """Say once that kernels are being compiled, so that the first call's wait explains itself."""

    def __init__(self) -> None:
        self._said = False
        self._depth = 0
        self._started = 0.0

    def on_start(self, event: event.Event) -> None:
        module = getattr(getattr(event.data.get("dispatcher"), "py_func", None), "__module__", "")
        if not module.startswith("tierstore"):
            return
        if not self._said:
            self._said = True
            _LOG.warning("compiling kernels for this machine (once; kept in the on-disk cache) ...")

    def on_end(self, event: event.Event) -> None:
        pass


if JIT_ENABLED:
    event.register("numba:compile", _CompileNotice())
