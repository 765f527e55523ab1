"""Streams of a device, and what crosses to it on them: a batch's arrays by one copy, rows by kernels.

The tier moves rows on a stream of its own, the *side* stream; models compute on whatever stream is current. On the CPU
both are the calling thread, and nothing is ever pending.

All goes through page-locked buffers. Rows go up by two in turn, so that the host fills one while a kernel reads the
other. They come down by one, as the host waits for it.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.arrays import Int32s, Int64s, Words
from ..layout import RowLayout

_ALIGNMENT_WORDS: Final = 4  # of 4 bytes
_TORCH: Final = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_ROW_BUFFERS: Final = 3  # two up and one down

Field = tuple[Any, int]  # an array's numpy type, of 4 or 8 bytes, and its length


class Mark:
    """A moment in a stream's work: here of the CPU's, which is done. On a GPU a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the work up to here is done."""
        return True

    def synchronize(self) -> None:
        """Wait until it is: the calling thread, not a stream."""


class Streams:
    """A device's two streams; here the CPU's, where everything happens at once and nothing is captured."""

    pin_memory = False

    def refuse_capture(self) -> None:
        """RuntimeError while the current stream is captured into a CUDA graph: rows come and go."""

    def side(self) -> AbstractContextManager[Any]:
        """Within it, the calling thread's work goes to the side stream."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """After all that was given to the calling thread's current stream so far."""
        return Mark()

    def follow(self, mark: Mark) -> None:
        """Later work of the calling thread's current stream waits for the mark; the thread itself does not."""
        mark.synchronize()


class CudaStreams(Streams):
    pin_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its kernels are small and others wait for them.
        self._side: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot capture a lookup of tables: capture the part of the model behind them "
                "(DLRM.dense_part), and look the tables up before each replay"
            )

    def side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def mark(self) -> Mark:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event  # type: ignore[no-any-return]

    def follow(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def open_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()


def host_buffer(streams: Streams, length: int, dtype: torch.dtype) -> Tensor:
    """Page-locked, to be kept: no inference tensor."""
    with torch.inference_mode(False):
        return torch.empty(length, dtype=dtype, device="cpu", pin_memory=streams.pin_memory)


class Sender:
    """Sends arrays to a device on its side stream, for any thread. Two buffers grow to the largest batch, rounded up to
    a power of two: a caller waits only if the copy before the last is not done."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.streams = streams
        self.device = device
        self._lock = threading.RLock()
        self._buffers = [host_buffer(streams, 0, torch.int32) for _ in range(2)]
        self._free: list[Mark] = [Mark(), Mark()]
        self._number = 0

    def send(self, fields: Sequence[Field], fill: Callable[[list[NDArray[Any]]], None]) -> tuple[list[Tensor], Mark]:
        """Have ``fill(arrays)`` write numpy arrays of these types and lengths, and copy them to the device: tensors
        there, and when."""
        # A torch operation costs the host as much as five of numpy's: one cuts all that was sent.
        lengths = [length * np.dtype(dtype).itemsize // 4 for dtype, length in fields]
        cuts = [cut for length in lengths for cut in (length, -length % _ALIGNMENT_WORDS)]
        total = sum(cuts)
        with self._lock:
            place = self._number % 2
            self._number += 1
            if not self._free[place].query():
                self._free[place].synchronize()
            if len(self._buffers[place]) < total:
                self._buffers[place] = host_buffer(self.streams, 1 << (total - 1).bit_length(), torch.int32)
            buffer = self._buffers[place]
            words: Int32s = buffer.numpy()
            arrays, start = [], 0
            for (dtype, _), length in zip(fields, lengths, strict=True):
                arrays.append(words[start : start + length].view(dtype))
                start += length + -length % _ALIGNMENT_WORDS
            fill(arrays)
            with self.streams.side():
                sent = torch.empty(total, dtype=torch.int32, device=self.device)
                sent.copy_(buffer[:total], non_blocking=True)
                self._free[place] = mark = self.streams.mark()
        types = [_TORCH[np.dtype(dtype).name] for dtype, _ in fields]
        pieces = zip(sent.split_with_sizes(cuts)[::2], types, strict=True)
        return [piece if dtype == torch.int32 else piece.view(dtype) for piece, dtype in pieces], mark

    def copy(self, *given: NDArray[Any]) -> tuple[list[Tensor], Mark]:
        def fill(arrays: list[NDArray[Any]]) -> None:
            for array, each in zip(arrays, given, strict=True):
                array[:] = each

        return self.send([(each.dtype, len(each)) for each in given], fill)


class Staging:
    """Buffers of so many rows each. One caller at a time, within ``streams.side()``. ``arenas``: weights and state on
    the device, int64 [slots, words]; ``kernels``: ``launches`` or ``twin``."""

    def __init__(
        self, layout: RowLayout, rows: int, arenas: tuple[Tensor, ...], streams: Streams, kernels: ModuleType
    ) -> None:
        self.rows = rows
        self._arenas = arenas
        self._streams = streams
        self._kernels = kernels
        widths = layout.weight_words, layout.state_words
        self._buffers = [
            tuple(host_buffer(streams, rows * width, torch.int64).view(rows, width) for width in widths)
            for _ in range(_ROW_BUFFERS)
        ]
        self._arrays = [[part.numpy().view("uint64") for part in buffer] for buffer in self._buffers]
        self._free: list[Mark] = [Mark(), Mark()]

    def bring(self, keys: Int64s, slots: Tensor, read: Callable[[Int64s, Words, Words], None]) -> None:
        """Have ``read(keys, weights, state)`` fill buffers with the rows of ``keys``, numpy int64 [n], and copy them
        into ``slots``, int32 [n] on the device."""
        for number, first in enumerate(range(0, len(keys), self.rows)):
            part, place = slice(first, first + self.rows), number % 2
            self._free[place].synchronize()
            weights, state = self._arrays[place]
            count = len(keys[part])
            read(keys[part], weights[:count], state[:count])
            self._kernels.move_rows(self._arenas, self._buffers[place], slots[part], up=True)
            self._free[place] = self._streams.mark()

    def take(self, keys: Int64s, slots: Tensor, write: Callable[[Int64s, Words, Words], None]) -> None:
        """Copy the rows of ``slots`` to the host and give them to ``write(keys, weights, state)``, some at a time."""
        weights, state = self._arrays[-1]
        for first in range(0, len(keys), self.rows):
            part = slice(first, first + self.rows)
            self._kernels.move_rows(self._arenas, self._buffers[-1], slots[part], up=False)
            self._streams.mark().synchronize()
            count = len(keys[part])
            write(keys[part], weights[:count], state[:count])


def staging_bytes(layout: RowLayout, rows: int) -> int:
    """Host memory that ``Staging`` takes; torch rounds page-locked memory up to a power of two."""
    sizes = [rows * words * 8 for words in (layout.weight_words, layout.state_words)]
    return _ROW_BUFFERS * sum(1 << (size - 1).bit_length() for size in sizes if size)
