"""What a cache would do under Zipf's law, without a trace: by formula, over rows in bins, so that 2^40 rows are few.

Each id is drawn independently of all others (the *independent reference model*). Hit rates of LRU are Che's
approximation (H. Che, Y. Tung, Z. Wang, Hierarchical web caching systems, IEEE JSAC 20, 2002; why it is so good:
C. Fricker, P. Robert, J. Roberts, A versatile and accurate approximation for LRU cache performance, ITC 24, 2012), here
over batches: a row is accessed at most once a batch, as the tiers of a store count.
"""

import math
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
_MANY_BINS: Final = 2048
_LEAST_CHANCE: Final = 1e-300
_TIMES: Final = 160
_FEW_BATCHES: Final = np.linspace(0.25, 4.0, 61)
"""Windows where hit rates bend most."""
_LONG: Final = 40.0
"""Accesses that a row has had, on average, when it is taken for certain that it had one: the odds are e^-40."""
_SIZES: Final = 512
_BATCHES: Final = 1_000_000
"""Whose accesses a curve says it is of, so that curves of several tables have their weights."""
_ALMOST_CERTAIN: Final = 1 - 1e-15
_SMALL_RATE: Final = 1e-5


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
    return _merged(np.concatenate(rows), np.concatenate(chances))


def _merged(rows: Floats, chances: Floats) -> Popularity:
    """Bins of nearly equal chance as one, of their mean, where there are many."""
    if len(rows) <= _MANY_BINS:
        return Popularity(rows, chances)
    steps = np.round(np.log(np.maximum(chances, _LEAST_CHANCE)) / math.log(_BIN_GROWTH))
    _, places = np.unique(steps, return_inverse=True)
    merged = np.bincount(places, weights=rows).astype(np.float64)
    return Popularity(merged, np.bincount(places, weights=rows * chances) / merged)


def _in_batch(shares: Floats, lookups: float) -> Floats:
    """That a row of this share of all ids is among so many: never more than the ids it has on average."""
    if not lookups:
        return np.zeros_like(shares)
    with np.errstate(divide="ignore"):
        some = -np.expm1(lookups * np.log1p(-np.minimum(shares, 1.0)))
    return np.minimum(some, lookups * shares)


def lru_curve(found: Popularity) -> MissRatioCurve:
    """Of least-recently-used, by Che's approximation.

    A cache holds what was accessed in the last T batches, of which T follows from its size. A row that is accessed is
    in it if it was within T before. Within a batch frequent rows come early: the time to a row's first use is
    exponential, cut off at the batch's end. So the whole batches of T count but for the last, and that and the one
    before it with the chance that the two first uses lie near enough; without this, caches of less than a batch would
    seem to hit up to ten points more often than they do.
    """
    used = found.chances > 0
    rows, chances = found.rows[used], np.minimum(found.chances[used], _ALMOST_CERTAIN)
    if not len(rows):
        return _curve("lru", np.ones(1), np.zeros(1), found)
    rates = -np.log1p(-chances)
    weights = rows * chances / found.unique
    sizes, hits = [0.0], [0.0]
    # From a window of less than a row to one by which every row was accessed.
    longest = 1 + _LONG / float(rates.min())
    for time in np.union1d(np.geomspace(0.5 / found.unique, longest, _TIMES), _FEW_BATCHES):
        whole = np.floor(time)
        part = time - whole
        absent = np.exp(-rates * whole)
        sizes.append(float(rows @ (1 - absent * (1 - part * chances))))
        missed = 1 - chances * _behind(rates, 1 - part)
        if whole:
            missed *= np.exp(-rates * (whole - 1)) * (1 - chances * (1 - _behind(rates, part)))
        hits.append(float(weights @ (1 - missed)))
    return _curve("lru", np.array(sizes), 1 - np.array(hits), found)


def _behind(rates: Floats, gap: float) -> Floats:
    """The chance that the first use in a batch lies this part of a batch, or more, behind that in another one.

    Args:
        rates: uses a batch; times of first uses have the density ``rate * exp(-rate * t)``, scaled to [0, 1].
    """
    rates = np.maximum(rates, _SMALL_RATE)  # below, times are uniform, and differences would lose all digits
    both = -np.exp(-rates * gap) * np.expm1(-2 * rates * (1 - gap)) / 2
    beyond = -np.exp(-rates) * np.expm1(-rates * (1 - gap))
    chance: Floats = (both - beyond) / np.expm1(-rates) ** 2
    return chance


def frequency_curve(found: Popularity, *, policy: str = "perfect-lfu") -> MissRatioCurve:
    """Of a cache of the rows that are accessed most: what counting every row's accesses for ever leads to."""
    order = np.argsort(-found.chances, kind="stable")
    rows, chances = found.rows[order], found.chances[order]
    sizes = np.append(0.0, np.cumsum(rows))
    hits = np.append(0.0, np.cumsum(rows * chances)) / (found.unique or 1.0)
    return _curve(policy, sizes, 1 - hits, found)


def _curve(policy: str, sizes: Floats, miss_ratios: Floats, found: Popularity) -> MissRatioCurve:
    """At whole sizes, log-spaced, by straight lines between those that are known."""
    num_rows = round(found.num_rows)
    wanted = np.unique(np.round(np.geomspace(1, max(num_rows, 1), _SIZES)).astype(np.int64))
    at_wanted = np.interp(wanted, sizes, miss_ratios)
    return MissRatioCurve(
        policy=policy,
        sizes=wanted,
        miss_ratios=np.minimum.accumulate(np.clip(at_wanted, 0.0, 1.0)),
        num_accesses=round(found.unique * _BATCHES),
        num_rows=num_rows,
    )
