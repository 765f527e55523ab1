"""A commit that a read-only tier does not show yet, with a directory of its own beside the tier's."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreReplacedError
from .btree import META_KEY
from .census import check_census, read_head, read_payload, read_record
from .directory import Directory
from .records import CommitRecord, Head
from .snapshot import Snapshot
from .view import fill_directory

__all__ = ["Lookout", "NewerVersion"]


class NewerVersion(NamedTuple):
    """What a tier can move to.

    Attributes:
        before: the directory of what the tier shows.
    """

    snapshot: Snapshot
    head: Head
    record: CommitRecord
    directory: Directory
    before: Directory

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def payload(self) -> bytes:
        """See ``ColdTier.payload``."""
        return read_payload(self.snapshot, self.record)

    def is_changed(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [n]: whether the rows at these places (``ColdTier.place``) are in another block than the tier shows.

        A block that is written is written to another page, and pages of a tree that is still shown are not reused.
        """
        return self.directory.differs(self.before, places)


def _find(
    snapshot: Snapshot, before: Directory, shown: CommitRecord, move: Callable[[Snapshot], None]
) -> NewerVersion | None:
    """The newest version in a snapshot; None if it is the one that is shown, to whose snapshot this one succeeds.

    The pages of a version's blocks are the same in every tree in which it is the current one. What the old snapshot
    kept beside them, pages of blocks that were written and not committed, can then be used again.

    Costs a walk to the records of versions, and three of the whole index if there is another version.

    Raises:
        DamagedError: what is there is not what was written. StoreReplacedError: other files were copied over it.
    """
    try:
        for _ in snapshot.walk(int(META_KEY)):  # LMDB's own code follows it then
            pass
        head = read_head(snapshot)
        record = read_record(snapshot, head.current)
        if head.current == shown.version:
            if record != shown:  # its payload, whose checksum it has, holds the commit's identity
                raise StoreReplacedError(
                    f"{snapshot.path}: its version {head.current} is another commit than when the store was opened; "
                    "other files were copied over it: open the store again"
                )
            move(snapshot)
            return None
        for _ in snapshot.walk():
            pass
        check_census(snapshot, record)
        directory = before.emptied()
        fill_directory(directory, snapshot, record.version)
    except BaseException:
        snapshot.close()
        raise
    return NewerVersion(snapshot, head, record, directory, before)


class Lookout:
    """Looks for a newer version, and holds the one it found until that is taken.

    Attributes:
        found: it, or None.
    """

    def __init__(self) -> None:
        self.found: NewerVersion | None = None
        self._last = -1

    def look(
        self, snapshot: Snapshot, before: Directory, shown: CommitRecord, move: Callable[[Snapshot], None]
    ) -> NewerVersion | None:
        """What is newer than the commit ``shown``, whose directory is ``before``.

        Args:
            snapshot: the newest, taken over; of a tree in which nothing newer was found before, nothing is read.
            move: has the tier show its version by another snapshot from then on.
        """
        self.close()
        if snapshot.txn_id == self._last:
            snapshot.close()
        else:
            last = snapshot.txn_id
            self.found = _find(snapshot, before, shown, move)
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
