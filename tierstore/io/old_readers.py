"""Readers of older trees, and what they keep from being reused: the file grows by it, for as long as they stay."""

import logging
from typing import Final

from ..system.sizes import format_size
from .opened import OpenFile
from .pins import Pins
from .snapshot import Snapshot

_LOG: Final = logging.getLogger("tierstore")
_LEAST_BYTES: Final = 64 * 2**20
"""Less is not worth a warning."""
_GROWTH: Final = 1.05
"""Of the file, before what one reader keeps is counted again: its list of free pages is as long as it has stayed."""


def describe_holders(pins: Pins, txn_id: int) -> str:
    """Which processes read a tree, in words."""
    found = pins.holders(txn_id)
    return f"process {', '.join(map(str, found))}" if found else "a process that this one cannot see"


class OldReaders:
    """Tells of old readers, for the one writer.

    Attributes:
        held_bytes: what the oldest reader keeps from being reused, as of the last ``look``.
    """

    def __init__(self, file: OpenFile) -> None:
        self.held_bytes = 0
        self._file = file
        self._seen = -1, 0  # the oldest tree, and bytes of the file, when it was counted last
        self._told_bytes = 0

    def look(self, live_bytes: int) -> None:
        """Count again, and log a warning whenever it is too much and has doubled since the last one.

        Args:
            live_bytes: of the segments.
        """
        with self._file.lease_tree() as snapshot:
            oldest = snapshot.file_map.pins.oldest_elsewhere(snapshot.txn_id)
            size_bytes = snapshot.file_map.file_bytes()
            if oldest is None:
                self.held_bytes = 0
            elif oldest != self._seen[0] or size_bytes > self._seen[1] * _GROWTH:
                self._seen = oldest, size_bytes
                self.held_bytes = snapshot.freed_since(oldest)
            if self.held_bytes <= max(live_bytes, _LEAST_BYTES):
                self._told_bytes = 0
            elif oldest is not None and self.held_bytes >= 2 * self._told_bytes:
                self._told_bytes = self.held_bytes
                self._tell(snapshot, oldest)

    def _tell(self, snapshot: Snapshot, oldest: int) -> None:
        _LOG.warning(
            "%s: %s still shows an old version, and keeps %s from being reused, so the file grows with each commit; "
            "have it call Store.refresh() now and then, or close it",
            snapshot.path, describe_holders(snapshot.file_map.pins, oldest), format_size(self.held_bytes),
        )  # fmt: skip
