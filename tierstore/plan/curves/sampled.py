"""Some of the rows stand for all: accesses to a sample of the rows, replayed through caches that are as much smaller.

Source: C. Waldspurger et al., Efficient MRC construction with SHARDS (FAST 2015) and Cache modeling and optimization
using miniature simulations (ATC 2017). There a hash of the key chooses the rows. Popular rows are few and have much of
all accesses, so which of them are chosen decides the error. Here rows are lined up by how often they are accessed,
those of equal counts at random, and every 1/rate-th is taken, the first at random: systematic sampling of an ordered
population (W. Cochran, Sampling Techniques, chapter 8). Each row is in the sample with the same probability still.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...kernels.arrays import Float64s, Int64s
from ...system.excerpt import excerpt
from ..accesses import numbered


class Sample(NamedTuple):
    """Accesses to chosen rows.

    Attributes:
        keys: int64 [m].
        bounds: of the windows, in ``keys``.
        rate: the share of the rows that they are, by probability.
    """

    keys: Int64s
    bounds: Sequence[int]
    rate: float


def sample_of(keys: Int64s, bounds: Sequence[int], rate: float, seed: int = 0) -> Sample:
    """All accesses to a share of the rows.

    Args:
        keys: int64 [n], at least one.
        bounds: of windows, ascending from 0 to n.
        rate: above 0, and at most 1.
        seed: of the chance.

    Raises:
        ValueError: no row would be in it.
    """
    if rate == 1:
        return Sample(keys, bounds, 1.0)
    numbers, num_rows = numbered(keys)
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
    return Sample(keys[positions], np.searchsorted(positions, bounds).tolist(), rate)


def sampled_sizes(policy: str, sizes: Int64s, rate: float) -> Float64s:
    """Of the caches that are to a sample what ``sizes`` (int64 [k], rows) are to all rows: float64 [k].

    Of all rows, c - 1 are cached beside the newest, which these policies always let in. Of the sample, the newest is
    there too, with a share of the others: so a small cache of sampled rows is larger than its share. For LRU, whose
    distances are whole numbers that stand for some of both sides, half of that row.
    """
    newest = 0.5 if policy == "lru" else 1.0
    found: Float64s = sizes.astype(np.float64) * rate + newest * (1 - rate)
    return found


def _by_popularity(counts: Int64s) -> Int64s:
    """Places in ``counts``, the largest first. Counts that differ by less than a hundredth are equal: so they have 16
    bits, sorted in a time that grows with the rows alone."""
    rounded = (counts.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.argsort(~rounded, kind="stable")
