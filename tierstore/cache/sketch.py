"""Levels of evicted rows (tinylfu.py): a count-min sketch of bytes.

An evicted row leaves its level here, and continues from it when it returns. A counter is raised to a given level, never
added to (conservative update). So a row finds at least the level that it left, and more only if other rows raised both
its counters.

Sources: G. Cormode and S. Muthukrishnan, An improved data stream summary: the count-min sketch and its applications
(2005); C. Estan and G. Varghese, New directions in traffic measurement and accounting (2002).
"""

from typing import Any, Final

import numpy as np

from ..kernels.arrays import Bytes
from ..kernels.jit import uncounted_inline as inline
from .index import mixed_key

_COUNTERS_PER_ROW: Final = 16  # half as many cost 0.2 to 0.35 points of hit rate on Criteo's lookups
BLOCK_BYTES: Final = 64  # both counters of a key lie in one block, a cache line; that costs under 0.03 points
_BLOCK: Final = np.uint64(BLOCK_BYTES)
_HALF_BLOCK: Final = np.uint64(BLOCK_BYTES // 2)
_IN_HALF: Final = np.uint64(BLOCK_BYTES // 2 - 1)
_HALF: Final = np.uint64(32)
_FIVE: Final = np.uint64(5)


def sketch_width(capacity: int) -> int:
    """Bytes, of a byte each, of the sketch of a cache of ``capacity`` slots: whole blocks."""
    return -(-_COUNTERS_PER_ROW * capacity // BLOCK_BYTES) * BLOCK_BYTES


@inline
def _first(sketch: Bytes, mixed: np.uint64) -> np.uint64:
    """The key's counter in the first half of its block; the block follows from the mixed key's upper half."""
    return ((mixed >> _HALF) * (np.uint64(sketch.size) // _BLOCK) >> _HALF) * _BLOCK + (mixed & _IN_HALF)


@inline
def _second(first: np.uint64, mixed: np.uint64) -> np.uint64:
    """The key's counter in the other half."""
    return first - (mixed & _IN_HALF) + _HALF_BLOCK + ((mixed >> _FIVE) & _IN_HALF)


@inline
def sketch_level(sketch: Bytes, key: Any) -> Any:
    """int64: the level of the key's row when it left, 0 if it is not known."""
    mixed = mixed_key(key)
    first = _first(sketch, mixed)
    return min(np.int64(sketch[first]), np.int64(sketch[_second(first, mixed)]))


@inline
def sketch_raise(sketch: Bytes, key: Any, level: Any) -> None:
    """The key's row leaves at this level."""
    mixed = mixed_key(key)
    first = _first(sketch, mixed)
    second = _second(first, mixed)
    if sketch[first] < level:
        sketch[first] = level
    if sketch[second] < level:
        sketch[second] = level


@inline
def sketch_lower(sketch: Bytes, amount: Any) -> None:
    """Lower all levels, down to 0 at most."""
    lowered = np.uint8(amount)
    for place in range(sketch.size):
        sketch[place] -= min(sketch[place], lowered)
