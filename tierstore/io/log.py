"""The log of one row file, for its one writer: rows appended, segments cleaned and deleted, each in one transaction.

After a transaction the map of rows and what readers are shown follow it; after an error, by ``Writer.catch_up``.

**Cleaning.** Live rows of the emptiest segments are moved together, so that the segments can be deleted. Each write may
clean a little, as long as the segments take more pages than ``slack`` times those that their rows need: it moves rows
of ``1 / (slack - 1)`` pages for each page that it appends, which keeps the slack. Victims are the segments with the
fewest live rows a page, of a sample where there are many: greedy cleaning (Rosenblum and Ousterhout, "The Design and
Implementation of a Log-Structured File System", 1992). The rows go to segments of their own, so that long-lived ones
come to lie together. Their pages are prefetched a turn before they are needed.

Only live rows are moved. A segment with rows that a kept version needs stays until that version is dropped, and counts
as fuller. Rows written between different kept versions are not put together (``row_map.py``).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import lmdb
import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Bools, Int64s, Words
from ..kernels.jit import kernel
from ..layout import PAGE_HEADER_WORDS
from ..system.killpoints import reach
from ..system.oserrors import RESTORE
from .mapped import queue_parts
from .places import Segments
from .reads import KeyedRows, RowReader
from .records import LOG_ITEM, STORE_ITEM, LogRecord, item_key, pack_store, pack_words, read_log, segment_key
from .row_file import OpenFile, SuperblockWriter
from .row_map import RowMap
from .segments import (
    NEWEST,
    OLDEST,
    STORED,
    Stored,
    build_segment,
    byte_ranges,
    numbers_hash,
    page_header_status,
    segment_error,
)
from .snapshot import Snapshot

_LOG: Final = logging.getLogger("tierstore")

DEFAULT_SLACK: Final = 1.4
MOST_SAMPLED: Final = 4096  # segments that are looked at for victims
FULL_SHARE: Final = 0.95  # segments with more of the rows that would fill them are not moved
_PAGES_A_PAGE: Final = 4  # pages that are freed for one that was appended, at most, while the slack is exceeded
_WHOLE_FROM: Final = 4  # segments' worth of rows that are moved together, from which on only whole segments are
_CLEANED_PAGES: Final = 128
"""In a transaction that only cleans, victims are chosen as if so many pages had been appended before."""
_DELETED_PAGES: Final = 2048
"""Of the segments that a transaction deletes, about: LMDB lists them in a value of a few pages."""
_DROPPED_TOGETHER: Final = 512
_LIFE: Final = 1 << 32
"""Each process that writes begins at the next multiple: no number that one gave away and lost is given again."""

Dead = list[tuple[Segments, Int64s]]  # slots of segments, by layout


class Log:
    """The caller sees to it that one thread at a time is in here. ``transaction``: makes a write transaction, which
    puts at most so many bytes. ``add_counts``: adds to totals of ``ColdCounters``."""

    def __init__(
        self, file: OpenFile, superblocks: SuperblockWriter, slack: float,
        transaction: "Callable[[int], AbstractContextManager[lmdb.Transaction[bytes]]]",
        add_counts: Callable[..., None],
    ) -> None:  # fmt: skip
        self._add_counts = add_counts
        self._file = file
        self._superblocks = superblocks
        self._cleaner = Cleaner(slack)
        self._transaction = transaction
        self._record = file.logged
        self._appended = 0
        self._is_numbered = False  # whether this process has numbers of segments of its own

    @contextmanager
    def _changing(self, dead: Dead, size_bytes: int = 0) -> "Iterator[lmdb.Transaction[bytes]]":
        """A transaction that deletes these segments, after ``require_headers``, and changes the log. LMDB's way to what
        is appended is read before: a page that LMDB cannot read ends the process."""
        self._file.snapshot.seek(np.zeros(1, np.uint64), np.array([self._record.next_number], np.uint64))
        with self._transaction(size_bytes) as txn:
            for segments, slots in dead:
                self._delete(txn, segments.stored(slots))
            yield txn
            txn.put(item_key(LOG_ITEM), pack_words(*self._record))

    def catch_up(self, snapshot: Snapshot) -> None:
        """Count what the newest tree has. Numbers that were given to segments are not given again in any case."""
        found = read_log(snapshot)
        self._record = found._replace(next_number=max(found.next_number, self._record.next_number))

    def _put(self, txn: "lmdb.Transaction[bytes]", segments: Segments, new: KeyedRows) -> Stored:
        """Put rows, in their order, as segments; ``_find_pages`` tells where they are once they are committed."""
        layout, geo, first = segments.layout, segments.geo, self._record.next_number
        per_segment, weights, state = geo.rows_per_segment, new.weights.reshape(-1), new.state.reshape(-1)
        most = layout.segment_pages(min(per_segment, len(new.keys)), is_mixed=True)
        image = np.empty(most * geo.page_words, np.uint64)
        parts: list[tuple[int, ...]] = []
        for start in range(0, len(new.keys), per_segment):
            part = slice(start, start + per_segment)
            epochs = new.epochs[part] if len(new.epochs) > 1 else new.epochs
            if len(epochs) > 1 and (epochs == epochs[0]).all():
                epochs = epochs[:1]
            keys, number = new.keys[part], first + len(parts)
            pages = layout.segment_pages(len(keys), is_mixed=len(epochs) > 1)
            value = image[: pages * geo.page_words - PAGE_HEADER_WORDS]
            build_segment(geo, number, epochs, keys, new.slots[part], weights, state, value)
            txn.put(segment_key(number), value.data, dupdata=False)
            parts.append((number, 0, pages, len(keys), int(value[NEWEST]), int(value[OLDEST]), int(keys[0])))
        stored = np.array(parts, STORED)
        self._count(stored, 1)
        return stored

    def _delete(self, txn: "lmdb.Transaction[bytes]", stored: Stored) -> None:
        for number in stored["number"].tolist():
            if not txn.delete(segment_key(number)):
                raise DamagedError(f"{self._file.path}: its tree has lost segment {number}. {RESTORE}")
        self._count(stored, -1)

    def _count(self, stored: Stored, sign: int) -> None:
        record = self._record
        self._record = LogRecord(
            next_number=max(record.next_number, int(stored["number"].max(initial=np.uint64(0))) + 1),
            num_segments=record.num_segments + sign * len(stored),
            hash=(record.hash + sign * int(numbers_hash(stored))) % 2**64,
        )

    def append(self, rows: RowMap, segments: Segments, new: KeyedRows | None, kept: tuple[int, ...]) -> None:
        """Append rows of one layout and one epoch, or none, and clean a little. ``kept``: versions, ascending; the last
        one is current."""
        self._take_numbers()
        layout, current, before = segments.layout, kept[-1] if kept else 0, self._file.snapshot
        moved = self._cleaner.collect(before, rows, segments, kept)
        dead = _some_dead(rows, before)
        segments.reuse(self._file.oldest_shown())
        counts = [len(each.keys) for each in (moved, new) if each is not None]
        rows.make_room(layout, counts)
        moved_to = put = np.empty(0, STORED)
        most = sum(layout.pages_for(count, is_mixed=True) for count in counts)
        with self._changing(dead, most * before.page_bytes) as txn:
            if moved is not None:
                moved_to = self._put(txn, segments, moved)
                reach("cleaning: rows put")
            if new is not None:
                put = self._put(txn, segments, new)
            reach("write-back: segments put")
        reach("write-back: transaction committed")
        pages, pages_moved, freed = int(put["pages"].sum()), int(moved_to["pages"].sum()), _pages_freed(dead)
        with self._file.following() as snapshot:
            for its_segments, slots in dead:
                its_segments.delete(slots, snapshot.txn_id)
            if moved is not None:  # first: a row may be moved, and newer in what is new
                _find_pages(snapshot, moved_to)
                rows.publish(layout, moved_to, moved.keys, current=current, txn_id=snapshot.txn_id, is_moved=True)
                reach("cleaning: rows published")
            if new is not None:
                _find_pages(snapshot, put)
                rows.publish(layout, put, new.keys, current=current, txn_id=snapshot.txn_id)
        reach("write-back: segments published")
        self._wrote(rows, max(pages + pages_moved, freed))
        self._appended += pages
        self._add_counts(bytes_written=pages * snapshot.page_bytes)
        if moved is not None:
            bytes_moved = pages_moved * snapshot.page_bytes
            self._add_counts(rows_moved=len(moved.keys), pages_moved=moved.pages, bytes_moved=bytes_moved)
        if new is not None:
            self._cleaner.plan(snapshot, segments, kept, pages)

    def clean(self, rows: RowMap, kept: tuple[int, ...]) -> bool:
        """Clean a little, arguments as for ``append``; False if there is nothing to clean."""
        for segments in rows.segments.values():
            if self._cleaner.plan(self._file.snapshot, segments, kept, _CLEANED_PAGES):
                self.append(rows, segments, None, kept)
                return True
        return False

    def take_turns(self, rows: RowMap) -> int:
        """How often to ``clean`` and ``delete_dead``, at most, for what was appended since the last call and what is
        dead by now: while others write there is always more."""
        dead = sum(segments.dead_pages for segments in rows.segments.values())
        turns, self._appended = 2 + self._appended // _CLEANED_PAGES + dead // _DELETED_PAGES, 0
        return turns

    def _wrote(self, rows: RowMap, pages: int) -> None:
        page_bytes, live = self._file.page_bytes, sum(segments.pages for segments in rows.segments.values())
        self._superblocks.wrote(pages * page_bytes, live * page_bytes)

    def _take_numbers(self) -> None:
        """Begin where no process before has numbered segments, and see that none after will."""
        if self._is_numbered:
            return
        self._file.snapshot.file_map.locks.require_in_place()  # a superblock is to be set next to it
        record = self._record._replace(next_number=(self._record.next_number // _LIFE + 1) * _LIFE)
        with self._transaction(0) as txn:
            txn.put(item_key(LOG_ITEM), pack_words(*record))
            txn.put(item_key(STORE_ITEM), pack_store(self._file.store_id))  # the file may have been an older release's
        self._record = record
        reach("log: numbers taken")
        self._file.follow(self._file.new_snapshot())
        self._superblocks.set()
        self._is_numbered = True

    def delete_dead(self, rows: RowMap) -> bool:
        """Delete some of the segments whose rows nobody needs; False if there are none."""
        dead = _some_dead(rows, self._file.snapshot)
        if not dead:
            return False
        with self._changing(dead):
            reach("prune: segments deleted")
        reach("prune: transaction committed")
        freed = _pages_freed(dead)
        with self._file.following() as snapshot:
            for segments, slots in dead:
                segments.delete(slots, snapshot.txn_id)
        self._wrote(rows, freed)
        return True

    def drop(self, stored: Stored) -> None:
        for start in range(0, len(stored), _DROPPED_TOGETHER):
            part = stored[start : start + _DROPPED_TOGETHER]
            require_headers(self._file.snapshot, part)
            with self._changing([]) as txn:
                self._delete(txn, part)
                reach("rollback: segments deleted")
            self._file.follow(self._file.new_snapshot())


def _some_dead(rows: RowMap, snapshot: Snapshot) -> Dead:
    """Some segments that are to be deleted, by layout. One that is damaged stays, until the file is opened again."""
    found, room = [], _DELETED_PAGES
    for segments in rows.segments.values():
        if room > 0 and len(slots := segments.next_dead(room)):
            sound = slots[_sound_headers(snapshot, segments.stored(slots))]
            if len(sound) < len(slots):
                segments.spare(slots, sound)
            if len(sound):
                found.append((segments, sound))
            room -= int(segments.arrays.pages[sound].sum())
    return found


def _pages_freed(dead: Dead) -> int:
    """Pages that deleting these segments takes out of use: their own, and for each a leaf of the tree, copied."""
    return sum(int(segments.arrays.pages[slots].sum()) + len(slots) for segments, slots in dead)


def _sound_headers(snapshot: Snapshot, stored: Stored) -> Bools:
    try:
        require_headers(snapshot, stored)
    except DamagedError as error:
        if len(stored) > 1:
            return np.concatenate([_sound_headers(snapshot, stored[at : at + 1]) for at in range(len(stored))])
        _LOG.warning("a segment that nobody needs is damaged, and stays (%s)", error)
        return np.zeros(1, np.bool_)
    return np.ones(len(stored), np.bool_)


def _find_pages(snapshot: Snapshot, put: Stored) -> None:
    """Fill in where segments are, in the tree of the transaction that put them, or a later one."""
    put["first_page"] = snapshot.seek(np.zeros(len(put), np.uint64), put["number"].copy())["page"]
    if not put["first_page"].all():
        raise DamagedError(f"{snapshot.path}: a segment that was just written is not in its tree. {RESTORE}")


def require_headers(snapshot: Snapshot, stored: Stored) -> None:
    """Look at LMDB's way to segments, and at the page headers that it is going to believe when it deletes them.
    DamagedError: a page header is not that of such a segment, or something cannot be read."""
    snapshot.seek(np.zeros(len(stored), np.uint64), stored["number"].copy())
    file_map, page_bytes = snapshot.file_map.rows, snapshot.page_bytes
    starts, _ = byte_ranges(stored, page_bytes)
    stops = starts + PAGE_HEADER_WORDS * 8
    queue_parts(file_map.address, starts, stops)
    since = file_map.guard.begin()
    status, at = _check_headers(file_map.words, page_bytes // 8, snapshot.limit_pages(), stored)
    file_map.guard.require(since, starts, stops)
    if status:
        raise segment_error(snapshot, int(stored["number"][at]), status)


@kernel
def _check_headers(words: Words, page_words: int, limit: int, stored: Stored) -> tuple[int, int]:
    for i in range(len(stored)):
        status = page_header_status(words, page_words, limit, stored[i]["first_page"], stored[i]["pages"])
        if status != 0:
            return status, i
    return 0, 0


class Cleaner:
    """Chooses what to clean next, a turn ahead."""

    def __init__(self, slack: float) -> None:
        self.slack: Final = slack
        self._reader = RowReader(verify=True)  # rows that are moved are verified
        self._plans: dict[int, tuple[Int64s, Words]] = {}  # slots and numbers of the victims, by layout
        self._random = np.random.default_rng(0)
        self._spoiled: set[int] = set()  # segments that cannot be moved, and are not chosen again

    def collect(self, snapshot: Snapshot, rows: RowMap, segments: Segments, kept: tuple[int, ...]) -> KeyedRows | None:
        """The live rows of what ``plan`` chose, as far as they can still be cleaned, segment by segment, to be appended
        again; None if there are none. If they fill several segments, the part of one waits for another turn: LMDB
        reuses pages best where sizes are equal."""
        planned, arrays = self._plans.pop(segments.geo.layout_id, None), segments.arrays
        if planned is None:
            return None
        is_there = planned[0] < len(arrays.numbers)  # not so after a rollback, maybe
        slots, numbers = planned[0][is_there], planned[1][is_there]
        slots = slots[(arrays.numbers[slots] == numbers) & (arrays.rows[slots] > 0) & (arrays.live[slots] > 0)]
        intervals = _intervals(segments, slots, kept)
        victims = slots[intervals == intervals[:1]]
        try:
            return self._read(snapshot, rows, segments, victims)
        except DamagedError:
            sound = [slot for slot in victims.tolist() if self._is_sound(snapshot, rows, segments, slot)]
            return self._read(snapshot, rows, segments, np.array(sound, np.int64))

    def _is_sound(self, snapshot: Snapshot, rows: RowMap, segments: Segments, slot: int) -> bool:
        try:
            self._read(snapshot, rows, segments, np.array([slot]))
        except DamagedError as error:
            number = int(segments.arrays.numbers[slot])
            self._spoiled.add(number)
            _LOG.warning("segment %d is damaged, and stays as it is; run tierstore verify (%s)", number, error)
            return False
        return True

    def _read(self, snapshot: Snapshot, rows: RowMap, segments: Segments, victims: Int64s) -> KeyedRows | None:
        """The live rows of segments; None if there are none. DamagedError if one cannot be read."""
        keys, epochs = rows.live_rows(snapshot, segments.layout, victims)
        if not len(keys):
            return None
        if len(keys) >= _WHOLE_FROM * segments.geo.rows_per_segment:
            count = len(keys) - len(keys) % segments.geo.rows_per_segment
            keys, epochs = keys[:count], epochs[:count]
        return self._reader.stored(snapshot, rows, keys)._replace(epochs=epochs)

    def plan(self, snapshot: Snapshot, segments: Segments, kept: tuple[int, ...], appended: int) -> bool:
        """Choose victims for the next turn, after ``appended`` pages were written, and begin to read them; whether
        there are any."""
        layout, arrays = segments.layout, segments.arrays
        pages_a_row = layout.stored_row_bytes / layout.page_bytes
        of_all = segments.pages - segments.dead_pages - self.slack * segments.rows * pages_a_row
        if of_all <= 0:
            return False
        num_slots = len(arrays.rows)
        is_few = num_slots <= MOST_SAMPLED
        slots = np.arange(num_slots) if is_few else np.unique(self._random.integers(0, num_slots, MOST_SAMPLED))
        scale = num_slots / max(1, len(slots))
        slots = slots[arrays.live[slots] > 0]
        needed = (arrays.live[slots] + arrays.held[slots]) * pages_a_row
        excess = min(of_all, (arrays.pages[slots].sum() - self.slack * needed.sum()) * scale)
        fill = needed / arrays.pages[slots]
        chosen = fill < FULL_SHARE
        if self._spoiled:
            chosen &= ~np.isin(arrays.numbers[slots], np.array(list(self._spoiled), np.uint64))
        slots, fill = slots[chosen], fill[chosen]
        if excess <= 0 or not len(slots):
            return False
        order = np.argsort(fill, kind="stable")
        slots, fill = slots[order], fill[order]
        intervals = _intervals(segments, slots, kept)
        _, firsts = np.unique(intervals, return_index=True)
        for first in np.sort(firsts).tolist():  # the interval of the emptiest segment first
            together = intervals == intervals[first]
            own = slots[together]
            freed = np.cumsum(arrays.pages[own] * (1 - fill[together]))
            moved = np.cumsum(arrays.live[own]) * pages_a_row
            enough = 1 + int(np.searchsorted(freed, min(excess, _PAGES_A_PAGE * appended)))
            victims = own[: max(1, min(enough, int(np.searchsorted(moved, appended / (self.slack - 1)))))]
            # Rows of several epochs take most pages. Few rows of a version may lie no closer together than apart.
            if arrays.pages[victims].sum() > layout.pages_for(int(arrays.live[victims].sum()), is_mixed=True):
                self._plans[segments.geo.layout_id] = victims, arrays.numbers[victims].copy()
                ranges = byte_ranges(segments.stored(victims), snapshot.page_bytes)
                queue_parts(snapshot.file_map.rows.address, *ranges)
                return True
        return False


def _intervals(segments: Segments, slots: Int64s, kept: tuple[int, ...]) -> Int64s:
    """A number for the kept versions between which the rows of a segment were written; one for each open epoch."""
    newest, current = segments.arrays.newest[slots], kept[-1] if kept else 0
    closed = np.searchsorted(np.array(kept, np.int64), newest)
    found: Int64s = np.where(newest <= current, closed, len(kept) + newest)
    return found
