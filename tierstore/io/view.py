"""What the readers of a row file see: one snapshot and a map of its rows, each kept for as long as somebody uses it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .row_map import RowMap
from .snapshot import Snapshot

__all__ = ["View"]


class View:
    """The current snapshot and map.

    Attributes:
        lock: guards both, and the leases.
        rows: the map; None until one is made.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.lock = threading.Lock()
        self._idle = threading.Condition(self.lock)
        self._leased: list[Snapshot] = []  # each once a lease
        self.snapshot = snapshot
        self.rows: RowMap | None = None

    @contextmanager
    def lease(self, check: Callable[[], None]) -> Iterator[tuple[Snapshot, RowMap | None]]:
        """Snapshot and map, kept until the end of the block; ``check`` may refuse, under the lock."""
        with self.lock:
            check()
            snapshot, rows = self.snapshot, self.rows
            self._leased.append(snapshot)
        try:
            yield snapshot, rows
        finally:
            with self._idle:
                self._leased.remove(snapshot)
                if snapshot is not self.snapshot and snapshot not in self._leased:
                    snapshot.close()
                if not self._leased:
                    self._idle.notify_all()

    def move(self, snapshot: Snapshot) -> None:
        """Make a snapshot current; its predecessor ends with its last lease."""
        with self.lock:
            self._exchange(snapshot)

    def show(self, rows: RowMap | None, snapshot: Snapshot | None = None) -> None:
        """Make a map current, and a snapshot with it."""
        with self.lock:
            self.rows = rows
            if snapshot is not None:
                self._exchange(snapshot)

    def _exchange(self, snapshot: Snapshot) -> None:
        old, self.snapshot = self.snapshot, snapshot
        if old not in self._leased:
            old.close()

    def oldest(self) -> int:
        """Number of the oldest transaction whose tree is leased or current."""
        with self.lock:
            return min(snapshot.txn_id for snapshot in (self.snapshot, *self._leased))

    def close(self) -> None:
        """End the snapshot, which nobody uses any more."""
        self.snapshot.close()

    def drain(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` under the lock, then wait for the leases to end."""
        with self._idle:
            stop()
            self._idle.wait_for(lambda: not self._leased)
