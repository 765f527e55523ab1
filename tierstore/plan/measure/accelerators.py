"""GPUs by torch: their memory, the way to them, the way between them, matrix products.

Nothing here is of one maker's devices but the clock, so the same code runs, slowly, with tensors in host memory.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..host import Accelerator, Link, Memory
from .memory import ROW_BYTES
from .timing import rate_of

__all__ = ["Sizes", "measure_accelerator", "measure_accelerators"]

_DIM: Final = ROW_BYTES // 4
_BAG: Final = 32


class Sizes(NamedTuple):
    """How much is moved at a time."""

    memory_bytes: int = 4 << 30
    copy_bytes: int = 256 << 20
    rows: int = 1 << 20
    matrix: int = 8192


def measure_accelerators(device: str, *, seconds: float) -> tuple[Accelerator, ...]:
    """One for each GPU of ``device``: none for "cpu", all for "cuda", one for "cuda:1".

    Args:
        seconds: to spend on it, about, all together.

    Raises:
        ValueError: torch sees no such device.
    """
    devices = _devices(device)
    return tuple(measure_accelerator(each, seconds=seconds / len(devices)) for each in devices)


def _devices(device: str) -> list[torch.device]:
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device={device[:100]!r}: expected "cpu", "cuda" or "cuda:1"') from None
    if asked.type == "cpu":
        return []
    count = torch.cuda.device_count() if asked.type == "cuda" else 0
    if not count or (asked.index or 0) >= count:
        raise ValueError(f'device={device!r}: torch sees {count} CUDA devices here; give "cpu", or see to the driver')
    return [torch.device("cuda", number) for number in range(count) if asked.index in (None, number)]


def measure_accelerator(device: torch.device, *, seconds: float, sizes: Sizes | None = None) -> Accelerator:
    """Time one device. Its power and its price are not known."""
    sizes = sizes or Sizes()
    wait: Callable[[], None] = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
    each = seconds / 6
    host = torch.ones(sizes.copy_bytes // 4, pin_memory=device.type == "cuda")
    pcie = _link(host, torch.empty_like(host, device=device), wait, each)
    return Accelerator(
        hbm=_memory(device, wait, sizes, 2 * each),
        pcie=pcie,
        peer=_peer(device, wait, sizes, each) or pcie,
        flops=_flops(device, wait, sizes, each),
    )


def _nothing() -> None:
    """A device whose work is done when the call returns."""


def _rate(work: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Calls a second, the device's work done."""

    def several(count: int) -> None:
        for _ in range(count):
            work()
        wait()

    return rate_of(several, seconds=seconds, clock=time.perf_counter)


def _memory(device: torch.device, wait: Callable[[], None], sizes: Sizes, seconds: float) -> Memory:
    """Reads in order by a sum; reads by rows by pooling 32 of them at a time, which writes little."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else sizes.memory_bytes
    rows = min(sizes.memory_bytes, total // 4) // ROW_BYTES
    table = torch.ones(rows, _DIM, device=device)
    ids = torch.randint(0, rows, (sizes.rows // _BAG, _BAG), device=device)
    in_order = _rate(table.sum, wait, seconds / 2)
    by_rows = _rate(lambda: torch.nn.functional.embedding_bag(ids, table, mode="sum"), wait, seconds / 2)
    return Memory(
        capacity_bytes=float(total),
        bytes_per_s=in_order * table.numel() * 4,
        row_bytes_per_s=by_rows * ids.numel() * ROW_BYTES,
    )


def _link(source: Tensor, target: Tensor, wait: Callable[[], None], seconds: float) -> Link:
    def copy(count: int) -> None:
        target[:count].copy_(source[:count], non_blocking=True)

    whole = _rate(lambda: copy(len(source)), wait, seconds / 2)

    def copy_one() -> None:
        copy(1)
        wait()

    return Link(
        bytes_per_s=whole * source.numel() * source.element_size(), latency_us=1e6 / _rate(copy_one, wait, seconds / 2)
    )


def _peer(device: torch.device, wait: Callable[[], None], sizes: Sizes, seconds: float) -> Link | None:
    """To another device, or None if there is no other."""
    others = torch.cuda.device_count() if device.type == "cuda" else 0
    if others < 2:
        return None
    other = torch.device("cuda", ((device.index or 0) + 1) % others)
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    return _link(source, torch.empty_like(source, device=other), wait, seconds)


def _flops(device: torch.device, wait: Callable[[], None], sizes: Sizes, seconds: float) -> float:
    """In bfloat16, as mixed-precision training multiplies."""
    left = torch.ones(sizes.matrix, sizes.matrix, dtype=torch.bfloat16, device=device)
    products = _rate(lambda: left @ left, wait, seconds)
    return max(1.0, products * 2 * sizes.matrix**3)
