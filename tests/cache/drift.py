"""Made-up lookups whose popular rows change, in ways that are hard for a cache that counts: keys by name."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]

_SKEW: Final = 1.05
_UNIVERSE: Final = 20  # rows of the skewed patterns, for each row the cache has
_NEVER_BEFORE: Final = 1 << 32  # keys from here on are of no other pattern


def _skewed(rng: np.random.Generator, num_rows: int, num: int) -> Keys:
    """Ranks, the most popular 0, by Zipf's law."""
    weights = np.cumsum(1 / np.arange(1, num_rows + 1) ** _SKEW)
    ranks: Keys = np.searchsorted(weights, rng.random(num) * weights[-1]).astype(np.int64)
    return ranks


def _rotating(ranks: Keys, num_rows: int, every: int) -> Keys:
    """One row becomes unpopular, and each other one rank more popular or less, every so many accesses."""
    return (ranks + np.arange(len(ranks)) // every) % num_rows


def _reshuffled(rng: np.random.Generator, ranks: Keys, num_rows: int, every: int) -> Keys:
    """Every so many accesses all popularity is dealt again."""
    parts = [rng.permutation(num_rows)[ranks[start : start + every]] for start in range(0, len(ranks), every)]
    return np.concatenate(parts)


def _swapping(rng: np.random.Generator, ranks: Keys, num_rows: int, rate: float) -> Keys:
    """Pairs of rows trade places, ``rate`` pairs an access."""
    block = 256
    rows = rng.permutation(num_rows)
    keys = np.empty_like(ranks)
    for start in range(0, len(ranks), block):
        keys[start : start + block] = rows[ranks[start : start + block]]
        for one, other in rng.integers(0, num_rows, (int(rate * block), 2)):
            rows[one], rows[other] = rows[other], rows[one]
    return keys


def _sliding(rng: np.random.Generator, num: int, width: float, uses: int) -> Keys:
    """Any of the newest ``width`` rows; each is used so many times, then never again."""
    keys: Keys = (np.arange(num) / uses + rng.random(num) * width).astype(np.int64)
    return keys


def _recent(rng: np.random.Generator, num: int, new_share: float, depth: int) -> Keys:
    """A new row, or what was accessed some accesses ago, near more often than far: what LRU is best at."""
    is_new = rng.random(num) < new_share
    back = (float(depth) ** rng.random(num)).astype(np.int64)
    listed: list[int] = []
    for position in range(num):
        known = not is_new[position] and back[position] <= position
        listed.append(listed[position - int(back[position])] if known else _NEVER_BEFORE + position)
    return np.array(listed, np.int64)


def _with_scans(keys: Keys, every: int, length: int) -> Keys:
    """Now and then a run over rows that are never used again."""
    scanned = np.arange(len(keys)) % every < length
    return np.where(scanned, _NEVER_BEFORE + np.arange(len(keys)), keys)


def _alternating(one: Keys, other: Keys, every: int) -> Keys:
    return np.where(np.arange(len(one)) // every % 2 == 0, one, other + 2 * _NEVER_BEFORE)


def drifting(capacity: int, num: int, seed: int = 1) -> dict[str, Keys]:
    """``num`` lookups of each kind of drift; speeds and sizes go by the ``capacity`` of the cache under test."""
    rng = np.random.default_rng(seed)
    num_rows = _UNIVERSE * capacity
    ranks = _skewed(rng, num_rows, num)
    still = rng.permutation(num_rows)[ranks]
    recent = _recent(rng, num, 0.1, 50 * capacity)
    sliding = _sliding(rng, num, 0.9 * capacity, 5)
    patterns: dict[str, Any] = {"skewed, no drift": still}
    for every in (1, 10, 100, 1000):
        patterns[f"ranks rotate every {every} accesses"] = _rotating(ranks, num_rows, every)
    for times in (1, 5, 20, 100):
        patterns[f"dealt again every {times} capacities"] = _reshuffled(rng, ranks, num_rows, times * capacity)
    for rate in (0.01, 0.1, 1, 4):
        patterns[f"{rate} swaps an access"] = _swapping(rng, ranks, num_rows, rate)
    for width in (0.5, 0.9, 1.2, 2, 5):
        for uses in (3, 50):
            patterns[f"newest {width} capacities, {uses} uses"] = _sliding(rng, num, width * capacity, uses)
    patterns["recent rows, 10 % new"] = recent
    patterns["recent rows, 30 % new"] = _recent(rng, num, 0.3, 50 * capacity)
    for size in (0.8, 1.2, 2):
        patterns[f"loop over {size} capacities"] = np.arange(num) % int(size * capacity)
    patterns["scans of 2 capacities"] = _with_scans(still, 10 * capacity, 2 * capacity)
    patterns["half of all rows once"] = np.where(rng.random(num) < 0.5, _NEVER_BEFORE + np.arange(num), still)
    for times in (2, 10, 40):
        patterns[f"skewed and sliding by turns of {times}"] = _alternating(still, sliding, times * capacity)
        patterns[f"skewed and recent by turns of {times}"] = _alternating(still, recent, times * capacity)
    return patterns
