"""The contract of a cold tier: rows below memory, written in transactions, read in batches, committed atomically.

A store asks nothing else of what its rows lie in. ``lmdb.py`` is on a device; ``memory.py`` is the trivial twin.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..layout import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES, RowLayout


class ColdCounters(NamedTuple):
    """Running totals since the tier was opened."""

    rows_read: int = 0
    """Rows asked for, absent ones included."""
    rows_absent: int = 0
    """Of those, rows that were never written."""
    pages_read: int = 0
    """Pages the rows lay on, each counted once per ``read`` call (they may have come from the page cache)."""
    pages_direct: int = 0
    """Of those, pages that were read past the page cache."""
    read_seconds: float = 0.0
    rows_written: int = 0
    bytes_written: int = 0
    """Of the pages that rows were appended in."""
    write_seconds: float = 0.0
    """Cleaning included."""
    rows_moved: int = 0
    """By cleaning: live rows of segments that were to be deleted."""
    pages_moved: int = 0
    """Pages that they were read from."""
    bytes_moved: int = 0
    """Of the pages that they were appended in."""


class VerifyReport(NamedTuple):
    """What was found sound.

    Attributes:
        tables: that have rows.
        segments: that were checked, and their ``bytes``: with rows of earlier versions, and rows that nobody needs.
        rows: that a read finds, each counted once.
    """

    tables: int
    segments: int
    rows: int
    bytes: int


class NewerVersion(Protocol):
    """A commit that a tier open for reading does not show yet. Valid until the tier looks for a newer one again."""

    @property
    def version(self) -> int: ...

    @property
    def payload(self) -> bytes:
        """See ``ColdTier.payload``."""

    @property
    def changed(self) -> Int64s:
        """int64 [n], ascending: keys of the rows that may be others than the tier shows; no other row is."""

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        """``ColdTier.read``, of this version."""

    def show(self) -> None:
        """Have the tier show it, in time that goes with ``changed``. Reads in progress finish where they are."""

    def close(self) -> None:
        """Give it up, unless it was shown. Again is fine."""


class ColdTier(Protocol):
    """Rows are addressed by key (``layout.KEY_ROW_BITS``). Thread-safe: any number of readers, one writer."""

    @property
    def page_bytes(self) -> int:
        """Of the pages that layouts are for."""

    def add_table(self, table_index: int, layout: RowLayout, num_rows: int) -> None:
        """Make a table known; nothing is written.

        Args:
            num_rows: 0 for one that was dropped: what is stored of it is deleted.

        Raises:
            ValueError: a table added before, numbers out of range, or a layout for another page size.
            BudgetError: the system refuses memory for the map of its rows.
        """

    def set_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        """Know these tables, by index, in place of those before; a table keeps its layout. BudgetError, nothing
        changed: as ``add_table``."""

    def stored_rows(self, table_index: int) -> Iterator[Int64s]:
        """Which rows of a table ``read`` finds, int64, ascending, in parts; those written meanwhile may be missing."""

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        """Copy row ``keys[i]`` into ``weights[slots[i]]`` and ``state[slots[i]]`` and set ``present[i]``.

        All keys' tables share one layout. A row never written leaves its slot as it is and ``present[i]`` False.
        Every row is verified against its checksum. Reads see every ``write`` that returned before.

        Raises:
            ValueError: keys of no row or of several layouts, or arrays of other types, widths or lengths.
            ChecksumError: names file, table and row; the slots' contents are then undefined.
        """

    def write(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, *, epoch: int) -> None:
        """Store ``weights[slots[i]]``, ``state[slots[i]]`` as row ``keys[i]`` (keys distinct, one layout), together and
        in this order.

        Visible to ``read`` on return; part of no version until ``commit``. All or nothing.

        Args:
            epoch: the first version that the rows are to be part of, above ``last_version``. A row written for an
                earlier epoch than before is that of the versions up to the later one, and not what ``read`` sees.

        Raises:
            ValueError: as for ``read``, and for a key given twice or an epoch committed before.
            DiskFullError: nothing of this call was stored; reads go on.
        """

    def commit(self, payload: bytes, version: int, *, keep: int = 1, dropped: Collection[int] = ()) -> None:
        """Make what was written for epochs up to ``version``, and ``payload``, the current version, atomically and
        durably. Others may go on writing for later epochs meanwhile.

        Args:
            version: its number, above ``last_version``.
            keep: how many of the last versions stay, this one included.
            dropped: versions before it that go at once, and do not count.
        """

    def rollback(self, version: int) -> None:
        """Make a kept version the current one; later versions, and what belongs to none, are dropped."""

    @property
    def version(self) -> int:
        """Number of the current version; 0 before the first commit."""

    @property
    def last_version(self) -> int:
        """The highest number that a version ever had."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the kept versions, ascending."""

    @property
    def payload(self) -> bytes:
        """What the current version was committed with; b"" before the first commit."""

    def find_newer(self) -> NewerVersion | None:
        """What a tier open for reading can move to; None if there is nothing newer. What an earlier call gave is
        closed."""

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every row that is stored, also for earlier versions and for none yet.

        Rows of tables that were not added are not counted. ``progress(done_bytes, total_bytes)``.

        Raises:
            DamagedError: names the file, the place and the way out.
        """

    def counters(self) -> ColdCounters: ...

    @property
    def held_bytes(self) -> int:
        """What the oldest reader keeps from being reused, as of the last commit; 0 unless open for writing."""
        ...

    @property
    def map_bytes(self) -> int:
        """Bytes of the map from rows to places."""

    def close(self) -> None:
        """Release files and maps; what was written since the last commit is dropped at the next open."""


class Counting:
    """A tier's counters, added to by many threads.

    Attributes:
        totals: so far.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.totals = ColdCounters()

    def add(self, **added: float) -> None:
        """Add to the totals of these names, all at once."""
        with self._lock:
            sums = {name: getattr(self.totals, name) + more for name, more in added.items()}
            self.totals = self.totals._replace(**sums)


