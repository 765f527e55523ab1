"""The progress bar of a training run."""

import sys
import time
from collections import deque
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm

from ..pool.stats import Stats
from ..store import Store
from ..system.sizes import format_size

__all__ = ["Progress"]

_LOSS_STEPS: Final = 100
_REFRESH_SECONDS: Final = 0.5


class Progress:
    """Samples/s, mean loss of the last steps, the tiers' hit rates and bytes from SSD, on a terminal's stderr.

    Where stderr is no terminal, only ``say`` writes.
    """

    def __init__(self, store: Store, *, total_rows: int | None, done_rows: int) -> None:
        self._store = store
        self._losses: deque[Tensor] = deque(maxlen=_LOSS_STEPS)
        self._next_refresh = 0.0
        self._bar = tqdm(
            total=total_rows, initial=done_rows, unit=" samples", unit_scale=True, disable=None, leave=False
        )

    @property
    def loss(self) -> float | None:
        """Mean loss of the last steps, which it waits for; None before the first."""
        if not self._losses:
            return None
        losses: list[float] = torch.stack(list(self._losses)).tolist()
        return sum(losses) / len(losses)

    def step(self, rows: int, loss: Tensor) -> None:
        """Count one step; its loss, a scalar, is left where it is until it is shown."""
        self._losses.append(loss)
        now = time.monotonic()
        if not self._bar.disable and now >= self._next_refresh:
            self._next_refresh = now + _REFRESH_SECONDS
            self._bar.set_postfix_str(self._describe(self._store.stats()), refresh=False)
        self._bar.update(rows)

    def _describe(self, stats: Stats) -> str:
        hbm = f"HBM hits {100 * stats.hbm.hit_rate:.1f} %, " if stats.hbm.capacity_rows else ""
        return (
            f"loss {self.loss:.4f}, {hbm}DDR hits {100 * stats.ddr.hit_rate:.1f} %, "
            f"from SSD {format_size(stats.ssd.bytes_read)}"
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
