"""What the readers of a row file see: one snapshot and a directory of it, each kept for as long as somebody uses it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import DamagedError
from ..rows import MAX_ROWS
from .directory import Directory, fill_pages
from .files import RESTORE
from .snapshot import Snapshot

__all__ = ["View", "fill_directory"]


class View:
    """The current snapshot and directory.

    Attributes:
        lock: guards both, and the leases.
        is_complete: whether the directory has the blocks that were in the tree when it was made.
    """

    def __init__(self, snapshot: Snapshot, *, is_complete: bool) -> None:
        self.lock = threading.Lock()
        self._idle = threading.Condition(self.lock)
        self._leases = 0
        self.snapshot = snapshot
        self.directory = Directory()
        self.is_complete = is_complete

    @contextmanager
    def lease(self, check: Callable[[], None]) -> Iterator[tuple[Snapshot, Directory]]:
        """Snapshot and directory, kept until the end of the block; ``check`` may refuse, under the lock."""
        with self.lock:
            check()
            snapshot, directory = self.snapshot, self.directory
            snapshot.leases += 1
            self._leases += 1
        try:
            yield snapshot, directory
        finally:
            with self._idle:
                snapshot.leases -= 1
                self._leases -= 1
                if snapshot.leases == 0 and snapshot is not self.snapshot:
                    snapshot.close()
                if self._leases == 0:
                    self._idle.notify_all()

    def move(self, snapshot: Snapshot) -> None:
        """Make a snapshot current; its predecessor ends with its last lease."""
        with self.lock:
            self._exchange(snapshot)

    def show(self, directory: Directory, snapshot: Snapshot | None = None) -> None:
        """Make a complete directory current, and a snapshot with it."""
        with self.lock:
            self.directory, self.is_complete = directory, True
            if snapshot is not None:
                self._exchange(snapshot)

    def drop_tables(self, first: int) -> None:
        """Forget the tables from index ``first`` on."""
        with self.lock:
            self.directory = self.directory.without_tables(first)

    def _exchange(self, snapshot: Snapshot) -> None:
        old, self.snapshot = self.snapshot, snapshot
        if old.leases == 0:
            old.close()

    def close(self) -> None:
        """End the snapshot, which nobody uses any more."""
        self.snapshot.close()

    def drain(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` under the lock, then wait for the leases to end."""
        with self._idle:
            stop()
            self._idle.wait_for(lambda: self._leases == 0)


def fill_directory(directory: Directory, snapshot: Snapshot, epoch_limit: int, table: int | None = None) -> None:
    """Enter the blocks of one table, or of all, at their newest epochs up to a limit.

    Raises:
        DamagedError: an entry cannot be a block of its table.
    """
    for entries, count in snapshot.walk(0 if table is None else table * MAX_ROWS):
        directory.is_blank = False
        bad = fill_pages(entries, count, epoch_limit, directory.tables, directory.pages)
        if bad >= 0:
            block_key = int(entries.block_keys[bad])
            raise DamagedError(
                f"{snapshot.path}: block {block_key % MAX_ROWS} of table {block_key // MAX_ROWS} cannot be one of its "
                f"blocks (wrong number or size: is the manifest another store's?). {RESTORE}"
            )
        if table is not None and int(entries.block_keys[count - 1]) // MAX_ROWS > table:
            break
