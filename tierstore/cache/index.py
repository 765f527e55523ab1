"""Key -> slot hash index: open addressing, linear probing, deletion by backward shift, 12 bytes per cached row.

An entry is one uint64, ``fingerprint << 32 | slot + 1``; 0 is an empty place. The fingerprint, 32 bits of the mixed
key, also decides the entry's home place, so deletion moves entries without looking at their keys, and a probe reads a
slot's key only where the fingerprints agree. The table has half as many places again as the cache has slots, so at
least a third are empty and every probe ends. The array's last word is the secret of ``kernels.hashing``, by which keys
are mixed.

Sources: range reduction, D. Lemire, Fast random integer generation in an interval (2019); backward shift, D. Knuth, The
Art of Computer Programming, vol. 3, section 6.4, algorithm R.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.hashing import half_mixed
from ..kernels.jit import prefetch_item
from ..kernels.jit import uncounted_inline as inline

SlotRecords = NDArray[Any]

SLOT_DTYPE: Final = np.dtype(
    [
        ("key", np.int64),
        ("previous", np.int32),
        ("next", np.int32),
        ("stamp", np.int32),
        ("number", np.int32),
        ("pins", np.int32),
        ("flags", np.int16),
        ("rank", np.int16),
    ]
)
"""All a hit needs to know of a slot, in half a cache line. ``previous``, ``next`` and ``rank`` are the policy's;
``stamp`` and ``number`` are the admission that last resolved the slot and the row's unique number in it."""

ABSENT: Final = -1

_FAR: Final = 32
_NEAR: Final = 16
"""Keys ahead, for ``index_prefetch``: time enough for a read from memory to arrive, and few enough to stay in cache."""

_HALF: Final = np.uint64(32)
_SLOT_MASK: Final = np.uint64(0xFFFFFFFF)
_EMPTY: Final = np.uint64(0)
_ONE: Final = np.uint64(1)


def index_places(capacity: int) -> int:
    """Words of the index of a cache of ``capacity`` slots."""
    return capacity + (capacity + 1) // 2 + 2


@inline
def home_of(fingerprint: np.uint64, places: np.uint64) -> np.uint64:
    """The place a probe starts at; ``places`` is uint64."""
    return (fingerprint * places) >> _HALF


@inline
def _fingerprint(index: Words, key: Any) -> np.uint64:
    """uint64 below 2**32."""
    return half_mixed(np.uint64(key) ^ index[np.uint64(index.size - 1)]) >> _HALF


@inline
def index_find(index: Words, slots: SlotRecords, key: Any) -> np.int64:
    """The key's slot (int64), or ABSENT."""
    places = np.uint64(index.size - 1)
    fingerprint = _fingerprint(index, key)
    place = home_of(fingerprint, places)
    for _ in range(index.size):
        entry = index[place]
        if entry == _EMPTY:
            break
        if entry >> _HALF == fingerprint:
            slot = np.int64(entry & _SLOT_MASK) - np.int64(1)
            if slots[slot]["key"] == key:
                return slot
        place += _ONE
        if place == places:
            place = _EMPTY
    return np.int64(ABSENT)


@inline
def place_in(order: Int32s, number: Any) -> Any:
    """uint64: the position that comes ``number``-th in an order, of which an empty one is that of positions."""
    return np.uint64(order[number]) if order.size else np.uint64(number)


@inline
def index_prefetch(index: Words, slots: SlotRecords, keys: Int64s, order: Int32s, number: Any) -> None:
    """Prefetch for the ``index_find`` of the key that comes ``number``-th in ``order``: the first place of a key
    further on, and the slot of a nearer one.

    Each find needs two dependent reads that usually miss the CPU caches; prefetching overlaps them.
    """
    places = np.uint64(index.size - 1)
    if number + _FAR < keys.size:
        prefetch_item(index, home_of(_fingerprint(index, keys[place_in(order, number + _FAR)]), places))
        entry = index[home_of(_fingerprint(index, keys[place_in(order, number + _NEAR)]), places)]
        if entry != _EMPTY:
            prefetch_item(slots, np.int64(entry & _SLOT_MASK) - np.int64(1))


@inline
def _place_of(index: Words, fingerprint: np.uint64, wanted: np.uint64) -> np.uint64:
    """The first place from the home on that has the wanted entry, of which there is one."""
    places = np.uint64(index.size - 1)
    place = home_of(fingerprint, places)
    for _ in range(index.size):
        if index[place] == wanted:
            break
        place += _ONE
        if place == places:
            place = _EMPTY
    return place


@inline
def index_insert(index: Words, key: Any, slot: Any) -> None:
    """Enter a key that is not in the index."""
    fingerprint = _fingerprint(index, key)
    index[_place_of(index, fingerprint, _EMPTY)] = (fingerprint << _HALF) | (np.uint64(slot) + _ONE)


@inline
def index_erase(index: Words, key: Any, slot: Any) -> None:
    """Remove the entry of a resident slot, and close the gap behind it."""
    places, fingerprint = np.uint64(index.size - 1), _fingerprint(index, key)
    hole = _place_of(index, fingerprint, (fingerprint << _HALF) | (np.uint64(slot) + _ONE))
    place = hole
    for _ in range(index.size):
        place += _ONE
        if place == places:
            place = _EMPTY
        entry = index[place]
        if entry == _EMPTY:
            break
        home = home_of(entry >> _HALF, places)
        from_home = place - home if place >= home else place + places - home
        from_hole = place - hole if place >= hole else place + places - hole
        if from_home >= from_hole:
            index[hole] = entry
            hole = place
    index[hole] = _EMPTY
