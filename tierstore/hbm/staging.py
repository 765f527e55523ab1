"""What crosses between host and device, by page-locked buffers: a batch's arrays by one copy, rows by kernels.

Rows go up by two buffers in turn, so that the host fills one while a kernel reads the other. They come down by one, as
the host waits for it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.arrays import Int32s, Int64s, Words
from ..layout import RowLayout
from .streams import Mark, Streams

_SEND_BUFFERS: Final = 2
_WORD_BYTES: Final = 4
_ALIGNMENT_WORDS: Final = 4
_TORCH: Final = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_NUMPY: Final[dict[torch.dtype, Any]] = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}

Field = tuple[torch.dtype, int]
"""An array's type and length."""


@dataclass(eq=False)
class _SendBuffer:
    """Page-locked memory, int32, and when the copy out of it is done."""

    host: Tensor
    free: Mark | None = None


class Sender:
    """Sends arrays to a device on its side stream, for any thread. Two buffers grow to the largest batch, rounded up to
    a power of two: a caller waits only if the copy before the last is not done."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.streams = streams
        self.device = device
        self._lock = threading.RLock()
        nothing = torch.empty(0, dtype=torch.int32, device="cpu")
        self._buffers = [_SendBuffer(nothing) for _ in range(_SEND_BUFFERS)]
        self._number = 0

    def send(self, fields: Sequence[Field], fill: Callable[[list[NDArray[Any]]], None]) -> tuple[list[Tensor], Mark]:
        """Have ``fill(arrays)`` write numpy arrays of these types and lengths, and copy them to the device: tensors
        there, and when."""
        # A torch operation costs the host as much as five of numpy's: one cuts all that was sent.
        lengths = [length * dtype.itemsize // _WORD_BYTES for dtype, length in fields]
        cuts = [cut for length in lengths for cut in (length, -length % _ALIGNMENT_WORDS)]
        total = sum(cuts)
        with self._lock:
            buffer = self._next(total)
            words: Int32s = buffer.host.numpy()
            arrays, start = [], 0
            for (dtype, _), length in zip(fields, lengths, strict=True):
                arrays.append(words[start : start + length].view(_NUMPY[dtype]))
                start += length + -length % _ALIGNMENT_WORDS
            fill(arrays)
            with self.streams.side():
                sent = torch.empty(total, dtype=torch.int32, device=self.device)
                sent.copy_(buffer.host[:total], non_blocking=True)
                buffer.free = mark = self.streams.mark()
        pieces = sent.split_with_sizes(cuts)[::2]
        return [
            piece if dtype == torch.int32 else piece.view(dtype)
            for piece, (dtype, _) in zip(pieces, fields, strict=True)
        ], mark

    def copy(self, *given: NDArray[Any]) -> tuple[list[Tensor], Mark]:
        def fill(arrays: list[NDArray[Any]]) -> None:
            for array, each in zip(arrays, given, strict=True):
                array[:] = each

        return self.send([(_TORCH[each.dtype.name], len(each)) for each in given], fill)

    def _next(self, num_words: int) -> _SendBuffer:
        buffer = self._buffers[self._number % _SEND_BUFFERS]
        self._number += 1
        if buffer.free is not None and not buffer.free.query():
            buffer.free.synchronize()
        if len(buffer.host) < num_words:
            grown = 1 << (num_words - 1).bit_length()
            with torch.inference_mode(False):
                buffer.host = torch.empty(grown, dtype=torch.int32, device="cpu", pin_memory=self.streams.pin_memory)
        return buffer


_NUM_BUFFERS: Final = 3
"""Each takes ``rows`` rows of host memory."""


class _Buffer:
    def __init__(self, layout: RowLayout, rows: int, streams: Streams) -> None:
        self.words = tuple(
            torch.empty((rows, width), dtype=torch.int64, device="cpu", pin_memory=streams.pin_memory)
            for width in (layout.weight_words, layout.state_words)
        )
        self._rows = tuple(part.numpy().view("uint64") for part in self.words)
        self.free: Mark | None = None

    def first(self, count: int) -> list[Words]:
        return [part[:count] for part in self._rows]


class Staging:
    """Buffers of so many rows each. One caller at a time, within ``streams.side()``. ``arenas``: weights and state on
    the device, int64 [slots, words]; ``kernels``: ``rows_triton`` or ``rows_twin``."""

    def __init__(
        self, layout: RowLayout, rows: int, arenas: tuple[Tensor, Tensor], streams: Streams, kernels: ModuleType
    ) -> None:
        self.rows = rows
        self._arenas = arenas
        self._streams = streams
        self._kernels = kernels
        *self._up, self._down = (_Buffer(layout, rows, streams) for _ in range(_NUM_BUFFERS))

    def bring(self, keys: Int64s, slots: Tensor, read: Callable[[Int64s, Words, Words], None]) -> None:
        """Have ``read(keys, weights, state)`` fill buffers with the rows of ``keys``, numpy int64 [n], and copy them
        into ``slots``, int32 [n] on the device."""
        for number, first in enumerate(range(0, len(keys), self.rows)):
            part = slice(first, first + self.rows)
            buffer = self._up[number % len(self._up)]
            if buffer.free is not None:
                buffer.free.synchronize()
            read(keys[part], *buffer.first(len(keys[part])))
            self._kernels.move_rows(self._arenas, buffer.words, slots[part], up=True)
            buffer.free = self._streams.mark()

    def take(self, keys: Int64s, slots: Tensor, write: Callable[[Int64s, Words, Words], None]) -> None:
        """Copy the rows of ``slots`` to the host and give them to ``write(keys, weights, state)``, some at a time."""
        for first in range(0, len(keys), self.rows):
            part = slice(first, first + self.rows)
            self._kernels.move_rows(self._arenas, self._down.words, slots[part], up=False)
            self._streams.mark().synchronize()
            write(keys[part], *self._down.first(len(keys[part])))

    @property
    def host_bytes(self) -> int:
        return sum(_pinned_bytes(part.nbytes) for buffer in (*self._up, self._down) for part in buffer.words)


def staging_bytes(layout: RowLayout, rows: int) -> int:
    return _NUM_BUFFERS * sum(_pinned_bytes(rows * words * 8) for words in (layout.weight_words, layout.state_words))


def _pinned_bytes(size_bytes: int) -> int:
    """What page-locked memory of that size takes: torch rounds it up to a power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
