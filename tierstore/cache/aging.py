"""How fast TinyLFU's counts fade: small caches replay a sample of the accesses, each at its own speed.

The sample is by key, in proportion to the small caches' size over the real one's. So each small cache has about the hit
rate that the real cache would have at its speed. The real cache takes the mean speed, weighted by recent hits: a lead
of 4 hits doubles a weight. Where speeds hit alike, the mean lies between them, and chance moves it little. Leads have
bounds, which are the wider the slower the speed: where phases alternate, being slow at the wrong time costs most.

Sources: C. Waldspurger, T. Saemundson, I. Ahmad and N. Park, Cache modeling and optimization using miniature
simulations (USENIX ATC 2017); N. Littlestone and M. Warmuth, The weighted majority algorithm (1994), for the mean.
"""

from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int64s
from ..kernels.jit import uncounted_kernel as kernel
from .admission import replay_keys
from .books import CacheState, Tally, new_state, state_bytes_of
from .index import mixed_key

SAMPLED_ROWS: Final = 128
"""Slots of each small cache; those of the real one if it has fewer. Half as many cost 0.1 points on changing accesses;
twice as many gain less, for twice the time."""
_RATES: Final = np.array([64, 91, 128, 181, 256, 362, 512, 724, 1024, 2266, 5016, 11101, 24576])
"""``Tally.RATE``, from a half-life of 48 accesses a slot to one of an eighth."""
_STEPS: Final = 4  # each fourth is a small cache's: half-lives of 48, 12, 3 and 1/8 accesses a slot
_NUM_SPEEDS: Final = len(_RATES[::_STEPS])
_HIT: Final = 256  # what a hit counts; scores lose a 64th in each round
_KEPT: Final = 64
_DOUBLING: Final = 4  # hits by which a lead doubles the weight
_LEAD: Final = 24  # hits by which the fastest is behind at most; each slower one by as many more
_WEIGHT: Final = 2**40
_HALF: Final = np.uint64(32)
_SALT: Final = np.uint64(0x9E3779B97F4A7C15)


def aging_bytes_of(capacity: int) -> int:
    """Bytes of an ``Aging``'s small caches."""
    return _NUM_SPEEDS * state_bytes_of(min(capacity, SAMPLED_ROWS), "tinylfu")


@kernel
def _sample(keys: Int64s, capacity: int, sampled_rows: int, positions: Int64s) -> int:
    """List the positions of the keys that are in the sample; returns how many.

    The sample's hash differs from the one that the small caches place keys by."""
    count = 0
    for i in range(keys.size):
        salted = (mixed_key(keys[i]) * _SALT) >> _HALF
        if (salted * np.uint64(capacity)) >> _HALF < np.uint64(sampled_rows):
            positions[count] = i
            count += 1
    return count


@kernel
def _choose(hits: Int64s, scores: Int64s, rates: Int64s) -> None:
    """Bring scores up to date, round by round.

    Args:
        hits: int64 [rounds, _NUM_SPEEDS].
        scores: int64 [_NUM_SPEEDS]: recent hits.
        rates: int64 [rounds], written: the rate from the end of each round on.
    """
    for i in range(hits.shape[0]):
        best = 0
        for speed in range(_NUM_SPEEDS):
            scores[speed] += _HIT * hits[i, speed] - scores[speed] // _KEPT
            best = max(best, scores[speed])
        total, moment = 0, 0
        for speed in range(_NUM_SPEEDS):
            scores[speed] = max(scores[speed], best - _HIT * _LEAD * (_NUM_SPEEDS - speed))
            weight = _WEIGHT >> ((best - scores[speed]) // (_HIT * _DOUBLING))
            total += weight
            moment += weight * speed
        # Nothing was hit by any: a loop, of which the slowest keeps a part.
        rates[i] = _RATES[(2 * _STEPS * moment + total) // (2 * total) if best > 0 else 0]


class Changes(NamedTuple):
    positions: Int64s  # int64 [n], ascending: accesses after which the rate changes
    rates: Int64s  # int64 [n]: ``Tally.RATE`` from then on


class Aging:
    """Chooses the rate of one TinyLFU cache.

    Args:
        state: the real cache's books; its rate is the slowest at first.
    """

    def __init__(self, state: CacheState) -> None:
        self._capacity = len(state.slots) - 1
        self._rows = min(self._capacity, SAMPLED_ROWS)
        self._round = max(1, self._rows // 4)
        self._small = [new_state(self._rows, "tinylfu") for _ in range(_NUM_SPEEDS)]
        for small, rate in zip(self._small, _RATES[::_STEPS], strict=True):
            small.tallies[Tally.RATE] = rate
        state.tallies[Tally.RATE] = _RATES[0]
        self._scores: Int64s = np.zeros(_NUM_SPEEDS, np.int64)
        self._waiting: Int64s = np.empty(0, np.int64)
        """Sampled keys that the small caches have not seen: they replay rounds of an access for four slots."""

    def observe(self, keys: Int64s) -> Changes:
        """These rows are accessed once each, in order."""
        positions: Int64s = np.empty(len(keys), np.int64)
        positions = positions[: _sample(keys, self._capacity, self._rows, positions)]
        num_before, sampled = len(self._waiting), np.append(self._waiting, keys[positions])
        num_rounds = len(sampled) // self._round
        seen, self._waiting = np.split(sampled, [num_rounds * self._round])
        rates: Int64s = np.empty(num_rounds, np.int64)
        if num_rounds:
            is_hit = np.empty((_NUM_SPEEDS, num_rounds, self._round), np.bool_)
            for small, hits in zip(self._small, is_hit, strict=True):
                replay_keys(small, seen, hits.reshape(-1))
            _choose(np.ascontiguousarray(is_hit.sum(2, np.int64).T), self._scores, rates)
        return Changes(positions[self._round - 1 - num_before :: self._round][:num_rounds], rates)
