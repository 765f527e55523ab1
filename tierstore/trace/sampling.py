"""Spatial sampling: whether a row is in a sample is a matter of its key alone, so it is there with all its accesses.

A row is in the sample of rate r if the SplitMix64 output of its key, as a number of 64 bits, is below r * 2^64. So a
sample of a lower rate is part of one of a higher rate, and samples of other machines and times agree. After
C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad: Efficient MRC Construction with SHARDS, FAST 2015.
"""

from typing import Final

import numpy as np

from ..kernels.arrays import Bools, Ids, Int64s
from ..kernels.hashing import mix64
from ..kernels.jit import kernel
from ..layout import KEY_ROW_BITS

ALL: Final = np.uint64(2**64 - 1)
"""``last_hash`` of a sample of all rows."""
_BLOCK: Final = 32
"""Rows that ``select`` hashes together, at most 64: mostly none is in the sample. Of fewer the compiler unrolls the
loop rather than use the widest vectors, which takes three times as long."""


def last_hash(rate: float) -> np.uint64:
    """The largest hash in the sample. ValueError: the rate is not in (0, 1], or so low that no row would be in it."""
    size = int(rate * 2.0**64) if 0 < rate <= 1 else 0
    if not size:
        raise ValueError(f"sampling rate {rate!r}: expected a number above 0, and at most 1")
    return np.uint64(size - 1)


def is_sampled(keys: Int64s, rate: float) -> Bools:
    """Which rows are in the sample, bool [n], by ``table index << 40 | row``, int64 [n]; errors as ``last_hash``."""
    chosen = np.empty(len(keys), np.bool_)
    _mark(keys, last_hash(rate), chosen)
    return chosen


@kernel
def _mark(keys: Int64s, last: np.uint64, chosen: Bools) -> None:
    for position in range(keys.shape[0]):
        chosen[position] = mix64(np.uint64(keys[position])) <= last


@kernel
def select(
    ids: Ids, starts: Int64s, firsts: Int64s, num_rows: Int64s, batch: int, bag_starts: Ids, last: np.uint64,
    found: Int64s, lookups: Int64s,
) -> int:  # fmt: skip
    """How many rows of a lookup are sampled, features laid end to end. Ids that are no rows are left out: the caller
    may have changed them since they were looked up.

    Args:
        ids: int64 or int32 [N]. starts: int64 [features], where each feature's ids begin in ``ids``.
        firsts: int64 [features], the key of row 0 of each feature's table; 0 where ids are keys, of one table.
        num_rows: int64 [features], what ids are below. batch: bags of each feature.
        bag_starts: int64 or int32 [features * batch + 1], where each bag begins in what is laid end to end.
        last: of the sample, see ``last_hash``.
        found: int64 [2, n], for all n ids: written to, the sampled rows' keys and their positions, ascending.
        lookups: int64 [tables], ids of each table: added to.
    """
    count = 0
    for feature in range(starts.shape[0]):
        begin, end = bag_starts[feature * batch], bag_starts[(feature + 1) * batch]
        # A slice, as its indexes are plainly not negative: else the compiler makes no vectors of them.
        own = ids[starts[feature] : starts[feature] + end - begin]
        first, limit, whole = firsts[feature], num_rows[feature], own.shape[0] - own.shape[0] % _BLOCK
        if own.shape[0]:
            row = own[0]
            if 0 <= row < limit:
                lookups[(first + row) >> KEY_ROW_BITS] += own.shape[0]
        for block in range(0, whole, _BLOCK):
            hits = np.uint64(0)
            for i in range(_BLOCK):
                hits |= np.uint64(mix64(np.uint64(first + own[block + i])) <= last) << np.uint64(i)
            i = block
            while hits:
                row = own[i]
                if hits & np.uint64(1) and 0 <= row < limit:
                    found[0, count], found[1, count] = first + row, begin + i
                    count += 1
                hits >>= np.uint64(1)
                i += 1
        for i in range(whole, own.shape[0]):
            row = own[i]
            if mix64(np.uint64(first + row)) <= last and 0 <= row < limit:
                found[0, count], found[1, count] = first + row, begin + i
                count += 1
    return count
