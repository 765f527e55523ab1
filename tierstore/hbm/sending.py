"""Arrays on their way to the device: one copy for all that belong together, through page-locked buffers in turn."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.arrays import Int32s
from .lanes import Lane, Mark

_NUM_BUFFERS: Final = 2
_WORD_BYTES: Final = 4
_ALIGNMENT_WORDS: Final = 4
_NUMPY: Final[dict[torch.dtype, Any]] = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}

Field = tuple[torch.dtype, int]
"""An array's type and length."""


class _Buffer:
    """Page-locked memory, and when the copy out of it is done.

    Attributes:
        host: int32; words: the same as a numpy array.
    """

    host: Tensor
    words: Int32s

    def __init__(self) -> None:
        self.replace(torch.empty(0, dtype=torch.int32, device="cpu"))
        self.free: Mark | None = None

    def replace(self, host: Tensor) -> None:
        """Have other memory."""
        self.host, self.words = host, host.numpy()


class Sender:
    """Sends arrays to a device on its side stream. For any thread.

    Two buffers, which grow to the largest batch, rounded up to a power of two. A caller waits only if the copy before
    the last is not done.

    Attributes:
        lane: the device's streams.
    """

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.lane = lane
        self.device = device
        self._lock = threading.Lock()
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._number = 0

    def send(self, fields: Sequence[Field], fill: Callable[[list[NDArray[Any]]], None]) -> tuple[list[Tensor], Mark]:
        """Have ``fill(arrays)`` write numpy arrays of these types and lengths, and copy them to the device.

        Returns:
            tensors on the device, and when they are there.

        Raises:
            RuntimeError: the calling thread's current stream is captured into a CUDA graph.
        """
        self.lane.require_no_capture("nothing is sent from the host: run such a step without a graph before")
        # A torch operation costs the host as much as five of numpy's: one cuts all that was sent.
        lengths = [length * dtype.itemsize // _WORD_BYTES for dtype, length in fields]
        cuts = [cut for length in lengths for cut in (length, -length % _ALIGNMENT_WORDS)]
        total = sum(cuts)
        with self._lock:
            buffer = self._next(total)
            arrays, start = [], 0
            for (dtype, _), length in zip(fields, lengths, strict=True):
                arrays.append(buffer.words[start : start + length].view(_NUMPY[dtype]))
                start += length + -length % _ALIGNMENT_WORDS
            fill(arrays)
            with self.lane.side():
                sent = torch.empty(total, dtype=torch.int32, device=self.device)
                sent.copy_(buffer.host[:total], non_blocking=True)
                buffer.free = mark = self.lane.mark()
        pieces = sent.split_with_sizes(cuts)[::2]
        return [
            piece if dtype == torch.int32 else piece.view(dtype)
            for piece, (dtype, _) in zip(pieces, fields, strict=True)
        ], mark

    def _next(self, num_words: int) -> _Buffer:
        buffer = self._buffers[self._number % _NUM_BUFFERS]
        self._number += 1
        if buffer.free is not None and not buffer.free.query():
            buffer.free.synchronize()
        if len(buffer.words) < num_words:
            grown = 1 << (num_words - 1).bit_length()
            with torch.inference_mode(False):
                buffer.replace(torch.empty(grown, dtype=torch.int32, device="cpu", pin_memory=self.lane.pin_memory))
        return buffer
