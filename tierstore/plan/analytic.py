"""What a cache would do under Zipf's law: by formula, over rows in bins, so that 2^40 rows are few.

Each id is drawn independently of all others (the *independent reference model*). Hit rates of LRU are Che's
approximation (H. Che, Y. Tung, Z. Wang, Hierarchical web caching systems, IEEE JSAC 20, 2002; why it is so good:
C. Fricker, P. Robert, J. Roberts, A versatile and accurate approximation for LRU cache performance, ITC 24, 2012), here
over batches: a row is accessed at most once a batch, as the tiers of a store count.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Float64s
from .curves import MissRatioCurve
from .traces import BIN_GROWTH, zipf_bins

_MANY_BINS: Final = 2048
_LEAST_CHANCE: Final = 1e-300
_TIMES: Final = 160
_FEW_BATCHES: Final = np.linspace(0.0, 4.0, 81)  # windows where hit rates bend most
_PHASES: Final = np.linspace(0.0, 1.0, 25) ** 2  # times in a batch, most of them early, where most rows are used first
_LONG: Final = 40.0
"""Accesses that a row has had, on average, when it is certain that it had one: the odds are e^-40."""
_SIZES: Final = 512
_BATCHES: Final = 1_000_000  # whose accesses a curve says it is of
_ALMOST_CERTAIN: Final = 1 - 1e-15


class Popularity(NamedTuple):
    """Bins of rows that are alike, float64 [bins]: how many, and the chance that one is in a batch."""

    rows: Float64s
    chances: Float64s

    @property
    def unique(self) -> float:
        """Distinct rows of a batch, on average."""
        return float(self.rows @ self.chances)


def popularity(tables: Sequence[tuple[int, float, float]]) -> Popularity:
    """Of the rows of tables that share a cache."""
    kinds: dict[tuple[int, float, float], int] = {}
    for table in tables:
        kinds[table] = kinds.get(table, 0) + 1
    bins = [(count, *zipf_bins(num_rows, exponent), ids) for (num_rows, exponent, ids), count in kinds.items()]
    rows = np.concatenate([count * own for count, own, _, _ in bins])
    chances = np.concatenate([_in_batch(shares, lookups) for _, _, shares, lookups in bins])
    if len(rows) <= _MANY_BINS:
        return Popularity(rows, chances)
    # Bins of nearly equal chance as one, of their mean.
    steps = np.round(np.log(np.maximum(chances, _LEAST_CHANCE)) / math.log(BIN_GROWTH))
    _, places = np.unique(steps, return_inverse=True)
    merged = np.bincount(places, weights=rows).astype(np.float64)
    return Popularity(merged, np.bincount(places, weights=rows * chances) / merged)


def _in_batch(shares: Float64s, lookups: float) -> Float64s:
    """That a row of this share of all ids is among so many: never more than the ids it has on average."""
    if not lookups:
        return np.zeros_like(shares)
    with np.errstate(divide="ignore"):
        some = -np.expm1(lookups * np.log1p(-np.minimum(shares, 1.0)))
    return np.minimum(some, lookups * shares)


def lru_curve(found: Popularity) -> MissRatioCurve:
    """Of least-recently-used, by Che's approximation: a cache holds what was accessed in a window that reaches back so
    far that it has as many rows. The time of a row's first use in a batch has an exponential density, cut off at the
    batch's end. So the window holds what the batch has used so far, whole batches before, and the end of one more."""
    used = found.chances > 0
    rows, chances = found.rows[used], np.minimum(found.chances[used], _ALMOST_CERTAIN)
    sizes = _sizes(found)
    if not len(rows):
        return _curve("lru", sizes, np.zeros(len(sizes)), found)
    rates = -np.log1p(-chances)
    absent = _absent(rates, np.union1d(_FEW_BATCHES, np.geomspace(1, 1 + _LONG / float(rates.min()), _TIMES)))
    hits = np.zeros(len(sizes))
    for start, stop in itertools.pairwise(_PHASES):
        held = rows.sum() - absent @ (rows * np.exp(-rates * (start + stop) / 2))
        first_used = rows * (np.exp(-rates * start) - np.exp(-rates * stop))
        hits += np.interp(sizes, held, first_used.sum() - absent @ first_used, left=0.0)
    return _curve("lru", sizes, 1 - hits / found.unique, found)


def _absent(rates: Float64s, windows: Float64s) -> Float64s:
    """float64 [windows, rows]: the chance that a row has no use in the last so many batches, of which the first, a part
    of one, counts first uses within the batch only."""
    whole = np.floor(windows)[:, None]
    begin = 1 - (windows[:, None] - whole)
    absent: Float64s = np.exp(-rates * whole) * (1 - np.exp(-rates * begin) + np.exp(-rates))
    return absent


def frequency_curve(found: Popularity, policy: str = "tinylfu") -> MissRatioCurve:
    """Of a cache of the rows that are accessed most: what counting every row's accesses for ever leads to."""
    order = np.argsort(-found.chances, kind="stable")
    rows, chances = found.rows[order], found.chances[order]
    held = np.append(0.0, np.cumsum(rows))
    hits = np.append(0.0, np.cumsum(rows * chances)) / (found.unique or 1.0)
    sizes = _sizes(found)
    return _curve(policy, sizes, 1 - np.interp(sizes, held, hits), found)


def _sizes(found: Popularity) -> Float64s:
    """Whole, log-spaced, up to all rows."""
    return np.unique(np.round(np.geomspace(1, max(round(found.rows.sum()), 1), _SIZES)))


def _curve(policy: str, sizes: Float64s, miss_ratios: Float64s, found: Popularity) -> MissRatioCurve:
    return MissRatioCurve(
        policy=policy,
        sizes=sizes.astype(np.int64),
        miss_ratios=np.minimum.accumulate(np.clip(miss_ratios, 0.0, 1.0)),
        num_accesses=round(found.unique * _BATCHES),
        num_rows=round(found.rows.sum()),
    )
