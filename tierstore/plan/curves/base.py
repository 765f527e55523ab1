"""The miss-ratio curve: which share of accesses misses, by how many rows the cache has; and curves for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

POLICIES: Final = ("lru", "lfu", "tinylfu")
"""The store's own."""


@dataclass(frozen=True, kw_only=True)
class MissRatioCurve:
    """One policy's.

    Attributes:
        policy: of ``POLICIES``.
        sizes: int64 [k], ascending, rows of the cache, from 1 on.
        miss_ratios: float64 [k], of those sizes.
        num_accesses, num_rows: accesses, and distinct rows; of a sampled curve what the whole has by estimate.
        sampling_rate: of the rows that the curve was made from.
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


_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_PLOT_COLUMNS: Final = 40
_NUM_SIZES: Final = 10
_TABLE_WIDTH: Final = 90
"""Of curves whose names take more, only the plot is shown."""


def describe_curves(curves: Mapping[str, MissRatioCurve], sizes: Sequence[int] | None = None) -> str:
    """Lines of text, of 100 columns at most unless names are long.

    Args:
        curves: by name, at least one.
        sizes: at which hit rates are told, rows; by default some up to the largest of all curves.
    """
    largest = max(int(curve.sizes[-1]) for curve in curves.values())
    chosen = _round_sizes(largest) if sizes is None else sorted(set(sizes))
    if sum(map(_width, curves)) <= _TABLE_WIDTH:
        return "\n".join([*_by_size(curves, chosen), "", *_plots(curves, largest)])
    return "\n".join(_plots(curves, largest))


def _round_sizes(largest: int) -> list[int]:
    """Two figures each, evenly apart on a scale of logarithms, and the largest."""
    exact = np.geomspace(max(1.0, largest / 1000), largest, _NUM_SIZES)[:-1]
    units = 10.0 ** np.maximum(0, np.floor(np.log10(exact)) - 1)
    return sorted({*(np.rint(exact / units) * units).astype(int).tolist(), largest})


def _width(name: str) -> int:
    return max(8, len(name) + 2)


def _by_size(curves: Mapping[str, MissRatioCurve], sizes: Sequence[int]) -> list[str]:
    widths = list(map(_width, curves))
    head = "".join(name.rjust(width) for name, width in zip(curves, widths, strict=True))
    lines = [f"{'rows cached':>14}{head}   (hit rates)"]
    for size in sizes:
        rates = zip(curves.values(), widths, strict=True)
        lines.append(f"{size:>14,}" + "".join(f"{curve.hit_rate(size):>{width}.4f}" for curve, width in rates))
    return lines


def _plots(curves: Mapping[str, MissRatioCurve], largest: int) -> list[str]:
    """A line for each curve: bars of its hit rates, up to 1, over sizes on a scale of logarithms. No curve is shown
    below its smallest size, where it says nothing."""
    name_width = max(len(name) for name in curves)
    smallest = max(largest / 1000, *(float(curve.sizes[0]) for curve in curves.values()))
    sizes = np.geomspace(smallest, largest, _PLOT_COLUMNS)
    scale = f"{sizes[0]:,.0f}".ljust(_PLOT_COLUMNS - len(f"{largest:,}")) + f"{largest:,}"
    lines = [f"{'hit rate by rows cached':<{name_width}}  |{scale}|"]
    name_width = max(name_width, len("hit rate by rows cached"))
    for name, curve in curves.items():
        told = f"{curve.num_rows:>13,} rows {curve.num_accesses:>14,} accesses"
        lines.append(f"{name:<{name_width}}  |{_bars(curve, sizes)}|{told}")
    return lines


def _bars(curve: MissRatioCurve, sizes: NDArray[np.float64]) -> str:
    rates = np.array([curve.hit_rate(size) for size in sizes])
    return "".join(_BLOCKS[place] for place in np.rint(rates * (len(_BLOCKS) - 1)).astype(int))
