"""The hash table from key to record number, for caches and for dynamic ids: open addressing, linear probing, deletion
by backward shift; 7 bytes a record.

A place is one uint32: record + 1 in its lower ``bits``; above them, in up to 4 bits, how far it lies behind its home,
the largest number standing for all above; in what is left a tag, bits of the key's hash. 0 is empty. So a probe reads
hardly a key but the one it looks for, and a deletion hardly any. Records are a structured array with a field "key".

Sources: range reduction, D. Lemire, Fast random integer generation in an interval (2019); backward shift, D. Knuth, The
Art of Computer Programming, vol. 3, section 6.4, algorithm R; tags, M. Kulukundis, CppCon 2017.
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
FAR, NEAR = 32, 16  # keys ahead, for ``fetch_places``, ``candidate``: time for a read from memory to arrive
_HALF: Final = np.uint64(32)
_EMPTY: Final = np.uint64(0)
_ONE: Final = np.uint64(1)
_DISTANCE_BITS: Final = np.uint64(4)
_REACH: Final = np.uint64(6)  # most probes reach no farther than so many places


def num_places(capacity: int) -> int:
    """Of a table of so many records. Three in seven stay empty, and one at least, where probes end."""
    return max(capacity + 1, capacity * 7 // 4)


@inline
def home_of(index: Uint32s, hashed: np.uint64) -> np.uint64:
    """The place that a probe starts at for a key of this hash, ``keyed_hash``."""
    return ((hashed >> _HALF) * np.uint64(index.size)) >> _HALF


@inline
def _after(index: Uint32s, place: np.uint64) -> np.uint64:
    return place + _ONE if place + _ONE < np.uint64(index.size) else _EMPTY


@inline
def _fields(hashed: np.uint64, shift: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Of a place, the mask of the number; and what lies above that: the mask of the distance, the tag of this hash."""
    above = _HALF - shift
    mask, farthest = (_ONE << shift) - _ONE, (_ONE << min(above, _DISTANCE_BITS)) - _ONE
    return mask, farthest, hashed & ~farthest & ((_ONE << above) - _ONE)


@inline
def fetch_places(index: Uint32s, hashed: np.uint64) -> None:
    """Into the processor's caches, those that a probe for a key of this hash looks at: two, on the mean."""
    prefetch_item(index, home_of(index, hashed))
    prefetch_item(index, min(home_of(index, hashed) + _REACH, np.uint64(index.size) - _ONE))


@inline
def candidate(index: Uint32s, records: Records, hashed: np.uint64, bits: int, passed: np.uint64) -> Any:
    """The record at the next place that may be the key's, of this hash, when a probe has passed so many places; ABSENT
    where it ends. And how many it has passed then. The record is fetched into the processor's caches."""
    shift, size = np.uint64(bits), np.uint64(index.size)
    mask, farthest, tag = _fields(hashed, shift)
    home = home_of(index, hashed)
    while True:
        place = home + passed
        entry = np.uint64(index[place - size if place >= size else place])
        if (entry == _EMPTY) | (entry >> shift == tag | min(passed, farthest)):  # one jump: few are foretold
            record = np.int64(entry & mask) - np.int64(1)
            prefetch_item(records, max(record, 0))
            return record, passed + _ONE
        passed += _ONE


@inline
def find(index: Uint32s, records: Records, key: Any, hashed: np.uint64, bits: int) -> Any:
    """The record of a key with this hash, or ABSENT."""
    record, passed = candidate(index, records, hashed, bits, _EMPTY)
    while record >= 0 and records[record]["key"] != key:
        record, passed = candidate(index, records, hashed, bits, passed)
    return record


@inline
def insert(index: Uint32s, hashed: np.uint64, record: Any, bits: int, first: int, end: int) -> bool:
    """Enter a record with a key of this hash that is not in the table. False, and nothing done, if it would go to
    ``end`` or behind. ``first``: the first home there is; places before it lie behind the last."""
    size, shift = np.uint64(index.size), np.uint64(bits)
    home = home_of(index, hashed)
    home += size if home < np.uint64(first) else _EMPTY
    place = home
    while index[place - size if place >= size else place] != 0:
        place += _ONE
    if place >= np.uint64(end):
        return False
    _, farthest, tag = _fields(hashed, shift)
    entry = (tag | min(place - home, farthest)) << shift | np.uint64(record) + _ONE
    index[place - size if place >= size else place] = np.uint32(entry)
    return True


@inline
def erase(index: Uint32s, records: Records, hashed: np.uint64, record: Any, bits: int, secret: int) -> None:
    """Take a record with a key of this hash out, and close the gap behind it."""
    size, shift, number = np.uint64(index.size), np.uint64(bits), np.uint64(record) + _ONE
    mask, farthest, _ = _fields(hashed, shift)
    hole = home_of(index, hashed)
    while np.uint64(index[hole]) & mask != number:
        hole = _after(index, hole)
    place, gap = hole, _EMPTY  # from the hole to the place
    while True:
        place, gap = _after(index, place), gap + _ONE
        entry = np.uint64(index[place])
        if entry == _EMPTY:
            break
        distance = entry >> shift & farthest
        if distance == farthest:
            home = home_of(index, keyed_hash(records[np.int64(entry & mask) - np.int64(1)]["key"], secret))
            distance = place - home if place >= home else place + size - home
        if distance >= gap:  # its home does not lie behind the hole
            index[hole] = np.uint32(entry & ~(farthest << shift) | min(distance - gap, farthest) << shift)
            hole, gap = place, _EMPTY
    index[hole] = np.uint32(0)
