"""Launches of Triton kernels, one thread at a time.

Triton compiles a kernel when it is first launched with new constants, and two threads must not do that at once; its
interpreter runs one kernel at a time at all.
"""

import threading
from typing import Any, Final

LAUNCH: Final = {"enable_fp_fusion": False}
"""A product and a sum contracted to one instruction round once instead of twice: other bits than the CPU's."""

_lock: Final = threading.RLock()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)`` on the current stream; returns before it has run."""
    with _lock:
        kernel[grid](*arguments, **(LAUNCH | options))
