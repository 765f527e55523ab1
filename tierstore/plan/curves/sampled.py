"""Some of the rows stand for all: accesses to a sample of the rows, replayed through caches that are as much smaller.

Source: C. Waldspurger et al., Efficient MRC construction with SHARDS (FAST 2015) and Cache modeling and optimization
using miniature simulations (ATC 2017). There a hash of the key chooses the rows. Popular rows are few and have much of
all accesses, so which of them are chosen decides the error. Here rows are lined up by how often they are accessed,
those of equal counts at random, and every 1/rate-th is taken, the first at random: systematic sampling of an ordered
population (W. Cochran, Sampling Techniques, chapter 8). Each row is in the sample with the same probability still.
"""

import math
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import Float64s, Int64s
from ...system.excerpt import excerpt
from ..accesses import Accesses, numbered


class Sample(NamedTuple):
    """Accesses to chosen rows.

    Attributes:
        keys: int64 [m].
        starts: int64 [batches + 1]: where each batch begins in ``keys``, those without a chosen row included.
        rate: the share of the rows that they are, by probability.
    """

    keys: Int64s
    starts: Int64s
    rate: float


def sample_of(accesses: Accesses, rate: float, seed: int = 0) -> Sample:
    """All accesses to a share of the rows.

    Args:
        accesses: at least one.
        rate: above 0, and at most 1.
        seed: of the chance.

    Raises:
        ValueError: no row would be in it.
    """
    if rate == 1:
        return Sample(accesses.keys, accesses.starts, 1.0)
    numbers, num_rows = numbered(accesses.keys)
    generator = np.random.default_rng(seed)
    places = ((generator.random() + np.arange(int(num_rows * rate) + 1)) / rate).astype(np.int64)
    shuffled = generator.permutation(num_rows)
    chosen = shuffled[_by_popularity(np.bincount(numbers)[shuffled])[places[places < num_rows]]]
    if not len(chosen):
        raise ValueError(
            f"sampling_rate={excerpt(rate)}: none of {num_rows:,} rows is in the sample; "
            f"give {min(1.0, 10 / num_rows):.2g} or more"
        )
    is_chosen = np.zeros(num_rows, np.bool_)
    is_chosen[chosen] = True
    positions = np.flatnonzero(is_chosen[numbers])
    return part_of(accesses, positions, rate)


def part_of(accesses: Accesses, positions: Int64s, rate: float) -> Sample:
    """The accesses at these positions, which ascend: all those to a share of the rows."""
    return Sample(accesses.keys[positions], np.searchsorted(positions, accesses.starts), rate)


def sampled_sizes(policy: str, sizes: Int64s, rate: float) -> Float64s:
    """Of the caches that are to a sample what ``sizes`` (int64 [k], rows) are to all rows: float64 [k].

    Of all rows, c - 1 are cached beside the newest, which these policies always let in. Of the sample, the newest is
    there too, with a share of the others: so a small cache of sampled rows is larger than its share. For LRU, whose
    distances are whole numbers that stand for some of both sides, half of that row. Pins need nothing more: of the rows
    of a batch that are pinned beside the newest, the sample has its share too.
    """
    newest = 0.5 if policy == "lru" else 1.0
    found: Float64s = sizes.astype(np.float64) * rate + newest * (1 - rate)
    return found


class _Error(NamedTuple):
    """Points of hit rate that a curve is off on average over sizes, times the root of the sampled rows."""

    mean: float
    """Over curves."""
    worst: float
    """Of curves."""


_BALANCED: Final = _Error(mean=15, worst=50)
_BY_HASH: Final = _Error(mean=70, worst=170)
"""Measured of the curves of eight traces, from samples of 100 to 5,000 rows."""
_MOST_POINTS: Final = 2.0
"""That a curve may be off without a warning, at worst."""


def sample_warning(num_rows: int, rate: float, recorded_rate: float) -> str:
    """What to say of curves from so few rows, or "".

    Args:
        num_rows: sampled.
        rate: of all rows; 1: no sample.
        recorded_rate: of that, what a recording chose, by hash.
    """
    error = _BY_HASH if recorded_rate < 1 else _BALANCED
    enough = int((error.worst / _MOST_POINTS) ** 2)
    if rate == 1 or num_rows >= enough:
        return ""
    root = math.sqrt(max(num_rows, 1))
    needed = min(1.0, rate * enough / max(num_rows, 1))
    rows = f"{needed:.2g} of the rows" if needed < 1 else "every row"
    return (
        f"{num_rows:,} sampled rows say little: hit rates may be off by {error.mean / root:.1f} points, "
        f"{error.worst / root:.0f} at worst; {'record' if recorded_rate < 1 else 'take'} {rows}"
    )


def _by_popularity(counts: Int64s) -> Int64s:
    """Places in ``counts``, the largest first. Counts that differ by less than a hundredth are equal: so they have 16
    bits, sorted in a time that grows with the rows alone."""
    rounded = (counts.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.argsort(~rounded, kind="stable")
