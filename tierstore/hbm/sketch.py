"""Access counts of keys, cached or not: a count-min sketch with periodic halving.

Sources: G. Cormode and S. Muthukrishnan, An improved data stream summary: the count-min sketch and its applications
(2005); halving and admission by frequency, G. Einziger, R. Friedman and B. Manes, TinyLFU: a highly efficient cache
admission policy (2017).
"""

from types import ModuleType
from typing import Final

import torch
from torch import Tensor

_WIDTH: Final = 8
"""Counters of a row of the sketch, for each cached row."""
_ROWS: Final = 2
SKETCH_BYTES: Final = _WIDTH * _ROWS * 2
"""For each cached row."""
MAX_ESTIMATE: Final = 30_000
PERIOD: Final = 50
"""Accesses, for each cached row, between two halvings. Widths and periods were tried on Criteo's lookups: half the
width costs 0.5 to 0.8 points of hit rate, a fifth of the period 1."""


class FrequencySketch:
    """Recent access counts of keys. Too high where keys share counters; too low only by halving.

    Args:
        capacity: rows of the cache.
        kernels: of that cache.
    """

    def __init__(self, capacity: int, device: torch.device, kernels: ModuleType) -> None:
        self._period = PERIOD * capacity
        self._counters = torch.zeros(_ROWS * _WIDTH * capacity, dtype=torch.int16, device=device)
        self._kernels = kernels
        self._accesses = 0

    def count(self, keys: Tensor, num_unique: Tensor, known: int) -> None:
        """Count one access of each of the first U keys.

        Args:
            keys: int64 [n], the first U distinct; num_unique: int32 [1], U; known: U, on the host.
        """
        self._kernels.sketch_count(self._counters, keys, num_unique, MAX_ESTIMATE)
        self._accesses += known

    def estimate(self, keys: Tensor, num_unique: Tensor) -> Tensor:
        """int32 [n]: accesses of each of the first U keys, the current one included."""
        estimates: Tensor = self._kernels.sketch_estimate(self._counters, keys, num_unique)
        return estimates

    def age(self) -> bool:
        """Halve the counts if it is time. A caller that compares them with its own counts must then halve those too."""
        if self._accesses < self._period:
            return False
        self._accesses //= 2
        self._counters >>= 1
        return True

    def warm_up(self) -> None:
        """Have the kernels compiled. Changes nothing."""
        keys = torch.zeros(1, dtype=torch.int64, device=self._counters.device)
        none = torch.zeros(1, dtype=torch.int32, device=self._counters.device)
        self.estimate(keys, none)
        self.count(keys, none, 0)

    @property
    def size_bytes(self) -> int:
        return self._counters.nbytes
