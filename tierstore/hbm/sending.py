"""Arrays on their way to the device: one copy for all that belong together, through page-locked buffers in turn."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .lanes import Lane, Mark

_NUM_BUFFERS: Final = 4
_ALIGNMENT_BYTES: Final = 16
_SMALLEST_BYTES: Final = 2**16

Field = tuple[torch.dtype, int]
"""An array's type and length."""


class _Buffer:
    """Page-locked memory, and when the copy out of it is done."""

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.free: Mark | None = None


class Sender:
    """Sends arrays to a device on its side stream. For any thread.

    Buffers grow to the largest batch. A caller waits only for the copy of the batch before the last three.
    """

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane = lane
        self._device = device
        self._lock = threading.Lock()
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._number = 0

    def send(self, fields: Sequence[Field], fill: Callable[[list[NDArray[Any]]], None]) -> tuple[list[Tensor], Mark]:
        """Have ``fill(arrays)`` write numpy arrays of these types and lengths, and copy them to the device.

        Returns:
            tensors on the device, and when they are there.
        """
        sizes = [length * dtype.itemsize for dtype, length in fields]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes)]).tolist()

        def views(packed: Tensor) -> list[Tensor]:
            return [
                packed[start : start + size].view(dtype)
                for start, size, (dtype, _) in zip(starts, sizes, fields, strict=False)
            ]

        with self._lock:
            buffer = self._next(starts[-1])
            host = buffer.host[: starts[-1]]
            fill([view.numpy() for view in views(host)])
            with self._lane.side():
                sent = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
                sent.copy_(host, non_blocking=True)
                buffer.free = mark = self._lane.mark()
        return views(sent), mark

    def _next(self, size_bytes: int) -> _Buffer:
        buffer = self._buffers[self._number % _NUM_BUFFERS]
        self._number += 1
        if buffer.free is not None and not buffer.free.query():
            buffer.free.synchronize()
        if len(buffer.host) < size_bytes:
            grown = 1 << max(size_bytes - 1, _SMALLEST_BYTES - 1).bit_length()
            with torch.inference_mode(False):
                buffer.host = torch.empty(grown, dtype=torch.uint8, device="cpu", pin_memory=self._lane.pin_memory)
        return buffer
