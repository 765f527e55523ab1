"""The parts of a write: arguments checked, rows grouped by block, blocks put and deleted."""

import lmdb
import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError
from ..rows import KEY_ROW_BITS, MAX_ROWS, RowLayout
from .blocks import BlockStatus, build_blocks, check_page_headers
from .btree import Entries
from .directory import Directory
from .files import RESTORE
from .gather import Geometry, queue_pages
from .placement import Placement
from .records import (
    PAYLOAD_CHUNK_BYTES,
    CommitRecord,
    block_key_bytes,
    commit_item,
    item_key,
    pack_commit,
    payload_item,
)
from .snapshot import Snapshot
from .verify import block_error

__all__ = ["BlockRows", "Staging", "check_arrays", "check_widths", "delete_blocks", "put_version"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]


def check_arrays(keys: Int64s, slots: Int32s, weights: Words, state: Words) -> None:
    """Raises ValueError for a type or shape the kernels do not take, and for slots out of range."""
    if keys.dtype != np.int64 or keys.ndim != 1 or not keys.flags.c_contiguous:
        raise ValueError("keys must be a contiguous int64 vector")
    if slots.dtype != np.int32 or slots.shape != keys.shape or not slots.flags.c_contiguous:
        raise ValueError("slots must be a contiguous int32 vector as long as keys")
    for name, arena in (("weights", weights), ("state", state)):
        if arena.dtype != np.uint64 or arena.ndim != 2 or not arena.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous uint64 matrix")
    if len(weights) != len(state):
        raise ValueError(f"weights has {len(weights)} slots, state has {len(state)}")
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= len(weights)):
        raise ValueError(f"slots must be in [0, {len(weights)})")


def check_widths(layout: RowLayout, weights: Words, state: Words) -> None:
    """Raises ValueError unless a slot holds a row of the layout."""
    if weights.shape[1] != layout.weight_words or state.shape[1] != layout.state_words:
        raise ValueError(
            f"weights and state have {weights.shape[1]} and {state.shape[1]} words a row, the table's layout has "
            f"{layout.weight_words} and {layout.state_words}"
        )


