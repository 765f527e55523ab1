"""The hash table from key to record number, for caches and for dynamic ids: open addressing, linear probing, deletion
by backward shift; 7 bytes a record.

A place is one uint32: record + 1 in its lower ``bits``, and above them how far it lies behind its home, the largest
number standing for all above. 0 is empty. So a probe reads the keys of records of its own home alone, and a deletion
reads none. Records are a structured array with a field "key".

Sources: range reduction, D. Lemire, Fast random integer generation in an interval (2019); backward shift, D. Knuth, The
Art of Computer Programming, vol. 3, section 6.4, algorithm R.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .hashing import keyed_hash
from .jit import prefetch_item
from .jit import uncounted_inline as inline

Uint32s = NDArray[np.uint32]
Records = NDArray[Any]

ABSENT: Final = -1
FAR, NEAR = 32, 16  # keys ahead, for ``fetch_places``, ``fetch_record``: time for a read from memory to arrive
_HALF: Final = np.uint64(32)
_EMPTY: Final = np.uint64(0)
_ONE: Final = np.uint64(1)


def num_places(capacity: int) -> int:
    """Of a table of so many records. Three in seven stay empty, and one at least, where probes end."""
    return max(capacity + 1, capacity * 7 // 4)


@inline
def home_of(index: Uint32s, key: Any, secret: int) -> np.uint64:
    """The place that a probe starts at."""
    return ((keyed_hash(key, secret) >> _HALF) * np.uint64(index.size)) >> _HALF


@inline
def _after(index: Uint32s, place: np.uint64) -> np.uint64:
    return place + _ONE if place + _ONE < np.uint64(index.size) else _EMPTY


@inline
def _entry(number: np.uint64, distance: np.uint64, bits: np.uint64) -> np.uint32:
    """``number``: of the record, plus 1."""
    return np.uint32((min(distance, (_ONE << (_HALF - bits)) - _ONE) << bits) | number)


@inline
def fetch_places(index: Uint32s, key: Any, secret: int) -> None:
    """Into the processor's caches, those that a probe for this key looks at: two, on the mean."""
    prefetch_item(index, home_of(index, key, secret))


@inline
def fetch_record(index: Uint32s, records: Records, key: Any, secret: int, bits: int) -> None:
    """Into the processor's caches, the record that a probe for this key, whose places are there, reads first."""
    entry = np.uint64(index[home_of(index, key, secret)])
    if entry != _EMPTY:
        prefetch_item(records, np.int64(entry & ((_ONE << np.uint64(bits)) - _ONE)) - np.int64(1))


@inline
def find(index: Uint32s, records: Records, key: Any, secret: int, bits: int) -> np.int64:
    """The key's record, or ABSENT."""
    shift = np.uint64(bits)
    mask, farthest = (_ONE << shift) - _ONE, (_ONE << (_HALF - shift)) - _ONE
    place, distance = home_of(index, key, secret), _EMPTY
    while True:
        entry = np.uint64(index[place])
        if entry == _EMPTY:
            return np.int64(ABSENT)
        if entry >> shift == min(distance, farthest):
            record = np.int64(entry & mask) - np.int64(1)
            if records[record]["key"] == key:
                return record
        distance += _ONE
        place = _after(index, place)


@inline
def insert(index: Uint32s, key: Any, record: Any, secret: int, bits: int, first: int, end: int) -> bool:
    """Enter a record with a key that is not in the table. False, and nothing done, if it would go to ``end`` or behind.
    ``first``: the first home there is; places before it lie behind the last."""
    size = np.uint64(index.size)
    home = home_of(index, key, secret)
    home += size if home < np.uint64(first) else _EMPTY
    place = home
    while index[place - size if place >= size else place] != 0:
        place += _ONE
    if place >= np.uint64(end):
        return False
    index[place - size if place >= size else place] = _entry(np.uint64(record) + _ONE, place - home, np.uint64(bits))
    return True


@inline
def erase(index: Uint32s, records: Records, key: Any, record: Any, secret: int, bits: int) -> None:
    """Take a record with this key out, and close the gap behind it."""
    size, shift, number = np.uint64(index.size), np.uint64(bits), np.uint64(record) + _ONE
    mask, farthest = (_ONE << shift) - _ONE, (_ONE << (_HALF - shift)) - _ONE
    hole = home_of(index, key, secret)
    while np.uint64(index[hole]) & mask != number:
        hole = _after(index, hole)
    place, gap = hole, _EMPTY  # from the hole to the place
    while True:
        place, gap = _after(index, place), gap + _ONE
        entry = np.uint64(index[place])
        if entry == _EMPTY:
            break
        distance = entry >> shift
        if distance == farthest:
            home = home_of(index, records[np.int64(entry & mask) - np.int64(1)]["key"], secret)
            distance = place - home if place >= home else place + size - home
        if distance >= gap:  # its home does not lie behind the hole
            index[hole] = _entry(entry & mask, distance - gap, shift)
            hole, gap = place, _EMPTY
    index[hole] = np.uint32(0)
