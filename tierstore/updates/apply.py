"""An update's rows in a replica: all of them as one version, or none.

A replica is a store that only updates write. It numbers its commits itself; which version of the source a commit shows
stands in its ``extra`` (``origin``), and that is the number to tell clients: it means the same rows on every server,
also after going back and forth. Two versions are kept, so that the one before is one call away.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import TableConfig
from ..errors import ChecksumError, StoreLockedError, StoreNotFoundError, TableError, TierstoreError
from ..floats import half_code
from ..io.changes import Basis, ChangesTier
from ..manifest import MANIFEST_NAME, Manifest
from ..opening import open_store
from ..quantized import fill_first_values
from ..rows import KEY_ROW_BITS, RowLayout
from ..store import Store
from ..version import TableState, pack, unpack, unpack_tensors
from .delta import open_tier
from .header import UpdateHeader
from .origin import Origin, origin_of, with_origin
from .update_file import UpdateFile, file_checksum

__all__ = ["KEEP", "Applied", "apply_update", "roll_back_replica"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]

KEEP: Final = 2
_DDR: Final = "64MiB"
_TRANSACTION_BYTES: Final = 32 << 20
"""Blocks of one transaction, all of which LMDB holds in memory."""


class Applied(NamedTuple):
    """What became of it.

    Attributes:
        version: of the source, that the replica shows now.
        rows: that were written.
        was_there: the replica had this version already; nothing was done.
    """

    version: int
    rows: int
    was_there: bool


def apply_update(directory: str | os.PathLike[str], file: str | os.PathLike[str], *, id: str | None = None) -> Applied:  # noqa: A002 - the word for it
    """Make the version in an update the current one of a replica, which is made if there is none.

    The file is read whole and checked before anything is written; a process that ends on the way leaves the version
    before, and a later call with the same file goes through. Memory: some 200 MiB, the block directory and the dense
    tensors.

    Args:
        id: what the file must be (``file_checksum``); default: not checked.

    Raises:
        ChecksumError: the file is not ``id``. FormatError, TruncatedError: it is no update, or damaged.
        TierstoreError: the replica is not at the version that the update is made from, or is no replica.
        TableError: its tables are others. DiskFullError. StoreLockedError: another process writes it.
    """
    directory, file = Path(directory).absolute(), Path(file)
    if id is not None and file_checksum(file) != id:
        raise ChecksumError(f"{file} is not the update {id}: it was damaged on its way; send it again")
    with UpdateFile(file) as update:
        header = update.header
        update.check()
        payload = unpack(header.origin.version, update.payload())
        tensors = unpack_tensors(payload)
        before = _prepare(directory, header)
        if before is None:
            return Applied(header.origin.version, 0, True)
        with open_tier(directory, Manifest.read(directory), readonly=False) as tier:
            if tier.version != before:  # between the two opens nobody had it locked
                raise StoreLockedError(f"{directory} was written by another process meanwhile; apply the update again")
            rows = _Writer(tier, update).run()
            states = {config.name: TableState(0, config.optimizer.lr) for config in header.tables}
            extra = with_origin(payload.extra, header.origin)
            lineage = unpack(tier.version, tier.payload).next_lineage()
            tier.commit(pack(states, extra, tensors, lineage), tier.last_version + 1, keep=KEEP)
    return Applied(header.origin.version, rows, False)


def _prepare(directory: Path, header: UpdateHeader) -> int | None:
    """Make the tables that are new; the replica's own number of its version, or None if it is this very one."""
    if header.since and not (directory / MANIFEST_NAME).exists():
        raise StoreNotFoundError(f"{directory} is empty, and the update {_wants(header)}")
    with open_store(directory, mode="w", keep=KEEP, ddr=_DDR, threads=1) as store:
        origin = origin_of(store.extra)
        if store.version and origin is None:
            raise TierstoreError(
                f"{directory} was written by others than updates; choose another directory for a replica"
            )
        if header.origin.is_same(origin):
            return None
        if header.base is not None and not header.base.is_same(origin):
            raise TierstoreError(f"{directory} {_describe(origin)}, and the update {_wants(header)}")
        _require_tables(store, header)
        for config in header.tables:
            store.create_table(config)
        return store.version


def _wants(header: UpdateHeader) -> str:
    return (
        f"goes from {header.base} to version {header.origin.version}; publish without --since, which sends what is "
        "missing here"
    )


def _describe(origin: Origin | None) -> str:
    return "is empty" if origin is None else f"has {origin}"


