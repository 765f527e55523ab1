"""The miss-ratio curve: which share of accesses misses, by how many rows the cache has; and curves for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...system.terminal import columns_of

POLICIES: Final = ("lru", "lfu", "tinylfu")
"""The store's own."""


@dataclass(frozen=True, kw_only=True)
class MissRatioCurve:
    """One policy's.

    Attributes:
        policy: of ``POLICIES``.
        sizes: int64 [k], ascending, rows of the cache, from 1 on.
        miss_ratios: float64 [k], of those sizes.
        num_accesses, num_rows: accesses, and distinct rows; of a recorded sample what the whole has by estimate.
        sampling_rate: of the rows that were recorded.
        warning: how far it may be off, and what to do, if that is much; else "".
    """

    policy: str
    sizes: NDArray[np.int64]
    miss_ratios: NDArray[np.float64]
    num_accesses: int
    num_rows: int
    sampling_rate: float = 1.0
    warning: str = ""

    def miss_ratio(self, rows: float) -> float:
        """At a size: as simulated; between two sizes by a straight line over the logarithm of the size; beyond the
        largest its own; 1 for no row."""
        if rows < 1:
            return 1.0
        return float(np.interp(np.log(rows), np.log(self.sizes), self.miss_ratios))

    def hit_rate(self, rows: float) -> float:
        """1 - miss_ratio."""
        return 1 - self.miss_ratio(rows)


_NUM_SIZES: Final = 10


def describe_curves(curves: Mapping[str, MissRatioCurve], sizes: Sequence[int] | None = None) -> str:
    """Hit rates by size and name, lines of text.

    Args:
        curves: by name, at least one.
        sizes: rows; by default some up to the largest of all curves.
    """
    largest = max(int(curve.sizes[-1]) for curve in curves.values())
    chosen = _round_sizes(largest) if sizes is None else sorted(set(sizes))
    rows = [["hit rate with rows cached", *(f"{size:,}" for size in chosen), "of rows", "accesses"]]
    for name, curve in curves.items():
        rates = [f"{curve.hit_rate(size):.4f}" for size in chosen]
        rows.append([name, *rates, f"{curve.num_rows:,}", f"{curve.num_accesses:,}"])
    columns = rows if len(rows) > len(rows[0]) else list(zip(*rows, strict=True))  # the longer way down
    return "\n".join(columns_of(columns, is_last_text=False))


def _round_sizes(largest: int) -> list[int]:
    """Two figures each, evenly apart on a scale of logarithms, and the largest."""
    exact = np.geomspace(max(1.0, largest / 1000), largest, _NUM_SIZES)[:-1]
    units = 10.0 ** np.maximum(0, np.floor(np.log10(exact)) - 1)
    return sorted({*(np.rint(exact / units) * units).astype(int).tolist(), largest})