class BlockRows:
    """Rows of one layout grouped by block.

    Args:
        places: where the rows lie.
        keys: the rows, to be named in errors.

    Attributes:
        order: int64 [rows], positions by ascending place.
        block_keys: uint64 [blocks], ascending.
        starts: int64 [blocks + 1], into ``order``.
    """

    def __init__(self, directory: Directory, geo: Geometry, places: Int64s, keys: Int64s) -> None:
        self.order = np.argsort(places, kind="stable")
        ordered = places[self.order]
        tables, rows = ordered >> KEY_ROW_BITS, ordered & (MAX_ROWS - 1)
        known = directory.tables
        in_range = (tables >= 0) & (tables < len(known.bases))
        safe = np.where(in_range, tables, 0)
        good = in_range & (known.layout_ids[safe] == geo.layout_id) & (rows < known.num_rows[safe])
        if not good.all():
            key = int(keys[self.order[int(np.argmin(good))]])
            raise ValueError(
                f"keys has {key}, row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS}: not a row of a table that was "
                f"added, or of a table with another layout than keys[0]'s"
            )
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            key = int(keys[self.order[int(np.argmax(twice))]])
            raise ValueError(f"keys has row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS} twice")
        blocks = (tables << KEY_ROW_BITS) | (rows // geo.rows_per_block)
        first = np.flatnonzero(np.diff(blocks, prepend=-1))
        self.block_keys: Words = blocks[first].astype(np.uint64)
        self.starts: Int64s = np.append(first, len(keys)).astype(np.int64)


class Staging:
    """The buffer in which blocks are built, made at first use.

    Attributes:
        placement: of the file, by which errors name rows.
    """

    placement: Placement | None = None

    def __init__(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        self._words: Words = np.empty(0, np.uint64)

    @property
    def size_bytes(self) -> int:
        return self._words.nbytes

    def release(self) -> None:
        self._words = np.empty(0, np.uint64)

    def put(
        self,
        txn: "lmdb.Transaction[bytes]",
        snapshot: Snapshot,
        layout: RowLayout,
        geo: Geometry,
        epoch: int,
        rows: BlockRows,
        old_pages: Int64s,
        source: tuple[Int64s, Int32s, Words, Words],
    ) -> None:
        """Build the blocks of these rows and put them, as many at a time as the buffer holds.

        Args:
            old_pages: int64 [blocks], where each block's stored version is, or 0.
            source: places, slots, weights, state, as given to ``ColdTier.write`` but for places in place of keys.
        """
        places, slots, weights, state = source
        file_map, guard = snapshot.file_map.rows, snapshot.file_map.rows.guard
        block_words = layout.block_bytes // 8
        num_blocks = len(rows.block_keys)
        step = max(1, self._limit_bytes // layout.block_bytes)
        if len(self._words) < min(step, num_blocks) * block_words:
            self._words = np.empty(min(step, num_blocks) * block_words, np.uint64)
        queue_pages(file_map.address, snapshot.page_bytes, geo.pages_per_block, old_pages[:step])
        for start in range(0, num_blocks, step):
            stop = min(start + step, num_blocks)
            next_pages = old_pages[stop : stop + step]
            queue_pages(file_map.address, snapshot.page_bytes, geo.pages_per_block, next_pages)
            images = self._words[: (stop - start) * block_words].reshape(stop - start, block_words)
            result = np.zeros(3, np.int64)
            since = guard.begin()
            build_blocks(
                geo,
                file_map.words,
                snapshot.limit_pages(),
                epoch,
                rows.block_keys[start:stop],
                old_pages[start:stop],
                rows.starts[start : stop + 1],
                rows.order,
                places,
                slots,
                weights.reshape(-1),
                state.reshape(-1),
                images,
                result,
            )
            places_read = old_pages[start:stop] * snapshot.page_bytes
            guard.require(since, places_read, places_read + layout.block_bytes + 16)
            if result[0] != BlockStatus.DONE:
                block_key = int(rows.block_keys[start + int(result[1])])
                raise block_error(snapshot.path, block_key, geo, result, self.placement)
            _put_images(txn, rows.block_keys[start:stop], epoch, images)


def _put_images(txn: "lmdb.Transaction[bytes]", block_keys: Words, epoch: int, images: Words) -> None:
    keys = block_key_bytes(block_keys, np.full(len(block_keys), epoch, np.uint64))
    with txn.cursor() as cursor:
        cursor.putmulti(
            ((keys[16 * i : 16 * i + 16], images[i]) for i in range(len(images))), dupdata=False, overwrite=True
        )


def delete_blocks(txn: "lmdb.Transaction[bytes]", snapshot: Snapshot, entries: Entries) -> None:
    """Delete these blocks, after a look at the page headers that LMDB is going to believe.

    Raises:
        DamagedError: a page header is not that of such a block.
    """
    page_bytes, file_map = snapshot.page_bytes, snapshot.file_map.rows
    pages_each = (entries.sizes + 16 + page_bytes - 1) // page_bytes
    queue_pages(file_map.address, page_bytes, 1, entries.pages)
    result = np.zeros(2, np.int64)
    limit = snapshot.limit_pages()
    since = file_map.guard.begin()
    check_page_headers(file_map.words, page_bytes // 8, limit, entries.pages, pages_each, result)
    file_map.guard.require(since, entries.pages * page_bytes, entries.pages * page_bytes + 16)
    if result[0] != BlockStatus.DONE:
        key = int(entries.block_keys[result[1]])
        raise DamagedError(
            f"{snapshot.path}: block {key % MAX_ROWS} of table {key >> KEY_ROW_BITS} is damaged "
            f"({BlockStatus(int(result[0])).name}). {RESTORE}"
        )
    keys = block_key_bytes(entries.block_keys, entries.epochs)
    for at in range(0, len(keys), 16):
        deleted = txn.delete(keys[at : at + 16])
        assert deleted, "a block in the tree could not be deleted"


def put_version(txn: "lmdb.Transaction[bytes]", record: CommitRecord, payload: bytes) -> None:
    """Put the record of a version and its payload."""
    view = memoryview(payload)
    for chunk in range(record.num_payload_chunks):
        start = chunk * PAYLOAD_CHUNK_BYTES
        txn.put(item_key(payload_item(record.version, chunk)), view[start : start + PAYLOAD_CHUNK_BYTES])
    txn.put(item_key(commit_item(record.version)), pack_commit(record))
