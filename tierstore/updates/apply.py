"""An update's rows in a replica: all of them as one version, or none.

A replica is a store that only updates write. It numbers its commits itself; which version of the source a commit shows
stands in its ``extra`` (``header.Origin``), and that is the number to tell clients: it means the same rows on every
server, also after going back and forth. Two versions are kept, so that the one before is one call away; three if the
second is urgent, the first with some rows of the third: nobody goes back to a part of a version.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..errors import StoreNotFoundError, TableError, TierstoreError
from ..io.lmdb import LmdbColdTier
from ..kernels.arrays import Int64s, Words
from ..layout import KEY_ROW_BITS
from ..store import open_store
from ..store.manifest import MANIFEST_NAME, Manifest
from ..store.version import ORIGIN_KEY, TableState, repack, unpack
from ..system.files import translate_os_error
from .delta import open_tier
from .header import Origin, UpdateHeader, origin_of
from .update_file import UpdateFile

KEEP: Final = 2
_TRANSACTION_BYTES: Final = 16 << 20
"""Of segments in one transaction, all of which LMDB holds in memory."""


class Applied(NamedTuple):
    version: int
    """Of the source, that the replica shows now."""
    rows: int
    was_there: bool
    """The replica had this version already; nothing was done."""


def apply_update(
    directory: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    id: str | None = None,  # noqa: A002 - the word for it
    replaces: str = "",
) -> Applied:
    """Make the version in an update the current one of a replica, which is made if there is none.

    The file is read whole and checked before anything is written; a process that ends on the way leaves the version
    before, and a later call with the same file goes through. Tables that no version of the replica names, as an update
    brought them that failed or was gone back from, give way to those of this one; nobody is shown them.

    Memory, whatever the file holds: 128 MiB, the map of the rows, twice the payload (at most ``MAX_PAYLOAD_BYTES``),
    and some 25 bytes for each byte of the file's header.

    Args:
        id: what the file must be (``file_checksum``); default: not checked.
        replaces: identity of the source's commit that the replica has, so that it may go back to one of a lower number.

    Raises:
        ChecksumError: the file is not ``id``. FormatError, TruncatedError: it is no update, or damaged.
        TierstoreError: the replica is not at the version that the update is made from, has rows of another store, or is
            no replica.
        TableError: its tables are others. DiskFullError. StoreLockedError: another process writes it.
    """
    directory = Path(directory).absolute()
    with UpdateFile(Path(file), id=id) as update:
        update.check()
        _make_store(directory, update.header)
        with _open(directory) as tier:
            return _apply(directory, tier, update, replaces)


def _make_store(directory: Path, header: UpdateHeader) -> None:
    """Make an empty store where there is none, or one that was only begun."""
    is_there = (directory / MANIFEST_NAME).exists()
    if header.since and not is_there:
        raise StoreNotFoundError(f"{directory} is empty, and the update {_wants(header)}")
    if not is_there or not Manifest.read(directory).has_rows:
        open_store(directory, mode="w", ddr="64MiB", threads=1).close()


@contextlib.contextmanager
def _open(directory: Path) -> Iterator[LmdbColdTier]:
    try:
        with contextlib.closing(open_tier(directory, Manifest.read(directory))) as tier:
            yield tier
    except OSError as error:
        raise translate_os_error(error, error.filename or directory) from error


def _apply(directory: Path, tier: LmdbColdTier, update: UpdateFile, replaces: str) -> Applied:
    header, manifest = update.header, Manifest.read(directory)
    before = unpack(tier.version, tier.payload)
    before = before if header.is_urgent else before._replace(tensors=b"")
    origin = origin_of(before.extra)
    if before.number and origin is None:
        raise TierstoreError(f"{directory} was written by others than updates; choose another directory for a replica")
    if origin is not None and (header.origin.is_same(origin) or header.shown.is_same(origin)):
        return Applied(origin.version, 0, True)
    _require_base(directory, origin, header)
    if origin is not None and origin.version > header.origin.version and origin.commit_id != replaces:
        raise TierstoreError(
            f"{directory} has {origin}, and the update is of version {header.origin.version}, before that: to go back, "
            "publish from the store as it is now, or roll the replica back"
        )
    _require_tables(directory, before.manifest_of(manifest).tables if origin is not None else (), header)
    rows = _Writer(tier, update).run()
    sent = before if header.is_urgent else update.version()
    states = {config.name: TableState(0, config.optimizer.lr) for config in header.tables}
    version = sent._replace(tables=states, extra={**sent.extra, ORIGIN_KEY: header.shown._asdict()})
    payload = repack(version, before.lineage.following(before.number))
    # Last, as readers look for a version's tables here; until the commit they see those of the version before.
    if manifest.tables != header.tables:
        tier.require_in_place()
        replace(manifest, tables=header.tables).write(directory)
    tier.commit(payload, tier.last_version + 1, keep=KEEP + bool(origin and origin.urgent))
    return Applied(header.shown.version, rows, False)


def _wants(header: UpdateHeader) -> str:
    return (
        f"goes from {header.base} to version {header.origin.version}; publish without --since, which sends what is "
        "missing here"
    )


def _require_base(directory: Path, origin: Origin | None, header: UpdateHeader) -> None:
    """TierstoreError unless the update can be applied to what the replica has."""
    if origin is not None and origin.source != header.origin.source:
        raise TierstoreError(
            f"{directory} has {origin}, and the update is {header.origin}. A replica takes updates of one store; to "
            "have another one's, start its server with a new, empty directory"
        )
    if not header.has_rows_of(origin) or (header.is_urgent and origin is not None and origin.urgent):
        has = "is empty" if origin is None else f"has {origin}"
        raise TierstoreError(f"{directory} {has}, and the update {_wants(header)}")


def _require_tables(directory: Path, tables: tuple[TableConfig, ...], header: UpdateHeader) -> None:
    """TableError unless the update begins with the replica's tables: first values depend on their places."""
    for index, config in enumerate(tables):
        sent = header.tables[index] if index < len(header.tables) else None
        if config != sent:
            raise TableError(
                f"table {index} of {directory} is {config}, and of the update {sent}; to have tables that are others "
                "than they were, start the server with a new, empty directory"
            )
    if header.is_urgent and len(tables) != len(header.tables):
        raise TableError(f"{directory} lacks {header.tables[-1].name!r}: tables come with the whole update")


