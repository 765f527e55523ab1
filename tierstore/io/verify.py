"""Reading and checking every stored block."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DamagedError, TruncatedError
from ..rows import KEY_ROW_BITS, MAX_ROWS, RowLayout
from .base import VerifyReport
from .blocks import BlockStatus, check_blocks
from .btree import META_KEY, Entries
from .directory import Directory
from .files import RESTORE
from .gather import Geometry, queue_pages
from .snapshot import Snapshot

__all__ = ["block_error", "verify_blocks"]

_QUEUED_BLOCKS: Final = 512


def block_error(path: Path, block_key: int, geo: Geometry, result: NDArray[np.int64]) -> DamagedError:
    """What a kernel of blocks.py found wrong: a BlockStatus in ``result[0]``, the row's place in ``result[2]``."""
    table, block = block_key >> KEY_ROW_BITS, block_key % MAX_ROWS
    status = BlockStatus(int(result[0]))
    place = f"block {block} of table {table}"
    if status == BlockStatus.OUT_OF_FILE:
        return TruncatedError(f"{path}: {place} lies beyond the end of the file. {RESTORE}")
    if status == BlockStatus.BAD_ROW:
        row = block * geo.rows_per_block + int(result[2])
        return ChecksumError(f"{path}: row {row} of table {table} does not match its checksum. {RESTORE}")
    return ChecksumError(f"{path}: {place} is damaged ({status.name}). {RESTORE}")


def verify_blocks(
    snapshot: Snapshot,
    directory: Directory,
    geometries: Mapping[RowLayout, Geometry],
    epoch_limit: int,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    """Check each block of known tables with an epoch up to ``epoch_limit``; see ``ColdTier.verify``."""
    tables = blocks = rows = size_bytes = done = 0
    total = snapshot.num_entries
    last_table = -1
    for entries, count in snapshot.walk():
        is_block = (entries.block_keys[:count] != META_KEY) & (entries.epochs[:count] <= np.uint64(epoch_limit))
        owners = (entries.block_keys[:count] >> np.uint64(KEY_ROW_BITS)).astype(np.int64)
        for table in np.unique(owners[is_block]).tolist():
            layout = directory.layouts.get(table)
            if layout is None:
                continue
            chosen = Entries(*(column[:count][is_block & (owners == table)] for column in entries))
            rows += _check(snapshot, geometries[layout], chosen)
            tables += table != last_table
            last_table = table
            blocks += len(chosen.pages)
            size_bytes += len(chosen.pages) * layout.pages_per_block * layout.page_bytes
        done += count
        if progress is not None:
            progress(done, total)
    return VerifyReport(tables=tables, blocks=blocks, rows=rows, bytes=size_bytes)


def _check(snapshot: Snapshot, geo: Geometry, entries: Entries) -> int:
    """Check blocks of one layout, their pages queued ahead; returns the rows present."""
    rows = 0
    file_map = snapshot.file_map
    count = len(entries.pages)
    page_bytes = geo.page_words * 8
    for start in range(0, count, _QUEUED_BLOCKS):
        ahead = slice(0 if start == 0 else start + _QUEUED_BLOCKS, start + 2 * _QUEUED_BLOCKS)
        limit = snapshot.limit_pages()
        pages = entries.pages[ahead]
        queue_pages(file_map.address, page_bytes, geo.pages_per_block, pages)
        part = slice(start, start + _QUEUED_BLOCKS)
        result = np.zeros(4, np.int64)
        check_blocks(
            geo, file_map.words, limit, entries.block_keys[part], entries.epochs[part], entries.pages[part], result
        )
        if result[0] != BlockStatus.DONE:
            raise block_error(snapshot.path, int(entries.block_keys[start + int(result[1])]), geo, result)
        rows += int(result[3])
    return rows
