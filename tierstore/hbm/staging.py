"""Rows on their way between host and device: a few buffers of fixed size, page-locked where copies can overlap.

Up: two buffers in turn, so that the host fills one while the other is copied. Down: one, as the host waits for it.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..kernels.arrays import Int64s, Words
from ..rows import RowLayout
from .lanes import Lane, Mark

NUM_BUFFERS: Final = 3
"""Each takes ``rows`` rows of host memory, and as much on the device."""


class _Buffer:
    """Room for some rows on both sides."""

    def __init__(self, layout: RowLayout, rows: int, device: torch.device, *, pin_memory: bool) -> None:
        words = layout.weight_words, layout.state_words
        self.host = [
            torch.empty((rows, width), dtype=torch.int64, device="cpu", pin_memory=pin_memory) for width in words
        ]
        self.device = [torch.empty((rows, width), dtype=torch.int64, device=device) for width in words]
        self.free: Mark | None = None

    def host_words(self, count: int) -> list[Words]:
        """Weights and state of the first rows, uint64 [count, words]."""
        return [part[:count].numpy().view("uint64") for part in self.host]


class Staging:
    """See the module's docstring. One caller at a time, within ``lane.side()``.

    Args:
        rows: of each buffer.
        arenas: weights and state on the device, int64 [slots, words].
    """

    def __init__(self, layout: RowLayout, rows: int, arenas: tuple[Tensor, Tensor], lane: Lane) -> None:
        device = arenas[0].device
        self.rows = rows
        self._arenas = arenas
        self._lane = lane
        self._up = [_Buffer(layout, rows, device, pin_memory=lane.pin_memory) for _ in range(NUM_BUFFERS - 1)]
        self._down = _Buffer(layout, rows, device, pin_memory=lane.pin_memory)

    def bring(self, keys: Int64s, slots: Tensor, read: Callable[[Int64s, Words, Words], None]) -> None:
        """Have ``read(keys, weights, state)`` fill buffers, and copy them into ``slots``.

        Args:
            keys: numpy int64 [n]; slots: int32 [n], on the device.
        """
        for number, first in enumerate(range(0, len(keys), self.rows)):
            part = slice(first, first + self.rows)
            count = len(keys[part])
            buffer = self._up[number % len(self._up)]
            if buffer.free is not None:
                buffer.free.synchronize()
            read(keys[part], *buffer.host_words(count))
            for arena, host, device in zip(self._arenas, buffer.host, buffer.device, strict=True):
                device[:count].copy_(host[:count], non_blocking=True)
                arena.index_copy_(0, slots[part].long(), device[:count])
            buffer.free = self._lane.mark()

    def take(self, keys: Int64s, slots: Tensor, write: Callable[[Int64s, Words, Words], None]) -> None:
        """Copy the rows of ``slots`` to the host and give them to ``write(keys, weights, state)``, some at a time."""
        buffer = self._down
        for first in range(0, len(keys), self.rows):
            part = slice(first, first + self.rows)
            count = len(keys[part])
            for arena, host, device in zip(self._arenas, buffer.host, buffer.device, strict=True):
                torch.index_select(arena, 0, slots[part], out=device[:count])
                host[:count].copy_(device[:count], non_blocking=True)
            self._lane.mark().synchronize()
            write(keys[part], *buffer.host_words(count))

    @property
    def device_bytes(self) -> int:
        return sum(part.nbytes for buffer in (*self._up, self._down) for part in buffer.device)

    @property
    def host_bytes(self) -> int:
        return sum(_pinned_bytes(part.nbytes) for buffer in (*self._up, self._down) for part in buffer.host)


def staging_bytes(layout: RowLayout, rows: int) -> int:
    """Host memory of all buffers of so many rows."""
    return NUM_BUFFERS * sum(_pinned_bytes(rows * words * 8) for words in (layout.weight_words, layout.state_words))


def _pinned_bytes(size_bytes: int) -> int:
    """What page-locked memory of that size takes: torch rounds it up to a power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