class _Writer:
    def __init__(self, tier: LmdbColdTier, update: UpdateFile) -> None:
        self._tier = tier
        self._update = update
        self._tables = update.header.tables
        self._layouts = [config.layout(tier.page_bytes) for config in self._tables]
        self._epoch = tier.last_version + 1

    def run(self) -> int:
        for index, (config, layout) in enumerate(zip(self._tables, self._layouts, strict=True)):
            self._tier.add_table(index, layout, 0 if config.is_dropped else config.num_embeddings)
        written = 0
        for index, config in enumerate(self._tables):
            if not self._update.header.since and self._tier.version:
                self._reset(index, config)
            for rows, weights in self._update.rows(index):
                self._write(index, rows, weights)
                written += len(rows)
        return written

    def _write(self, index: int, rows: Int64s, weights: Words) -> None:
        layout = self._layouts[index]
        keys, slots = rows | (index << KEY_ROW_BITS), np.arange(len(rows), dtype=np.int32)
        state = np.zeros((len(rows), layout.state_words), np.uint64)
        step = layout.rows_within(_TRANSACTION_BYTES)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            self._tier.write(keys[part], slots[part], weights, state, epoch=self._epoch)

    def _reset(self, index: int, config: TableConfig) -> None:
        """Give rows that the replica has and the update has not their first values again."""
        sent = _Sent(self._update, index)
        with self._tier.changes(0) as stored:
            for changed in stored.rows(index):
                lost = sent.missing(changed.rows)
                if len(lost):
                    keys = lost | (index << KEY_ROW_BITS)
                    self._write(index, lost, config.init.rows(keys, self._layouts[index]))


class _Sent:
    """The rows of a table that an update has, asked for in ascending order."""

    def __init__(self, update: UpdateFile, table: int) -> None:
        self._chunks: Iterator[Any] = update.rows(table)
        self._rows = np.empty(0, np.int64)

    def missing(self, rows: Int64s) -> Int64s:
        """Those of ``rows``, ascending and above those asked for before, that the update has not."""
        missing = rows[~np.isin(rows, self._rows, assume_unique=True)]
        while not len(self._rows) or self._rows[-1] < rows[-1]:
            more = next(self._chunks, None)
            if more is None:
                break
            self._rows = more[0]
            missing = missing[~np.isin(missing, self._rows, assume_unique=True)]
        return missing


def roll_back_replica(directory: str | os.PathLike[str], left: str = "") -> Origin:
    """Make the version before the current one of a replica; what it shows then. ``left``: the commit to go back from.
    StoreNotFoundError: no replica. TierstoreError: it has another, or keeps no version before. StoreLockedError."""
    directory = Path(directory).absolute()
    with _open(directory) as tier:
        if (origin := origin_of(unpack(tier.version, tier.payload).extra)) is None:
            raise TierstoreError(f"{directory} is no replica; go back in it with tierstore rollback")
        if left not in ("", origin.urgent or origin.commit_id):
            raise TierstoreError(f"{directory} has {origin}, and the server shows commit {left}; go back again")
        if len(tier.versions) < 2:
            raise TierstoreError(f"{directory} keeps no version before this one; publish what is to be shown")
        tier.rollback(tier.versions[0])
        origin = origin_of(unpack(tier.version, tier.payload).extra)
        assert origin is not None, "a replica's kept version is no replica's"
        return origin
