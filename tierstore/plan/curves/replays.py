"""What each policy misses, at any sizes: accesses are replayed once for LRU, and once a size for the others."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...cache.ddr import DdrCache
from ...kernels.arrays import Float64s, Int64s
from ...settings.names import nearest
from ..accesses import Numbered, numbered
from .base import POLICIES
from .lru import StackDistances
from .priority import perfect_counts, replay, times_of_next_use

__all__ = ["Progress", "Replay", "replay_of"]

Progress = Callable[[int, int], None]
"""Told how much is done, and of how much; accesses, each once a replay."""

_INTERPOLATED: Final = 16
"""Rows. Below, a part of a row makes a difference."""
_CHUNK: Final = 1 << 20
"""Accesses between two calls of a ``Progress``."""
_PRIORITIES: Final = {"perfect-lfu": perfect_counts, "opt": times_of_next_use}


class Replay(Protocol):
    """Accesses, ready to be asked what a cache misses."""

    @property
    def num_rows(self) -> int:
        """Distinct rows."""

    def misses(self, sizes: Float64s) -> Float64s:
        """float64 [windows, k]: in each window, at sizes (float64 [k], rows, more than 0).

        Between two whole sizes misses lie on a straight line; with policies that are replayed for each size only
        between small ones, and from 16 rows on the nearest whole size is taken.
        """


def replay_of(policy: str, keys: Int64s, bounds: Sequence[int], progress: Progress | None) -> Replay:
    """Args:
        keys: int64 [n].
        bounds: of the windows, ascending from 0 to n; what is cached stays so from one to the next.

    Raises:
        ValueError: no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: {nearest(policy, POLICIES)}")
    told = progress or _tell_nobody
    return _Distances(keys, bounds, told) if policy == "lru" else _Simulations(policy, keys, bounds, told)


class _Distances:
    """LRU."""

    def __init__(self, keys: Int64s, bounds: Sequence[int], progress: Progress) -> None:
        accesses = numbered(keys)
        stack, self._nearer = StackDistances(accesses), []
        for begin, end in itertools.pairwise(bounds):
            histogram = np.zeros(accesses.num_rows, np.int64)
            for start in range(begin, end, _CHUNK):
                stack.count(start, min(end, start + _CHUNK), histogram)
                progress(min(end, start + _CHUNK), len(keys))
            self._nearer.append(np.append(0, np.cumsum(histogram)))
        self._lengths = np.diff(bounds)
        self.num_rows: Final = accesses.num_rows

    def misses(self, sizes: Float64s) -> Float64s:
        low = np.minimum(np.floor(sizes), self.num_rows).astype(np.int64)
        at_low, at_high = (
            np.stack([each[ends] for each in self._nearer]) for ends in (low, low + (low < self.num_rows))
        )
        missed: Float64s = self._lengths[:, None] - (at_low + (at_high - at_low) * (sizes - low))
        return missed


class _Simulations:
    """Any other policy. The store's own are replayed through the books of its DDR tier."""

    def __init__(self, policy: Any, keys: Int64s, bounds: Sequence[int], progress: Progress) -> None:
        self._policy, self._keys, self._bounds, self._progress = policy, keys, bounds, progress
        self._accesses = numbered(keys)
        self._priorities = _PRIORITIES[policy](self._accesses) if policy in _PRIORITIES else None

    @property
    def num_rows(self) -> int:
        return self._accesses.num_rows

    def misses(self, sizes: Float64s) -> Float64s:
        sizes = np.where(sizes < _INTERPOLATED, sizes, np.rint(sizes))
        low, high = np.floor(sizes), np.ceil(sizes)
        wanted = np.unique(np.minimum(np.concatenate([low, high]), self.num_rows)).astype(np.int64)
        missed = np.empty((len(self._bounds) - 1, len(wanted)))
        for index, capacity in enumerate(wanted.tolist()):
            missed[:, index] = self._misses_of(capacity)
            self._progress((index + 1) * len(self._keys), len(wanted) * len(self._keys))
        at_low, at_high = (missed[:, np.searchsorted(wanted, np.minimum(ends, self.num_rows))] for ends in (low, high))
        found: Float64s = at_low + (at_high - at_low) * (sizes - low)
        return found

    def _misses_of(self, capacity: int) -> Int64s:
        is_hit = self._hits(self._accesses, capacity)
        hits = [
            np.count_nonzero(is_hit[begin:end]) for begin, end in zip(self._bounds[:-1], self._bounds[1:], strict=True)
        ]
        missed: Int64s = np.diff(self._bounds) - hits
        return missed

    def _hits(self, accesses: Numbered, capacity: int) -> NDArray[np.bool_]:
        if capacity <= 1:
            # Every policy lets the newest row in, so one row is the last one accessed.
            is_hit = np.zeros(len(self._keys), np.bool_)
            np.equal(self._keys[1:], self._keys[:-1], out=is_hit[1:], where=capacity == 1)
            return is_hit
        if self._priorities is not None:
            return replay(accesses, self._priorities, capacity)
        return DdrCache(capacity, weight_words=0, state_words=0, policy=self._policy).access(self._keys)


def _tell_nobody(done: int, total: int) -> None:
    pass
