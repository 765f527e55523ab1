"""How LMDB's writer learns of readers: one place in its own table of readers says what the oldest of them sees.

LMDB reuses no page that a transaction in its table of readers, ``rows.lmdb-lock``, can see. Our readers lock bytes of
the row file instead (``pins.py``). So the writer keeps one read transaction, and writes into its place in the table,
before each write transaction, the number of the oldest tree that is read elsewhere. LMDB has no call for that. The
place is found by what it holds, and ``Environment.readers`` must list what is written there.

Source: ``MDB_reader`` in LMDB 0.9's mdb.c: transaction number (8 bytes), process id (4), thread; 64 bytes each.
"""

import contextlib
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from ..errors import TierstoreError
from ..system.processes import OwnDescriptor
from ..system.sizes import format_size
from .files import translate
from .opened import OpenFile
from .pins import Pins

_NOBODY: Final = 2**64 - 1
_NUMBER: Final = struct.Struct("=Q")
_READER: Final = struct.Struct("=Qi")
_READER_BYTES: Final = 64


class OldestReader:
    """The oldest tree of which LMDB must reuse no page, for the one writer, which asks before each transaction.

    Args:
        environment: opened for writing; no transaction on it is open.
        path: the row file.
        pins: of it.

    Raises:
        TierstoreError: the table is not what is known of LMDB 0.9.
    """

    def __init__(self, environment: "lmdb.Environment", path: Path, pins: Pins) -> None:
        self._environment = environment
        self._path = path
        self._pins = pins
        with contextlib.ExitStack() as stack:
            self._txn = environment.begin(write=False)
            stack.callback(lambda: self._txn.abort())  # the one of the end
            # Kept open: closing a descriptor of this file drops the locks of this process on it.
            self._table = OwnDescriptor(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(self._table.close)
            self._take_place()
            self._held = stack.pop_all()

    def _take_place(self) -> None:
        self._place = self._find()
        self._number = _NOBODY
        self._write(_NOBODY)

    def set_map_length(self, length_bytes: int) -> None:
        """Have LMDB map so much. That ends all transactions, so the place is taken again; none may be open but ours.
        TierstoreError: the system refuses, and the environment is of no more use."""
        try:
            self._environment.set_mapsize(length_bytes)
            self._txn = self._environment.begin(write=False)
        except lmdb.Error as error:
            raise translate(error, self._path) from error
        self._take_place()

    def _find(self) -> int:
        """Where the number of our transaction is."""
        wanted = _READER.pack(self._txn.id(), os.getpid())
        table = os.pread(self._table.number, os.fstat(self._table.number).st_size, 0)
        for place in range(0, len(table) - _READER_BYTES + 1, _READER_BYTES):
            if table[place : place + len(wanted)] == wanted and self._is_honoured(place):
                return place
        raise TierstoreError(
            f"{self._path}: the table of readers of this LMDB, {lmdb.version()}, is not as that of 0.9; install the "
            "release of lmdb that tierstore asks for"
        )

    def _is_honoured(self, place: int) -> bool:
        before = os.pread(self._table.number, _NUMBER.size, place)
        os.pwrite(self._table.number, _NUMBER.pack(0), place)
        if [str(os.getpid()), "0"] in [line.split()[::2] for line in self._environment.readers().splitlines()]:
            return True
        os.pwrite(self._table.number, before, place)
        return False

    def _write(self, number: int) -> None:
        if not self._table.is_held():
            raise self._table.lost()
        os.pwrite(self._table.number, _NUMBER.pack(number), self._place)
        self._number = number

    @contextlib.contextmanager
    def transaction(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """A write transaction that leaves alone what others read; committed at the end of the block.

        Raises:
            ClosedError: somebody closed the descriptors, so that nothing tells what others read.
            TierstoreError: what LMDB's error amounts to.
        """
        self._ask()
        try:
            with self._environment.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise translate(error, self._path) from error

    def _ask(self) -> None:
        oldest = self._pins.oldest(self._environment.info()["last_txnid"])
        number = _NOBODY if oldest is None else oldest
        if number != self._number:
            self._write(number)

    def close(self) -> None:
        self._held.close()


_LOG: Final = logging.getLogger("tierstore")
_LEAST_BYTES: Final = 64 * 2**20  # less is not worth a warning
_GROWTH: Final = 1.05
"""Of the file, before what one reader keeps is counted again: its list of free pages is as long as it has stayed."""


class OldReaders:
    """Reports, for the one writer, readers of older trees: the file grows by what they keep from being reused.

    Attributes:
        held_bytes: what the oldest reader keeps from being reused, as of the last ``look``.
    """

    def __init__(self, file: OpenFile) -> None:
        self.held_bytes = 0
        self._file = file
        self._seen = -1, 0  # the oldest tree, and bytes of the file, when it was counted last
        self._logged_bytes = 0

    def look(self, live_bytes: int) -> None:
        """Count again, and log a warning whenever it is too much and has doubled since the last one. ``live_bytes``: of
        the segments."""
        with self._file.lease_tree() as snapshot:
            oldest = snapshot.file_map.pins.oldest_elsewhere(snapshot.txn_id)
            size_bytes = snapshot.file_map.file_bytes()
            if oldest is None:
                self.held_bytes = 0
            elif oldest != self._seen[0] or size_bytes > self._seen[1] * _GROWTH:
                self._seen = oldest, size_bytes
                self.held_bytes = snapshot.freed_since(oldest)
            if self.held_bytes <= max(live_bytes, _LEAST_BYTES):
                self._logged_bytes = 0
            elif oldest is not None and self.held_bytes >= 2 * self._logged_bytes:
                self._logged_bytes = self.held_bytes
                _LOG.warning(
                    "%s: %s still shows an old version, and keeps %s from being reused, so the file grows with each "
                    "commit; have it call Store.refresh() now and then, or close it",
                    snapshot.path, snapshot.file_map.pins.describe_holders(oldest), format_size(self.held_bytes),
                )  # fmt: skip
