"""Rows on their way between host and device: a few page-locked buffers of fixed size, which kernels read and write.

Up: two buffers in turn, so that the host fills one while a kernel reads the other. Down: one, as the host waits for it.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from ..kernels.arrays import Int64s, Words
from ..layout import RowLayout
from .lanes import Lane, Mark

_NUM_BUFFERS: Final = 3
"""Each takes ``rows`` rows of host memory."""


class _Buffer:
    """Room for weights and state of some rows."""

    def __init__(self, layout: RowLayout, rows: int, lane: Lane) -> None:
        self.words = tuple(
            torch.empty((rows, width), dtype=torch.int64, device="cpu", pin_memory=lane.pin_memory)
            for width in (layout.weight_words, layout.state_words)
        )
        self._rows = tuple(part.numpy().view("uint64") for part in self.words)
        self.free: Mark | None = None

    def first(self, count: int) -> list[Words]:
        """Weights and state of the first rows, uint64 [count, words]."""
        return [part[:count] for part in self._rows]


class Staging:
    """See the module's docstring. One caller at a time, within ``lane.side()``.

    Args:
        rows: of each buffer.
        arenas: weights and state on the device, int64 [slots, words].
        kernels: ``rows_triton`` or ``rows_twin``.
    """

    def __init__(
        self, layout: RowLayout, rows: int, arenas: tuple[Tensor, Tensor], lane: Lane, kernels: ModuleType
    ) -> None:
        self.rows = rows
        self._arenas = arenas
        self._lane = lane
        self._kernels = kernels
        *self._up, self._down = (_Buffer(layout, rows, lane) for _ in range(_NUM_BUFFERS))
        for up in (False, True):  # has the kernel compiled; no row is there yet
            kernels.move_rows(
                arenas, self._down.words, torch.zeros(1, dtype=torch.int32, device=arenas[0].device), up=up
            )

    def bring(self, keys: Int64s, slots: Tensor, read: Callable[[Int64s, Words, Words], None]) -> None:
        """Have ``read(keys, weights, state)`` fill buffers, and copy them into ``slots``.

        Args:
            keys: numpy int64 [n]; slots: int32 [n], on the device.
        """
        for number, first in enumerate(range(0, len(keys), self.rows)):
            part = slice(first, first + self.rows)
            buffer = self._up[number % len(self._up)]
            if buffer.free is not None:
                buffer.free.synchronize()
            read(keys[part], *buffer.first(len(keys[part])))
            self._kernels.move_rows(self._arenas, buffer.words, slots[part], up=True)
            buffer.free = self._lane.mark()

    def take(self, keys: Int64s, slots: Tensor, write: Callable[[Int64s, Words, Words], None]) -> None:
        """Copy the rows of ``slots`` to the host and give them to ``write(keys, weights, state)``, some at a time."""
        for first in range(0, len(keys), self.rows):
            part = slice(first, first + self.rows)
            self._kernels.move_rows(self._arenas, self._down.words, slots[part], up=False)
            self._lane.mark().synchronize()
            write(keys[part], *self._down.first(len(keys[part])))

    @property
    def host_bytes(self) -> int:
        return sum(_pinned_bytes(part.nbytes) for buffer in (*self._up, self._down) for part in buffer.words)


def staging_bytes(layout: RowLayout, rows: int) -> int:
    """Host memory of all buffers of so many rows."""
    return _NUM_BUFFERS * sum(_pinned_bytes(rows * words * 8) for words in (layout.weight_words, layout.state_words))


def _pinned_bytes(size_bytes: int) -> int:
    """What page-locked memory of that size takes: torch rounds it up to a power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
