"""A commit that a read-only tier does not show yet, with a map of its own beside the tier's."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreReplacedError
from .btree import META_KEY
from .indexes import read_indexes, require_logged, stored_segments
from .records import CommitRecord, Head
from .row_map import RowMap
from .snapshot import Snapshot
from .stored_records import read_head, read_payload, read_record
from .view import View

__all__ = ["Lookout", "NewerVersion"]


class NewerVersion(NamedTuple):
    """What a tier can move to.

    Attributes:
        rows: the map of it.
        before: the map of what the tier shows.
        shown: the version that ``before`` is a map of, or -1 if ``rows`` was not made from that.
    """

    snapshot: Snapshot
    head: Head
    record: CommitRecord
    rows: RowMap
    before: RowMap
    shown: int

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def payload(self) -> bytes:
        """See ``ColdTier.payload``."""
        return read_payload(self.snapshot, self.record)

    def is_changed(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n]: whether rows were written since the version that the tier shows."""
        return self.rows.is_changed(self.before, keys, self.shown)


def _find(snapshot: Snapshot, before: RowMap, shown: CommitRecord, view: View) -> NewerVersion | None:
    """The newest version in a snapshot; None if it is the one that is shown, to whose snapshot this one succeeds: rows
    that cleaning moved lie elsewhere there, and the pages where they lay can be used again.

    Costs a walk of the tree and the indexes of new segments, and a copy of the map for another version. After a
    rollback, all indexes.

    Raises:
        DamagedError: what is there is not what was written. StoreReplacedError: other files were copied over it.
    """
    try:
        for _ in snapshot.walk(int(META_KEY)):  # damage on the way to the records is found first
            pass
        head = read_head(snapshot)
        record = read_record(snapshot, head.current)
        stored = stored_segments(snapshot)
        if head.current == shown.version and record != shown:  # its payload, whose checksum it has, tells commits apart
            raise StoreReplacedError(
                f"{snapshot.path}: its version {head.current} is another commit than when the store was opened; "
                "other files were copied over it: open the store again"
            )
        require_logged(snapshot, stored)
        is_same = head.current == shown.version  # then rows are what they were, if elsewhere: no copy is needed
        rows = before if is_same else before.copied()
        is_followed = rows.follow(snapshot, stored, record.version, view.oldest())
        if is_same and is_followed:
            view.move(snapshot)
            return None
        if not is_followed:
            rows = RowMap(before.shapes)
            rows.enter(snapshot, read_indexes(snapshot, stored), record.version, ())
    except BaseException:
        snapshot.close()
        raise
    return NewerVersion(snapshot, head, record, rows, before, shown.version if is_followed else -1)


class Lookout:
    """Looks for a newer version, and holds the one it found until that is taken.

    Attributes:
        found: it, or None.
    """

    def __init__(self) -> None:
        self.found: NewerVersion | None = None
        self._last = -1

    def look(self, snapshot: Snapshot, before: RowMap, shown: CommitRecord, view: View) -> NewerVersion | None:
        """What is newer than the commit ``shown``, whose map is ``before``.

        Args:
            snapshot: the newest, taken over; of a tree in which nothing newer was found before, nothing is read.
            view: of the tier; shows its version by this snapshot from then on, if nothing is newer.
        """
        self.close()
        if snapshot.txn_id == self._last:
            snapshot.close()
        else:
            last = snapshot.txn_id
            self.found = _find(snapshot, before, shown, view)
            if self.found is None:
                self._last = last
        return self.found

    def take(self) -> NewerVersion:
        """What was found, whose snapshot is the caller's then."""
        found, self.found = self.required(), None
        return found

    def required(self) -> NewerVersion:
        """What was found; AssertionError if that is nothing."""
        assert self.found is not None, "nothing newer was found"
        return self.found

    def close(self) -> None:
        """Drop what was found."""
        found, self.found = self.found, None
        if found is not None:
            found.snapshot.close()
