"""Segments whose indexes say anything, with the right checksum, as plain Python: nothing is read or written outside the
image and the map of rows."""

import contextlib
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np

import tierstore
from tierstore.errors import DamagedError
from tierstore.io.checksum import words_hash
from tierstore.io.indexes import read_indexes, stored_segments
from tierstore.io.places import TableArrays
from tierstore.io.records import MAX_VERSION
from tierstore.io.row_map import RowMap
from tierstore.io.segments import CHECKSUM, COUNT, COUNT_MASK, KEYS, MAGIC, MIXED, NEWEST, OLDEST
from tierstore.io.verify import _Check

from .image import PAGE_BYTES, GuardedArray, build_store, edited
from .target import Target, scratch_folder

_FOLDER = scratch_folder()
build_store(_FOLDER / "store")
with (
    tierstore.open(_FOLDER / "store", mode="r", ddr="4MiB", threads=1) as _store,
    _store._cold.lease() as (_tree, _rows),
):
    _STORED, _SHAPES = stored_segments(_tree), _rows.shapes
_STORED = _STORED[np.unique(_STORED["pages"], return_index=True)[1]]  # one of each size
_END = int((_STORED["first_page"] + _STORED["pages"]).max()) * PAGE_BYTES
_CONTENT = (_FOLDER / "store" / "rows.lmdb").read_bytes()[:_END]
_PAGES = _STORED["first_page"].tolist()


class _Unguarded(SimpleNamespace):
    """No device refuses a page here."""

    def begin(self) -> int:
        return 0

    def is_clean(self, since: int) -> bool:
        return True

    def require(self, *_: Any) -> None:
        pass


def _seal(words: Any) -> None:
    """Make the checksums of indexes right, as far as they lie in their segments."""
    for number, first, pages in _STORED[["number", "first_page", "pages"]].tolist():
        at = first * PAGE_BYTES // 8 + 2
        count = int(words[at + COUNT] & COUNT_MASK) * (2 if words[at + COUNT] & MIXED else 1)
        if count < pages * PAGE_BYTES // 8 - 2 - KEYS:
            words[at + CHECKSUM] = words_hash(words, at + MAGIC, KEYS - MAGIC + count, np.uint64(number))


def run(data: bytes) -> None:
    """The first byte: whether checksums are made right again; the rest is edits."""
    words = np.frombuffer(edited(_CONTENT, _PAGES, data[1:]), np.uint64)
    if data[:1] > b"\x10":
        _seal(words)
    words = words.view(GuardedArray)
    num_pages = len(words) * 8 // PAGE_BYTES
    rows_map = SimpleNamespace(words=words, address=0, guard=_Unguarded())
    tree: Any = SimpleNamespace(
        path="rows.lmdb", page_bytes=PAGE_BYTES, txn_id=1, limit_pages=lambda: num_pages,
        file_map=SimpleNamespace(rows=rows_map),
    )  # fmt: skip
    for last, kept in ((MAX_VERSION, (1, 2)), (1, ())):
        rows = RowMap(_SHAPES)
        rows.places = rows.places.view(GuardedArray)
        rows.tables = TableArrays(*(column.view(GuardedArray) for column in rows.tables))
        with contextlib.suppress(DamagedError):
            rows.enter(tree, read_indexes(tree, _STORED), last, kept)
            rows.written_since(tree, 1)
    check = _Check(tree, rows)
    check.look_at(_STORED.copy())
    with contextlib.suppress(DamagedError):
        check.require_sound()


def seeds() -> list[bytes]:
    """Numbers of rows, epochs and keys, changed one at a time, with the right checksum."""
    edits = [
        struct.pack("<BBHI", kind, page, 16 + 8 * word + 4 * (kind == 2), value)
        for page in range(len(_PAGES))
        for word in (COUNT, NEWEST, OLDEST, KEYS, KEYS + 1)
        for kind, value in ((1, 1), (2, 1), (4, 300), (5, 3 + word))
    ]
    return [b"\0", *(b"\xff" + edit for edit in edits[::3])]


TARGET = Target(run=run, seeds=seeds, mutations=40)
