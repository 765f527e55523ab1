"""The tail of the log: the segments that a later tree has and a map of its rows does not know, and the rows in them.

A reader reads the tail's indexes; the map stays as it is until the later tree is shown (``RowMap.advance``). So to
follow a writer costs what was written, whatever the tables hold.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import KEY_ROW_BITS, RowLayout
from .places import Places, Segments, TableArrays, can_be_stored, is_dropped, is_known, place_type
from .row_map import RowMap, require_entered, take_slots
from .segments import KEYS, Geometry, Stored, read_indexes, rows_listed
from .snapshot import Tree


@kernel
def _list_rows(
    words: Words, indexes: Int64s, slots: Int64s, last: int, geo: Geometry, tables: TableArrays, newest: Int64s,
    held: Int32s, keys: Int64s, places: Places, epochs: Int64s,
) -> tuple[int, int, int]:  # fmt: skip
    """List the rows of stored segments, in their order.

    Args:
        indexes: word offset of each one's index, which was checked.
        last: rows of later epochs are left out.
        newest, held: by slot; rows of unknown tables are counted as held.

    Returns:
        -1 or the position of a segment that holds what cannot be; how many rows are listed; rows of unknown tables.
    """
    count, unknown = 0, 0
    for s in range(len(indexes)):
        at = indexes[s]
        slot = slots[s]
        num, is_mixed = rows_listed(words, at)
        for i in range(num):
            key = np.int64(words[at + KEYS + i])
            if not can_be_stored(key, geo.layout_id, tables):
                return s, count, unknown
            epoch = np.int64(words[at + KEYS + num + i]) if is_mixed else newest[slot]
            if epoch > last:
                continue
            if not is_known(key >> KEY_ROW_BITS, tables):
                if not is_dropped(key >> KEY_ROW_BITS, tables):
                    held[slot] += 1
                    unknown += 1
                continue
            keys[count] = key
            places[count] = slot << geo.place_bits | i
            epochs[count] = epoch
            count += 1
    return -1, count, unknown


class TailRows(NamedTuple):
    """Rows of one layout."""

    keys: Int64s  # int64 [n], ascending, distinct
    places: Places  # [n], of the type of the map's or wider


class Tail:
    """What a later tree has beyond a map; also where the later tree has any row of the map's tables.

    Attributes:
        base: the map.
        layouts, unknown, later: as ``RowMap``'s.
        segments: by layout, with the new ones, and without those that are gone.
        rows: by layout: those in new segments, where they are.
        changed: int64 [n], ascending: keys of the rows that are others than the map shows.
    """

    def __init__(self, base: RowMap, segments: Mapping[RowLayout, Segments]) -> None:
        self.base = base
        self.layouts = base.layouts
        self.segments = segments
        self.unknown = base.unknown
        self.later = base.later
        self.rows: dict[RowLayout, TailRows] = {}
        self.changed: Int64s = np.empty(0, np.int64)

    @classmethod
    def read(
        cls, base: RowMap, segments: Mapping[RowLayout, Segments], tree: Tree, stored: Stored, *,
        shown: int, last: int, oldest: int,
    ) -> "Tail | None":  # fmt: skip
        """Read the indexes that are new in a tree.

        Args:
            base: of version ``shown``.
            segments: the map's, or a copy of them; they are changed.
            stored: the segments of the tree.
            last: the version that the tree shows.
            oldest: transaction of the oldest tree that is in use.

        Returns:
            None if a segment that shows rows is gone, or of a later version, and has no successor: versions were
            rolled back, and a new map is to be made.

        Raises:
            DamagedError: a segment is damaged, or holds what cannot be a row of its tables.
        """
        tail = cls(base, segments)
        numbers, is_new = np.ascontiguousarray(stored["number"]), np.ones(len(stored), np.bool_)
        gone = {}
        for layout, own in segments.items():
            own.reuse(oldest)
            slots = own.in_use
            is_there = _strike(is_new, numbers, own.arrays.numbers[slots])
            gone[layout] = slots[~is_there | (own.arrays.oldest[slots] > last)]
        later = base.later[_strike(is_new, numbers, base.later["number"])]
        tail._enter(tree, np.concatenate([later, read_indexes(tree, stored[is_new])]), shown, last)
        for layout, slots in gone.items():
            own = segments[layout]
            if own.arrays.live[slots].any():
                return None
            own.free(slots, tree.txn_id)
            own.dead = np.empty(0, np.int64)
        return tail

    def _enter(self, tree: Tree, came: Stored, shown: int, last: int) -> None:
        layout_ids, is_shown = self.base.layout_ids(came), came["oldest"] <= last
        self.later = came[~is_shown]
        self.unknown += int(came["rows"][(layout_ids < 0) & is_shown].sum())
        changed = [self.changed]
        for layout, segments in self.segments.items():
            own = came[(layout_ids == segments.geo.layout_id) & is_shown]
            own = own[np.lexsort((own["number"], own["newest"]))]
            self.rows[layout], others = self._enter_own(tree, layout, own, shown, last)
            changed.append(others)
        self.changed = np.sort(np.concatenate(changed))

    def _enter_own(
        self, tree: Tree, layout: RowLayout, stored: Stored, shown: int, last: int
    ) -> tuple[TailRows, Int64s]:
        """The rows of segments in ascending order of (newest epoch, number), and the keys of those that are others.

        A row of an epoch up to ``shown`` was only moved, unless it was in a segment of later epochs: then ``shown`` was
        rolled back.
        """
        segments = self.segments[layout]
        keys, places, epochs = self._listed(tree, segments, stored, last)
        order = np.argsort(keys, kind="stable")
        is_newest = np.ones(len(order), np.bool_)
        is_newest[:-1] = keys[order[1:]] != keys[order[:-1]]
        order = order[is_newest]
        found, epochs = TailRows(keys[order], places[order]), epochs[order]
        bits, arrays = segments.geo.place_bits, segments.arrays
        before = (self.base.places[self.base.positions(layout, found.keys)] >> bits).astype(np.int64)
        is_stored = before != 0
        np.add.at(arrays.live, found.places >> bits, 1)
        np.subtract.at(arrays.live, before[is_stored], 1)
        segments.rows -= len(keys) - int(np.count_nonzero(~is_stored))
        is_other = (epochs > shown) | ~is_stored | (epochs < arrays.oldest[before])
        return found, found.keys[is_other]

    def _listed(self, tree: Tree, segments: Segments, stored: Stored, last: int) -> tuple[Int64s, Places, Int64s]:
        """Keys, places and epochs of all rows of segments, which take slots."""
        slots, at = take_slots(tree, segments, stored)
        num = int(stored["rows"].sum())
        dtype = place_type(segments.geo, slots.tolist(), self.base.places.dtype)
        keys, places, epochs = np.empty(num, np.int64), np.empty(num, dtype), np.empty(num, np.int64)
        file_map = tree.file_map.rows
        since = file_map.guard.begin()
        bad, count, unknown = _list_rows(
            file_map.words, at, slots, last, segments.geo, self.base.tables, segments.arrays.newest,
            segments.arrays.held, keys, places, epochs,
        )  # fmt: skip
        require_entered(tree, segments, stored, since, bad)
        self.unknown += unknown
        return keys[:count], places[:count], epochs[:count]

    def find(self, layout: RowLayout, keys: Int64s) -> tuple[Int64s, Places]:
        own = self.rows[layout]
        places = self.base.places[self.base.positions(layout, keys)]
        places = places.astype(np.promote_types(places.dtype, own.places.dtype), copy=False)
        at = np.searchsorted(own.keys, keys)
        is_own = _are_at(own.keys, at, keys)
        places[is_own] = own.places[at[is_own]]
        return np.arange(len(keys)), places


RowPlaces = RowMap | Tail


def _are_at(listed: Int64s | Words, at: Int64s, wanted: Int64s | Words) -> Bools:
    """Which of the wanted ``listed`` has at the positions where they belong."""
    are: Bools = at < len(listed)
    are[are] = listed[at[are]] == wanted[are]
    return are


def _strike(is_left: Bools, listed: Words, wanted: Words) -> Bools:
    """Which of the wanted ``listed``, ascending, has; those are not left."""
    at = np.searchsorted(listed, wanted)
    are = _are_at(listed, at, wanted)
    is_left[at[are]] = False
    return are
