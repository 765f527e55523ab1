"""The miss-ratio curve: which share of accesses misses, by how many rows the cache has."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..json_file import plain

__all__ = ["POLICIES", "MissRatioCurve"]

POLICIES: Final = ("lru", "lfu", "tinylfu", "perfect-lfu", "opt")
"""The first three are the store's own; perfect-lfu counts rows whether cached or not; opt knows the future (Belady)."""


@dataclass(frozen=True, kw_only=True)
class MissRatioCurve:
    """One policy's.

    Attributes:
        policy: of ``POLICIES``.
        sizes: int64 [k], ascending, rows of the cache, from 1 on.
        miss_ratios: float64 [k], of those sizes.
        num_accesses, num_rows: accesses, and distinct rows; of a sampled curve what the whole has by estimate.
        sampling_rate: of the rows that the curve was made from.
    """

    policy: str
    sizes: NDArray[np.int64]
    miss_ratios: NDArray[np.float64]
    num_accesses: int
    num_rows: int
    sampling_rate: float = 1.0

    def miss_ratio(self, rows: float) -> float:
        """At a size: as simulated; between two sizes by a straight line over the logarithm of the size; beyond the
        largest its own; 1 for no row."""
        if rows < 1:
            return 1.0
        return float(np.interp(np.log(rows), np.log(self.sizes), self.miss_ratios))

    def hit_rate(self, rows: float) -> float:
        """1 - miss_ratio."""
        return 1 - self.miss_ratio(rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reads it back."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "MissRatioCurve":
        arrays = {
            "sizes": np.array(fields["sizes"], np.int64),
            "miss_ratios": np.array(fields["miss_ratios"], np.float64),
        }
        return cls(**(fields | arrays))
