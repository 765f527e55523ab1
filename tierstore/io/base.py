"""The contract of a cold tier: rows on a device, written in transactions, read in batches, committed atomically."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..rows import RowLayout

__all__ = ["ColdCounters", "ColdTier", "VerifyReport"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]


class ColdCounters(NamedTuple):
    """Running totals since the tier was opened."""

    rows_read: int
    """Rows asked for, absent ones included."""
    rows_absent: int
    """Of those, rows that were never written."""
    pages_read: int
    """Pages the rows lay on, each counted once per ``read`` call (they may have come from the page cache)."""
    read_seconds: float
    rows_written: int
    bytes_written: int
    """Of the pages that rows were appended in."""
    write_seconds: float
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


class ColdTier(Protocol):
    """Rows are addressed by key (``rows.KEY_ROW_BITS``). Thread-safe: any number of readers beside one writer."""

    def add_table(self, table_index: int, layout: RowLayout, num_rows: int) -> None:
        """Make a table known. Nothing is written: a table without rows takes no room."""

    def read(
        self, keys: Int64s, slots: NDArray[np.int32], weights: Words, state: Words, present: NDArray[np.bool_]
    ) -> None:
        """Copy row ``keys[i]`` into ``weights[slots[i]]`` and ``state[slots[i]]`` and set ``present[i]``.

        All keys' tables share one layout. A row never written leaves its slot as it is and ``present[i]`` False.
        Every row is verified against its checksum. Reads see every ``write`` that returned before.

        Raises:
            ChecksumError: names file, table and row; the slots' contents are then undefined.
        """

    def write(self, keys: Int64s, slots: NDArray[np.int32], weights: Words, state: Words, *, epoch: int) -> None:
        """Store ``weights[slots[i]]``, ``state[slots[i]]`` as row ``keys[i]`` (keys distinct, one layout), together and
        in this order.

        Visible to ``read`` on return; part of no version until ``commit``. All or nothing.

        Args:
            epoch: the first version that the rows are to be part of, above ``last_version``. A row written for an
                earlier epoch than before is that of the versions up to the later one, and not what ``read`` sees.
        """

    def commit(self, payload: bytes, version: int, *, keep: int = 1) -> None:
        """Make what was written for epochs up to ``version``, and ``payload``, the current version, atomically and
        durably. Others may go on writing for later epochs meanwhile.

        Args:
            version: its number, above ``last_version``.
            keep: how many of the last versions stay, this one included.
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

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every row that is stored, also for earlier versions and for none yet.

        Rows of tables that were not added are not counted. ``progress(done_bytes, total_bytes)``.

        Raises:
            DamagedError: names the file, the place and the way out.
        """

    def counters(self) -> ColdCounters: ...

    @property
    def map_bytes(self) -> int:
        """Bytes of the map from rows to places."""

    def close(self) -> None:
        """Release files and maps; what was written since the last commit is dropped at the next open."""
