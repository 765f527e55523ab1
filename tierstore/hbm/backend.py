"""Kernels of a device: Triton's on CUDA, launched by one thread at a time, and twins elsewhere.

Triton compiles a kernel when it is first launched with new constants, and two threads must not do that at once; its
interpreter runs one kernel at a time at all.
"""

import threading
from types import ModuleType
from typing import Any, Final

import torch

from . import cache_twin, rows_twin

LAUNCH: Final = {"enable_fp_fusion": False}
"""A product and a sum contracted to one instruction round once instead of twice: other bits than the CPU's."""

_lock: Final = threading.RLock()


def cache_kernels(device: torch.device) -> ModuleType:
    """Those of the cache, and those that group keys."""
    if device.type != "cuda":
        return cache_twin
    from . import cache_triton

    return cache_triton


def row_kernels(device: torch.device) -> ModuleType:
    """Those over rows."""
    if device.type != "cuda":
        return rows_twin
    from . import rows_triton

    return rows_triton


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)`` on the current stream of its first argument's device, a tensor; returns
    before it has run. Does nothing where the grid is empty."""
    if 0 in grid:
        return
    with _lock, torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **(LAUNCH | options))
