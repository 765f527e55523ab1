"""What can go wrong, as one tree. A wrong argument is a ``ValueError`` or ``TypeError``, as everywhere in Python; an id
that is no row of its table is an ``IdError``, a ``ValueError`` that is an ``IndexError``, too.

::

    TierstoreError
    ├── StoreNotFoundError     no store in the directory (mode "r")
    ├── StoreLockedError       another writer has the store open
    ├── StoreReplacedError     the files of a store that is open were deleted, or others put in their place
    ├── ClosedError            the store was closed
    ├── ReadOnlyError          a write to a store opened with mode="r", or to quantized rows
    ├── BudgetError            the memory budget cannot hold what was asked
    ├── TableError             unknown table, or a table created again with another configuration
    ├── RankError              another rank of a sharded store failed, ended or hangs
    ├── DiskFullError          the file system has no space left; nothing committed was lost
    ├── PartlyTrainedError     a step failed when some of its rows were trained; nothing committed was lost
    ├── NonFiniteError         a gradient, row or optimizer state is NaN or infinite (check_finite="error")
    └── DamagedError           what is on disk is not what was written, or cannot be read
        ├── FormatError        not a tierstore file, or a version this release cannot read
        ├── TruncatedError     a file is shorter than its own header says
        ├── ChecksumError      a row, an index of a segment or the manifest does not match its checksum
        └── UnreadableError    the device refuses to read a part of a file

Every message names the file or the argument and the way out.
"""

__all__ = [
    "BudgetError", "ChecksumError", "ClosedError", "DamagedError", "DiskFullError", "FormatError", "IdError",
    "NonFiniteError", "PartlyTrainedError", "RankError", "ReadOnlyError", "StoreLockedError", "StoreNotFoundError",
    "StoreReplacedError", "TableError", "TierstoreError", "TruncatedError", "UnreadableError",
]  # fmt: skip


class TierstoreError(Exception):
    """Base of every error that is not a plain wrong argument."""


class IdError(IndexError, ValueError):
    """An id is no row of its table; torch's embeddings raise IndexError."""


class StoreNotFoundError(TierstoreError):
    """There is no store at the path."""


class StoreLockedError(TierstoreError):
    """Another writer holds the store."""


class StoreReplacedError(TierstoreError):
    """The path does not name the files any more that are open."""


class ClosedError(TierstoreError):
    """The store was closed."""


class ReadOnlyError(TierstoreError):
    """The store was opened with mode="r", or the rows are quantized."""


class BudgetError(TierstoreError):
    """The memory budget cannot hold what was asked of it."""


class TableError(TierstoreError):
    """No such table, or one of that name with another configuration."""


class RankError(TierstoreError, RuntimeError):
    """Another rank failed, has ended, or hangs; the message names it."""


class DiskFullError(TierstoreError):
    """The file system is full; the last commit is intact."""


class PartlyTrainedError(TierstoreError):
    """A training step failed after some of its rows were trained. Nothing is trained or committed until the store goes
    back to a version: ``store.rollback``, or close it and open it again. ``__cause__`` is what failed."""


class NonFiniteError(TierstoreError):
    """A value is NaN or infinite. ``found``: its source ("gradient", "row", "state"), table, id, feature, sample of the
    batch, and update of the table; feature and sample are None of rows that no batch here looked up. {}: a weight."""

    found: dict[str, object] = {}  # noqa: RUF012 - nobody adds to it


class DamagedError(TierstoreError):
    """What is on disk is not what was written, or cannot be read."""


class FormatError(DamagedError):
    """Not a tierstore file, or of a version this release cannot read."""


class TruncatedError(DamagedError):
    """A file is shorter than its own header says."""


class ChecksumError(DamagedError):
    """Data on disk does not match its checksum."""


class UnreadableError(DamagedError):
    """The device refuses to read a part of a file; it may do so later."""
