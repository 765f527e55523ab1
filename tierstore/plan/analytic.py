"""What a cache would do under Zipf's law, without a trace: by formula, over rows in bins, so that 2^40 rows are few.

Each id is drawn independently of all others (the *independent reference model*). Hit rates of LRU are Che's
approximation (H. Che, Y. Tung, Z. Wang, Hierarchical web caching systems, IEEE JSAC 20, 2002; why it is so good:
C. Fricker, P. Robert, J. Roberts, A versatile and accurate approximation for LRU cache performance, ITC 24, 2012), here
over batches: a row is accessed at most once a batch, as the tiers of a store count.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .curves import MissRatioCurve

__all__ = ["Popularity", "frequency_curve", "lru_curve", "popularity", "zipf_bins"]

Floats = NDArray[np.float64]

_SINGLE_RANKS: Final = 256
"""The hottest rows have a bin each."""
_BIN_GROWTH: Final = 1.02
"""Of the ranks behind them, from bin to bin: a row's share is off by 1 % times the exponent at most."""
_TIMES: Final = 256
_LONG: Final = 40.0
"""Accesses that a row has had, on average, when it is taken for certain that it had one: the odds are e^-40."""
_SIZES: Final = 512


class Popularity(NamedTuple):
    """Rows in bins; of each bin all rows are alike.

    Attributes:
        rows: float64 [bins], how many.
        chances: float64 [bins], that a row of the bin is in a batch.
    """

    rows: Floats
    chances: Floats

    @property
    def num_rows(self) -> float:
        return float(self.rows.sum())

    @property
    def unique(self) -> float:
        """Distinct rows of a batch, on average."""
        return float(self.rows @ self.chances)


def zipf_bins(num_rows: int, exponent: float) -> tuple[Floats, Floats]:
    """(rows of each bin, share of all ids of one row in it): row k is looked up in proportion to ``k ** -exponent``.

    A bin's weight is the integral over it, from half a rank before to half a rank behind.
    """
    single = min(num_rows, _SINGLE_RANKS)
    growing = single * _BIN_GROWTH ** np.arange(1, 2 + np.log(num_rows / single) / np.log(_BIN_GROWTH))
    ends = np.unique(np.minimum(np.append(np.arange(1, single + 1), np.ceil(growing)), num_rows))
    starts = np.append(0.0, ends[:-1])
    rows = ends - starts
    weights = np.where(rows == 1, ends**-exponent, _integral(starts + 0.5, ends + 0.5, exponent) / rows)
    return rows, weights / (rows @ weights)


def _integral(low: Floats, high: Floats, exponent: float) -> Floats:
    """Of ``x ** -exponent``; exact where the exponent is near 1, too."""
    power = 1 - exponent
    logs = np.log(high / low)
    scaled = power * logs
    growth = np.where(np.abs(scaled) < 1e-12, 1.0, np.expm1(scaled) / np.where(scaled == 0, 1.0, scaled))
    integral: Floats = low**power * logs * growth
    return integral


def popularity(tables: Sequence[tuple[int, float, float]]) -> Popularity:
    """Of the rows of tables that share a cache.

    Args:
        tables: (rows, exponent, ids a batch) of each.
    """
    kinds: dict[tuple[int, float, float], int] = {}
    for table in tables:
        kinds[table] = kinds.get(table, 0) + 1
    rows, chances = [], []
    for (num_rows, exponent, lookups), count in kinds.items():
        own, shares = zipf_bins(num_rows, exponent)
        rows.append(own * count)
        chances.append(_in_batch(shares, lookups))
    return Popularity(np.concatenate(rows), np.concatenate(chances))


def _in_batch(shares: Floats, lookups: float) -> Floats:
    """That a row of this share of all ids is among so many: never more than the ids it has on average."""
    if not lookups:
        return np.zeros_like(shares)
    with np.errstate(divide="ignore"):
        some = -np.expm1(lookups * np.log1p(-np.minimum(shares, 1.0)))
    return np.minimum(some, lookups * shares)


def lru_curve(found: Popularity) -> MissRatioCurve:
    """Of least-recently-used, by Che's approximation.

    A cache holds what was accessed in the last T batches; T follows from its size. A row that is accessed is in the
    cache if one of the batches before had it. The window of T batches covers T - 1/2 of those on average, as it begins
    in the middle of a batch: T^2 / 2 if T < 1.
    """
    rows, chances = found
    used = chances > 0
    rows, chances = rows[used], chances[used]
    if not len(rows):
        return _curve("lru", np.ones(1), np.zeros(1), 1)
    never = np.log1p(-np.minimum(chances, 1 - 1e-15))
    # From a window of less than one row to one by which every row was accessed.
    times = np.geomspace(0.5 / found.unique, _LONG / float(np.abs(never).min()), _TIMES)
    before = np.where(times < 1, times**2 / 2, times - 0.5)
    sizes = np.array([rows @ -np.expm1(never * time) for time in times])
    hits = np.array([(rows * chances) @ -np.expm1(never * time) for time in before]) / found.unique
    return _curve("lru", sizes, 1 - hits, round(rows.sum()))


def frequency_curve(found: Popularity, *, policy: str = "perfect-lfu") -> MissRatioCurve:
    """Of a cache of the rows that are accessed most: what counting every row's accesses for ever leads to."""
    order = np.argsort(-found.chances, kind="stable")
    rows, chances = found.rows[order], found.chances[order]
    sizes = np.cumsum(rows)
    hits = np.cumsum(rows * chances) / max(found.unique, 1e-300)
    return _curve(policy, sizes, 1 - hits, round(found.num_rows))


def _curve(policy: str, sizes: Floats, miss_ratios: Floats, num_rows: int) -> MissRatioCurve:
    """At whole sizes, log-spaced, by straight lines between those that are known; no access was simulated."""
    wanted = np.unique(np.round(np.geomspace(1, max(num_rows, 1), _SIZES)).astype(np.int64))
    found = np.interp(wanted, np.append(0.0, sizes), np.append(1.0, miss_ratios))
    return MissRatioCurve(
        policy=policy,
        sizes=wanted,
        miss_ratios=np.minimum.accumulate(np.clip(found, 0.0, 1.0)),
        num_accesses=0,
        num_rows=num_rows,
    )
