"""Following a writer: a commit that a tier open for reading does not show yet, and the segments that it adds."""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import StoreReplacedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from .btree import META_KEY
from .records import CommitRecord, Head, read_head, read_payload, read_record, require_logged
from .row_file import OpenFile
from .row_map import NewSegments, RowMap, RowPlaces
from .segments import stored_segments
from .snapshot import Snapshot

ReadFrom = Callable[[Snapshot, RowPlaces, Int64s, Int32s, Words, Words, Bools], None]
"""``ColdTier.read``, by a snapshot and its map."""


@dataclass(eq=False)
class NewerCommit:
    """See ``base.NewerVersion``; made by ``CommitFollower.find``."""

    follower: "CommitFollower"
    snapshot: Snapshot
    head: Head
    record: CommitRecord
    rows: RowPlaces
    changed: Int64s

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def payload(self) -> bytes:
        return read_payload(self.snapshot, self.record)

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        self.follower.read_from(self.snapshot, self.rows, keys, slots, weights, state, present)

    def show(self) -> None:
        file = self.follower.file
        with file.lock:
            assert self.follower.found is self, "it was shown or given up"
            self.follower.found = None
            file.head, file.record = self.head, self.record
            file.show(self.snapshot, self.rows)
            self.rows = RowMap({})  # references to this do not keep the map

    def close(self) -> None:
        """Let go of its pages and map, unless it was shown."""
        if self.follower.found is self:
            self.follower.found = None
            self.snapshot.close()
            self.rows = RowMap({})


class CommitFollower:
    """Looks for newer versions in a file that is open for reading, and holds the one it found until that is shown.
    ``read_from``: reads rows of what was found."""

    def __init__(self, file: OpenFile, read_from: ReadFrom) -> None:
        self.file = file
        self.read_from = read_from
        self.found: NewerCommit | None = None
        self._last = -1

    def find(self) -> NewerCommit | None:
        """The newest version, if it is not the one that is shown. Of a tree in which nothing newer was found before
        nothing is read.

        Between two calls the pages of the file's snapshot are kept from being reused: the writer's file grows.

        Raises:
            StoreReplacedError: the file is not at its path any more, or others were copied over it.
            DamagedError: the newer one is damaged.
        """
        with self.file.lock:
            self.file.require_open()
            self.file.map.locks.require_in_place()
            before = self.file.make_map()  # what the newer one is compared with
            snapshot = self.file.new_snapshot()
            self.close()
            if snapshot.txn_id == self._last:
                snapshot.close()
                return None
            txn_id = snapshot.txn_id
            try:
                self.found = self._look(snapshot, before)
            except BaseException:
                snapshot.close()
                raise
            if self.found is None:
                self._last = txn_id
            return self.found

    def _look(self, snapshot: Snapshot, before: RowMap) -> NewerCommit | None:
        """The newest version in a snapshot; None if it is the one that is shown, to whose snapshot this one succeeds:
        rows that cleaning moved lie elsewhere there, and the pages where they lay can be used again.

        Costs a walk of the tree and the indexes of new segments. After a rollback, all indexes and another map.
        """
        shown = self.file.record
        snapshot.walk(int(META_KEY))  # damage on the way to the records is found first
        head = read_head(snapshot)
        record = read_record(snapshot, head.current)
        stored = stored_segments(snapshot)
        if head.current == shown.version and record != shown:  # its payload, whose checksum it has, tells commits apart
            raise StoreReplacedError(
                f"{snapshot.path}: its version {head.current} is another commit than when the store was opened; "
                "other files were copied over it: open the store again"
            )
        require_logged(snapshot, stored)
        is_same = head.current == shown.version  # then rows are what they were, if elsewhere, and enter the map at once
        segments = before.segments if is_same else {layout: each.copied() for layout, each in before.segments.items()}
        oldest = self.file.oldest_shown()
        new = NewSegments.read(
            before, segments, snapshot, stored, shown=shown.version, last=record.version, oldest=oldest
        )
        if is_same and new is not None:
            before.advance(new)
            self.file.show(snapshot)
            return None
        if new is not None:
            return NewerCommit(self, snapshot, head, record, new, new.changed)
        rows = RowMap(before.shapes)
        rows.enter(snapshot, stored, record.version, ())
        return NewerCommit(self, snapshot, head, record, rows, rows.differing(before))

    def close(self) -> None:
        """Drop what was found."""
        if self.found is not None:
            self.found.close()
