"""Some of the rows stand for all: accesses to a sample of the rows, replayed through caches that are as much smaller.

Source: C. Waldspurger et al., Efficient MRC construction with SHARDS (FAST 2015) and Cache modeling and optimization
using miniature simulations (ATC 2017). There a hash of the key chooses the rows. Popular rows are few and have much of
all accesses, so which of them are chosen decides the error. Here rows are lined up by how often they are accessed,
those of equal counts by a hash, and every 1/rate-th is taken, the first at random: systematic sampling of an ordered
population (W. Cochran, Sampling Techniques, chapter 8). Each row is in the sample with the same probability still.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.hashing import mix64
from ...kernels.jit import uncounted_kernel as kernel
from ...system.excerpt import excerpt
from .entries import empty_entries, grown_entries, is_half_full, place_of, prefetch_place

__all__ = ["Sample", "every_access", "sample_of", "sampled_sizes"]

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

_FEWEST_ROWS: Final = 1 << 10


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


def every_access(keys: Int64s, bounds: Sequence[int]) -> Sample:
    return Sample(keys, bounds, 1.0)


def sample_of(keys: Int64s, bounds: Sequence[int], rate: float, seed: int = 0) -> Sample:
    """All accesses to a share of the rows. Takes memory for each distinct row, 32 to 64 bytes.

    Args:
        keys: int64 [n], at least one.
        bounds: of windows, ascending from 0 to n.
        rate: above 0, and below 1.
        seed: of the chance.

    Raises:
        ValueError: no row would be in it.
    """
    bits = int(mix64(np.uint64(seed)))
    mixed = keys ^ (bits >> 1) if seed else keys
    counts = _counts(mixed)
    places = np.flatnonzero(counts[1::2] >= 0)
    first = bits / 2.0**64
    chosen = ((first + np.arange(int(len(places) * rate) + 1)) / rate).astype(np.int64)
    chosen = _by_popularity(counts[1::2][places])[chosen[chosen < len(places)]]
    if not len(chosen):
        raise ValueError(
            f"sampling_rate={excerpt(rate)}: none of {len(places):,} rows is in the sample; "
            f"give {min(1.0, 10 / len(places)):.2g} or more"
        )
    positions = _positions(mixed, counts[::2][places[chosen]])
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
    bits, sorted in a time that grows with the rows alone; and rows lie in the order of a hash."""
    rounded = (counts.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.argsort(~rounded, kind="stable")


def _counts(keys: Int64s) -> Int64s:
    """Entries of the distinct keys, the number being how often each is there."""
    entries, progress = empty_entries(_FEWEST_ROWS), np.zeros(2, np.int64)
    while True:
        _count_keys(keys, entries, progress)
        if progress[0] == len(keys):
            return entries
        entries = grown_entries(entries)


def _positions(keys: Int64s, chosen: Int64s) -> Int64s:
    """Where in ``keys`` any of the chosen keys is, ascending."""
    entries = empty_entries(2 * len(chosen))
    _count_keys(chosen, entries, np.zeros(2, np.int64))
    positions = np.empty(len(keys) + 1, np.int64)
    return positions[: _find_keys(keys, entries, positions)].copy()


@kernel
def _count_keys(keys: Any, entries: Any, progress: Any) -> None:
    """As far as the entries have room. ``progress``: int64 [2], keys counted and distinct ones, brought up to date."""
    position, num_keys = progress[0], progress[1]
    while position < keys.shape[0] and not is_half_full(entries, num_keys):
        prefetch_place(entries, keys, position)
        place = place_of(entries, keys[position])
        if entries[place + 1] < 0:
            entries[place], entries[place + 1] = keys[position], 0
            num_keys += 1
        entries[place + 1] += 1
        position += 1
    progress[0], progress[1] = position, num_keys


@kernel
def _find_keys(keys: Any, entries: Any, positions: Any) -> Any:
    """Write positions of keys that have an entry; returns how many."""
    count = 0
    for position in range(keys.shape[0]):
        positions[count] = position
        count += entries[place_of(entries, keys[position]) + 1] >= 0
    return count
