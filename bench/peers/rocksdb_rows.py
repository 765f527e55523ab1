"""RocksDB as parameter servers configure it: one key a row, read with MultiGet."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..rowdata import Floats, Int64s, Rows, build_rows
from . import has, load

_MODULE: Final = "rocksdict"
_BATCH_ROWS: Final = 50_000
_BLOCK_CACHE_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 4096
_BLOOM_BITS: Final = 10


def is_there() -> bool:
    return has(_MODULE)


def _options(rocksdict: Any) -> Any:
    """A small block cache, Bloom filters and indexes in memory, blocks of a page, direct reads, nothing compressed:
    rows are random floats, and the cache of rows is the parameter server's own, above."""
    table = rocksdict.BlockBasedOptions()
    table.set_block_size(_BLOCK_BYTES)
    table.set_block_cache(rocksdict.Cache(_BLOCK_CACHE_BYTES))
    table.set_bloom_filter(_BLOOM_BITS, False)
    table.set_cache_index_and_filter_blocks(False)
    table.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_max_open_files(-1)
    options.set_use_direct_reads(True)
    options.set_optimize_filters_for_hits(True)
    options.set_disable_auto_compactions(True)
    options.increase_parallelism(len(os.sched_getaffinity(0)))
    return options


def _keys(ids: Int64s) -> list[bytes]:
    raw = ids.astype(">u8").tobytes()
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]


class RocksdbRows:
    """Rows of float32 under eight-byte keys in ascending order, compacted into one level. A batch is split over so many
    threads, each of which calls MultiGet on its part."""

    def __init__(self, parent: Path, rows: Rows, *, threads: int) -> None:
        self._library = load(_MODULE)
        self._rows = rows
        folder = build_rows(parent, "rocksdb-rows", rows, self._build)
        read_only = self._library.AccessType.read_only()
        self._database = self._library.Rdict(str(folder / "db"), _options(self._library), access_type=read_only)
        self.paths: Final = sorted((folder / "db").glob("*.sst"))
        self._threads = ThreadPoolExecutor(threads, "multiget")
        self._parts = threads

    def _build(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        database = self._library.Rdict(str(folder / "db"), _options(self._library))
        unlogged = self._library.WriteOptions()
        unlogged.disable_wal = True
        for start, chunk in self._rows.chunks():
            for first in range(0, len(chunk), _BATCH_ROWS):
                part = chunk[first : first + _BATCH_ROWS]
                batch = self._library.WriteBatch(raw_mode=True)
                for key, row in zip(_keys(np.arange(start + first, start + first + len(part))), part, strict=True):
                    batch.put(key, row.tobytes())
                database.write(batch, unlogged)
        database.flush()
        database.compact_range(None, None)
        database.close()

    def _multi_get(self, ids: Int64s) -> Floats:
        return np.frombuffer(b"".join(self._database.get(_keys(ids))), np.float32).reshape(-1, self._rows.dim)

    def read(self, ids: Int64s) -> Floats:
        """float32 [n, dim], in the order of ``ids``. Keys are sorted first, as MultiGet likes them."""
        order = np.argsort(ids)
        found = np.empty((len(ids), self._rows.dim), np.float32)
        found[order] = np.concatenate(list(self._threads.map(self._multi_get, np.array_split(ids[order], self._parts))))
        return found

    def close(self) -> None:
        self._threads.shutdown()
        self._database.close()