# What the arguments of any tier must be; each raises ValueError.


def check_table(table_index: int, layout: RowLayout, num_rows: int, page_bytes: int) -> None:
    """Numbers out of range, or a layout for other pages."""
    if not 0 <= table_index < MAX_TABLES:
        raise ValueError(f"table_index must be in [0, {MAX_TABLES}), not {table_index}")
    if not 0 <= num_rows <= MAX_ROWS:
        raise ValueError(f"num_rows must be in [0, {MAX_ROWS}], not {num_rows}")
    if layout.page_bytes != page_bytes:
        raise ValueError(f"layout.page_bytes is {layout.page_bytes}, the tier's pages have {page_bytes} bytes")


def check_arrays(keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools | None = None) -> None:
    """A type or shape the kernels do not take, or slots out of range."""
    if keys.dtype != np.int64 or keys.ndim != 1 or not keys.flags.c_contiguous:
        raise ValueError("keys must be a contiguous int64 vector")
    if slots.dtype != np.int32 or slots.shape != keys.shape or not slots.flags.c_contiguous:
        raise ValueError("slots must be a contiguous int32 vector as long as keys")
    for name, arena in (("weights", weights), ("state", state)):
        if arena.dtype != np.uint64 or arena.ndim != 2 or not arena.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous uint64 matrix")
    if len(weights) != len(state):
        raise ValueError(f"weights has {len(weights)} slots, state has {len(state)}")
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= len(weights)):
        raise ValueError(f"slots must be in [0, {len(weights)})")
    if present is not None and (
        present.dtype != np.bool_ or present.shape != keys.shape or not present.flags.c_contiguous
    ):
        raise ValueError("present must be a contiguous bool array as long as keys")


def check_widths(layout: RowLayout, weights: Words, state: Words) -> None:
    """Slots that do not hold a row of the layout."""
    if weights.shape[1] != layout.weight_words or state.shape[1] != layout.state_words:
        raise ValueError(
            f"weights and state have {weights.shape[1]} and {state.shape[1]} words a row, the table's layout has "
            f"{layout.weight_words} and {layout.state_words}"
        )


def require_distinct(keys: Int64s) -> None:
    """A key given twice."""
    if (keys[1:] > keys[:-1]).all():
        return
    ordered = np.sort(keys)
    if (twice := ordered[1:] == ordered[:-1]).any():
        key = int(ordered[int(np.argmax(twice))])
        raise ValueError(f"keys has row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS} twice")