def _require_tables(store: Store, header: UpdateHeader) -> None:
    """TableError unless the update begins with the replica's tables: first values depend on their places."""
    for index, table in enumerate(store.tables.values()):
        sent = header.tables[index] if index < len(header.tables) else None
        if table.config != sent:
            raise TableError(
                f"table {index} of {store.directory} is {table.config}, and of the update {sent}; send that store's "
                "updates to a replica of its own"
            )


class _Writer:
    """Writes an update's rows for the version to come."""

    def __init__(self, tier: ChangesTier, update: UpdateFile) -> None:
        self._tier = tier
        self._update = update
        self._tables = update.header.tables
        self._layouts = [config.layout(tier.page_bytes) for config in self._tables]
        self._epoch = tier.last_version + 1

    def run(self) -> int:
        """Write; how many rows."""
        for index, (config, layout) in enumerate(zip(self._tables, self._layouts, strict=True)):
            self._tier.add_table(index, layout, config.num_embeddings)
        written = 0
        for index, config in enumerate(self._tables):
            if self._update.header.basis is Basis.NOTHING and self._tier.version:
                self._reset(index, config)
            for rows, weights in self._update.rows(index):
                self._write(index, rows, weights)
                written += len(rows)
        return written

    def _write(self, index: int, rows: Int64s, weights: Words) -> None:
        """Rows of one table, some blocks at a time."""
        layout = self._layouts[index]
        keys = rows | (index << KEY_ROW_BITS)
        places = self._tier.place(keys)
        order = np.argsort(places, kind="stable").astype(np.int32)
        block_starts = np.flatnonzero(np.diff(places[order] // layout.rows_per_block, prepend=-1))
        step = max(1, _TRANSACTION_BYTES // layout.block_bytes)
        state = np.zeros((len(rows), layout.state_words), np.uint64)
        for slots in np.split(order, block_starts[step::step]):
            self._tier.write(keys[slots], slots, weights, state, epoch=self._epoch)

    def _reset(self, index: int, config: TableConfig) -> None:
        """Give rows that the replica has and the update has not their first values again."""
        sent = _Sent(self._update, index)
        with self._tier.changes(0) as stored:
            for changed in stored.rows(index, config.num_embeddings):
                lost = sent.missing(changed.rows)
                if len(lost):
                    keys = lost | (index << KEY_ROW_BITS)
                    self._write(index, lost, _first_values(config, self._layouts[index], keys))


class _Sent:
    """The rows of a table that an update has, asked for in ascending order."""

    def __init__(self, update: UpdateFile, table: int) -> None:
        self._chunks: Iterator[Any] = update.rows(table)
        self._known = np.empty(0, np.int64)

    def missing(self, rows: Int64s) -> Int64s:
        """Those of ``rows``, ascending and above those asked for before, that the update has not."""
        self._known = self._known[self._known >= rows[0]]
        while not len(self._known) or self._known[-1] < rows[-1]:
            more = next(self._chunks, None)
            if more is None:
                break
            self._known = np.concatenate([self._known, more[0][more[0] >= rows[0]]])
        return rows[~np.isin(rows, self._known, assume_unique=True)]


def _first_values(config: TableConfig, layout: RowLayout, keys: Int64s) -> Words:
    """Weights of rows never written, uint64 [n, weight words]."""
    words = np.zeros((len(keys), layout.weight_words), np.uint64)
    slots, values = np.arange(len(keys), dtype=np.int32), words.view(layout.numpy_dtype)
    if layout.is_quantized:
        fill_first_values(config.init, keys, slots, values, layout.dim, half_code(layout.dtype))
    else:
        config.init.fill(keys, slots, values, layout.dim, half_code(layout.dtype))
    return words


def roll_back_replica(directory: str | os.PathLike[str]) -> Origin:
    """Make the version before the current one of a replica; what it shows then.

    Raises:
        StoreNotFoundError: no replica. TierstoreError: it keeps no version before. StoreLockedError.
    """
    directory = Path(directory).absolute()
    Manifest.read(directory)  # an open for writing would make a store where there is none
    with open_store(directory, mode="w", keep=KEEP, ddr=_DDR, threads=1) as store:
        if origin_of(store.extra) is None:
            raise TierstoreError(f"{directory} is no replica; go back in it with tierstore rollback")
        if len(store.versions) < 2:
            raise TierstoreError(f"{directory} keeps no version before this one; publish what is to be shown")
        store.rollback(store.versions[-2])
        origin = origin_of(store.extra)
        assert origin is not None, "a replica's kept version is no replica's"
        return origin
