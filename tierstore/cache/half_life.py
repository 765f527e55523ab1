"""How fast TinyLFU's counts fade: small caches replay a sample of the accesses, each at its own speed.

The sample is by key, in proportion to the small caches' size over the real one's. So each small cache has about the hit
rate that the real cache would have at its speed. The real cache takes the mean speed, weighted by recent hits: a lead
of 4 hits doubles a weight. Leads have bounds, wider for slower speeds: where phases alternate, being slow at the wrong
time costs most.

Sources: C. Waldspurger, T. Saemundson, I. Ahmad and N. Park, Cache modeling and optimization using miniature
simulations (USENIX ATC 2017); N. Littlestone and M. Warmuth, The weighted majority algorithm (1994), for the mean.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int64s
from ..kernels.jit import uncounted_inline as inline
from .cache_state import CacheState, Tally, new_state, state_bytes_of
from .index import mixed_key

_SAMPLED_ROWS: Final = 128
"""Slots of each small cache; those of the real one if it has fewer. Half as many cost 0.1 points on changing accesses;
twice as many gain less, for twice the time."""
_RATES: Final = np.array([64, 91, 128, 181, 256, 362, 512, 724, 1024, 2266, 5016, 11101, 24576])
"""``Tally.RATE``, from a half-life of 48 accesses a slot to one of an eighth."""
_STEPS: Final = 4  # each fourth is a small cache's: half-lives of 48, 12, 3 and 1/8 accesses a slot
_SLOTS_PER_ACCESS: Final = 4  # in a round
NUM_SPEEDS: Final = len(_RATES[::_STEPS])
_HIT: Final = 256  # what a hit counts; scores lose a 64th in each round
_KEPT: Final = 64
_DOUBLING: Final = 4  # hits by which a lead doubles the weight
_LEAD: Final = 24  # hits by which the fastest is behind at most; each slower one by as many more
_WEIGHT: Final = 2**40
_HALF: Final = np.uint64(32)
_SALT: Final = np.uint64(0x9E3779B97F4A7C15)


class HalfLife(NamedTuple):
    small: tuple[CacheState, ...]  # [NUM_SPEEDS]
    waiting: Int64s  # int64 [1 + accesses of a round]: how many sampled keys the small caches have not seen, and these
    scores: Int64s  # int64 [NUM_SPEEDS]: recent hits


def half_life_bytes_of(capacity: int) -> int:
    """Bytes of a TinyLFU cache's small ones."""
    return NUM_SPEEDS * state_bytes_of(min(capacity, _SAMPLED_ROWS), "tinylfu")


def new_half_life(state: CacheState) -> HalfLife:
    """Sets the rate of ``state``, the slowest at first; of another policy than TinyLFU it is never used."""
    if not state.sketch.size:
        return HalfLife((state,) * NUM_SPEEDS, state.tallies, state.tallies)
    rows = min(len(state.slots) - 1, _SAMPLED_ROWS)
    small = tuple(new_state(rows, "tinylfu") for _ in range(NUM_SPEEDS))
    for each, rate in zip((state, *small), (_RATES[0], *_RATES[::_STEPS]), strict=True):
        each.tallies[Tally.RATE] = rate
    return HalfLife(small, np.zeros(1 + max(1, rows // _SLOTS_PER_ACCESS), np.int64), np.zeros(NUM_SPEEDS, np.int64))


@inline
def sample_key(waiting: Int64s, capacity: Any, key: Any) -> Any:
    """Let the key wait if it is in the sample; returns whether it completes a round.

    The sample's hash differs from the one that the small caches place keys by."""
    salted = (mixed_key(key) * _SALT) >> _HALF
    if (salted * np.uint64(capacity)) >> _HALF >= np.uint64(_SAMPLED_ROWS):
        return False
    if waiting[0] == waiting.size - 1:  # a round that was cut short
        waiting[0] = 0
    waiting[0] += 1
    waiting[waiting[0]] = key
    return waiting[0] == waiting.size - 1


@inline
def score_hits(half_life: HalfLife, speed: Any, hits: Any) -> None:
    """A small cache hit so often in this round."""
    half_life.scores[speed] += _HIT * hits - half_life.scores[speed] // _KEPT


@inline
def choose_rate(scores: Int64s) -> Any:
    """The real cache's ``Tally.RATE``."""
    best, total, moment = np.int64(0), 0, 0
    for score in scores:
        best = max(best, score)
    for speed in range(NUM_SPEEDS):
        scores[speed] = max(scores[speed], best - _HIT * _LEAD * (NUM_SPEEDS - speed))
        weight = _WEIGHT >> ((best - scores[speed]) // (_HIT * _DOUBLING))
        total += weight
        moment += weight * speed
    # Nothing was hit by any: a loop, of which the slowest keeps a part.
    return _RATES[(2 * _STEPS * moment + total) // (2 * total) if best > 0 else 0]
