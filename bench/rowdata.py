"""The rows that cold and warm reads are measured on, as a store and as a flat file, each built once and kept."""

import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.reads import RowReader
from tierstore.layout import KEY_ROW_BITS, RowLayout

_STORE_ID = bytes(16)
_CHUNK_ROWS = 200_000

Floats = NDArray[np.float32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """``count`` rows of ``dim`` float32 each, random, the same at every build."""

    count: int
    dim: int
    seed: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Rows":
        return cls(count=config["rows"], dim=config["dim"], seed=config["seed"])

    def chunks(self) -> Iterator[tuple[int, Floats]]:
        """First row number and float32 [n, dim] of each run of rows, in order."""
        for start in range(0, self.count, _CHUNK_ROWS):
            generator = np.random.default_rng((self.seed, start))
            count = min(_CHUNK_ROWS, self.count - start)
            yield start, generator.random((count, self.dim), np.float32)

    def layout(self, page_bytes: int) -> RowLayout:
        return RowLayout(dim=self.dim, page_bytes=page_bytes)


def build_once(folder: Path, made_of: Mapping[str, Any], build: Callable[[Path], object]) -> Path:
    """The folder, built unless a build of it from the same was finished before; kept for the next run."""
    stamp = folder.with_name(f"{folder.name}.json")
    if stamp.exists() and json.loads(stamp.read_text()) == made_of:
        return folder
    print(f"Building {folder} ...", flush=True)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    build(folder)
    stamp.write_text(json.dumps(made_of))
    return folder


def build_rows(parent: Path, name: str, rows: Rows, build: Callable[[Path], object]) -> Path:
    """The folder of these rows in a form of that name."""
    return build_once(parent / f"{name}-{rows.count}x{rows.dim}", asdict(rows), build)


def build_flat(parent: Path, rows: Rows) -> Path:
    """The rows one after another in one file: what ``numpy.take`` reads."""

    def build(target: Path) -> None:
        target.mkdir(parents=True)
        with (target / "rows.f32").open("wb") as file:
            for _, chunk in rows.chunks():
                file.write(chunk.tobytes())
            os.fsync(file.fileno())

    return build_rows(parent, "flat", rows, build) / "rows.f32"


def open_flat(path: Path, rows: Rows, advice: int = mmap.MADV_NORMAL) -> Floats:
    """float32 [count, dim] over a map of the file, as ``numpy.memmap`` makes it, with that advice to the system."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    mapped.madvise(advice)
    return np.frombuffer(mapped, np.float32).reshape(rows.count, rows.dim)


def _keys(ids: Int64s, rows_a_table: int) -> Int64s:
    return ids // rows_a_table << KEY_ROW_BITS | ids % rows_a_table


def build_store(parent: Path, rows: Rows, tables: int = 1) -> Path:
    """The rows in a cold tier, committed, one after another in so many tables of one size."""
    rows_a_table = rows.count // tables
    assert rows_a_table * tables == rows.count, f"{rows.count} rows cannot be divided among {tables} tables"

    def build(target: Path) -> None:
        target.mkdir(parents=True)
        tier = LmdbColdTier(target, store_id=_STORE_ID, readonly=False)
        layout = rows.layout(tier.page_bytes)
        tier.set_tables(dict.fromkeys(range(tables), (layout, rows_a_table)))
        state = np.zeros((_CHUNK_ROWS, layout.state_words), np.uint64)
        for start, chunk in rows.chunks():
            weights = np.zeros((len(chunk), layout.weight_words), np.uint64)
            weights.view(np.float32)[:, : rows.dim] = chunk
            slots = np.arange(len(chunk), dtype=np.int32)
            keys = _keys(start + slots.astype(np.int64), rows_a_table)
            tier.write(keys, slots, weights, state[: len(chunk)], epoch=1)
        tier.commit(b"", 1)
        tier.close()

    return build_rows(parent, "store" if tables == 1 else f"store{tables}", rows, build)


def take_as_large(tier: LmdbColdTier, *, is_large: bool = True) -> None:
    """As if memory had no room for its file, or had it: cold pages are read past the page cache, or not."""
    tier.reader.is_large, tier.reader.asked_at = is_large, math.inf


class TierReader:
    """A cold tier opened to read batches of rows into buffers of its own; ``tables`` as it was built with. With
    ``direct`` memory is taken to have no room for the file, or to have it."""

    def __init__(
        self, folder: Path, rows: Rows, batch_rows: int, *, verify: bool, tables: int = 1, direct: bool = False
    ) -> None:
        self.tier = LmdbColdTier(folder, store_id=_STORE_ID, readonly=True)
        if not verify:
            self.tier.reader = RowReader(verify=False)
        take_as_large(self.tier, is_large=direct)
        self.path = self.tier.path
        layout = rows.layout(self.tier.page_bytes)
        self._tables = tables
        self._rows_a_table = rows.count // tables
        self.tier.set_tables(dict.fromkeys(range(tables), (layout, self._rows_a_table)))
        self._slots = np.arange(batch_rows, dtype=np.int32)
        self._weights = np.zeros((batch_rows, layout.weight_words), np.uint64)
        self._state = np.zeros((batch_rows, layout.state_words), np.uint64)
        self._present = np.zeros(batch_rows, np.bool_)
        self._dim = rows.dim

    def read(self, ids: Int64s, start: int = 0) -> None:
        """Read rows ``ids`` into the buffers from place ``start`` on. Threads may share the work, at places apart."""
        end = start + len(ids)
        keys = ids if self._tables == 1 else _keys(ids, self._rows_a_table)
        self.tier.read(keys, self._slots[start:end], self._weights, self._state, self._present[start:end])

    def read_by_table(self, ids: Int64s) -> None:
        """Read rows ``ids`` in a call for each table, one after another; into the buffers in that order."""
        table_of = ids // self._rows_a_table
        start = 0
        for table in range(self._tables):
            mine = ids[table_of == table]
            self.read(mine, start)
            start += len(mine)

    def rows(self) -> Floats:
        """float32 [batch_rows, dim]: what the last reads brought; all must have been present."""
        assert self._present.all(), f"{int((~self._present).sum())} rows of the store are missing"
        return self._weights.view(np.float32)[:, : self._dim]

    def close(self) -> None:
        self.tier.close()
