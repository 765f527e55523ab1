"""Do packed rows bring in several rows with each read, at the device's limit?

A store of Criteo's 26 tables with 64 float32 a row, as training leaves its rows, and after ``tierstore compact``,
without a trace and with one. What a batch looks up and a cache does not hold is read from the device, the page cache
dropped before each read. The limit is how many 4 KiB pages the device gives a second to direct reads of the same file
at queue depth 64, in turns with the batches; times the rows that a page brings in it is what packing could reach.
"""

import contextlib
import gzip
import itertools
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.io import LmdbColdTier
from tierstore.offline.compaction import compact_store
from tierstore.plan.measure import direct_reader, page_cache
from tierstore.rows import KEY_ROW_BITS
from tierstore.store.manifest import Manifest
from tierstore.trace import TableTrace, Trace, write_trace

from .common import Goal, Report, Run, Table, program
from .data import require_criteo
from .workload import write_every_row

__all__ = ["run"]

Int64s = NDArray[np.int64]

LIMIT_DEPTH: Final = 64
WANTED: Final = {0.01: 4.55, 0.05: 3.89, 0.1: 4.17}
"""Useful rows a read of packed rows, by the share of rows that is cached."""
_DDR: Final = "10% of tables"
_COLUMNS: Final = 26
_LAYOUTS: Final = ("as trained", "as numbered", "packed")


class Measured(NamedTuple):
    rows_per_page: float
    rows_per_s: float
    limit_per_s: float

    @property
    def over_limit(self) -> float:
        return self.rows_per_s / self.limit_per_s


def _criteo_ids(path: Path) -> Int64s:
    """int64 [samples, 26]; of each column, ids in order of first use, -1 where missing."""
    with gzip.open(path, "rt") as lines:
        texts = [line.rstrip("\n").split("\t")[-_COLUMNS:] for line in lines]
    values = np.array([[int(text, 16) if text else -1 for text in row] for row in texts], np.int64)
    return np.stack([_by_first_use(column) for column in values.T], axis=1)


def _by_first_use(values: Int64s) -> Int64s:
    """Numbers from 0 on in place of values, -1 staying."""
    distinct, first, number = np.unique(values, return_index=True, return_inverse=True)
    first[distinct < 0] = -1
    rank = np.empty(len(distinct), np.int64)
    rank[np.argsort(first)] = np.arange(len(distinct)) - int((distinct < 0).any())
    numbered: Int64s = np.take(rank, number)
    return numbered


def _trace_of(ids: Int64s, batch: int) -> Trace:
    present = ids >= 0
    tables = {
        f"t{column}": TableTrace(ids[own, column], np.concatenate([[0], np.cumsum(own)]))
        for column, own in enumerate(present.T)
    }
    return Trace(tables=tables, batch_samples=batch)


def _misses(ids: Int64s, half: int, batch: int, cached_share: float) -> list[Int64s]:
    """Distinct keys of the second half's batches, without the rows that are most frequent in the first."""
    keys = np.where(ids >= 0, ids + (np.arange(_COLUMNS) << KEY_ROW_BITS), -1)
    rows, first, counts = np.unique(keys[:half][keys[:half] >= 0], return_index=True, return_counts=True)
    cached = int(cached_share * int((ids.max(0) + 1).sum()))
    hot = rows[np.lexsort((first, -counts))[:cached]]
    batches = [np.unique(keys[start : start + batch]) for start in range(half, len(keys), batch)]
    return [np.setdiff1d(distinct[distinct >= 0], hot) for distinct in batches]


def _build(parent: Path, sizes: Sequence[int], trace: Trace, config: dict[str, Any]) -> dict[str, Path]:
    """The store after training, and its copies in order."""
    shutil.rmtree(parent, ignore_errors=True)
    trained, numbered, packed = folders = [parent / layout.replace(" ", "-") for layout in _LAYOUTS]
    with tierstore.open(trained, ddr=_DDR) as store:
        for column, rows in enumerate(sizes):
            name = f"t{column}"
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=config["dim"]))
        for table in store.tables.values():
            write_every_row(table)
        store.commit()
        _train(store, trace, config["trained_batches"])
    compact_store(trained, numbered)
    write_trace(trace, parent / "trace.npz")
    compact_store(trained, packed, trace=parent / "trace.npz")
    return dict(zip(_LAYOUTS, folders, strict=True))


def _train(store: tierstore.Store, trace: Trace, batches: int) -> None:
    """Change every row that the last batches of the trace look up, batch by batch."""
    for first, stop in list(itertools.pairwise(trace.batch_bounds.tolist()))[-batches:]:
        for name, table in trace.tables.items():
            ids = torch.from_numpy(np.unique(table.ids[table.offsets[first] : table.offsets[stop]]))
            if len(ids):
                store[name].write(ids, -store[name].read(ids))
    store.commit()


class _Reader:
    """A store's cold tier and room for the most that is read from it at once."""

    def __init__(self, folder: Path, most: int) -> None:
        manifest = Manifest.read(folder)
        self.tier = LmdbColdTier(folder, store_id=bytes.fromhex(manifest.store_id), readonly=True)
        layout = manifest.tables[0].layout(manifest.page_bytes)
        for index, config in enumerate(manifest.tables):
            self.tier.add_table(index, layout, config.num_embeddings)
        self._weights = np.zeros((most, layout.weight_words), np.uint64)
        self._state = np.zeros((most, layout.state_words), np.uint64)

    def read(self, keys: Int64s) -> float:
        """Seconds that a cold read takes; every row must be there."""
        present = np.zeros(len(keys), np.bool_)
        page_cache.drop(self.tier.path)
        start = time.perf_counter()
        self.tier.read(keys, np.arange(len(keys), dtype=np.int32), self._weights, self._state, present)
        seconds = time.perf_counter() - start
        assert present.all(), "a row of the store is missing"
        return seconds


def _measure(folders: dict[str, Path], batches: list[Int64s], config: dict[str, Any]) -> dict[str, Measured]:
    """Batch by batch, each store in its turn, with the device's limit right before it."""
    generator = np.random.default_rng(config["seed"])
    chosen = (batches * config["repetitions"])[: max(config["repetitions"], min(len(batches), 10))]
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    limits: dict[str, list[float]] = {name: [] for name in folders}
    pages = {}
    with contextlib.ExitStack() as stack:
        readers = {name: _Reader(folder, max(map(len, batches))) for name, folder in folders.items()}
        for reader in readers.values():
            stack.callback(reader.tier.close)
        devices = {
            name: stack.enter_context(direct_reader(each.tier.path, LIMIT_DEPTH)) for name, each in readers.items()
        }
        for keys in (chosen[0], *chosen):  # the first round compiles kernels and starts threads
            for name, reader in readers.items():
                offsets = devices[name].random_offsets(generator, config["limit_reads"])
                page_cache.drop(reader.tier.path)
                start = time.perf_counter()
                devices[name].read(offsets)
                limits[name].append(config["limit_reads"] / (time.perf_counter() - start))
                seconds[name].append(reader.read(keys) / len(keys))
        for name, reader in readers.items():
            counted = reader.tier.counters()
            pages[name] = counted.rows_read / counted.pages_read
    return {
        name: Measured(pages[name], 1 / float(np.median(seconds[name][1:])), float(np.median(limits[name][1:])))
        for name in folders
    }


def run(request: Run) -> Report:
    config, ids = request.config, _criteo_ids(require_criteo())
    batch, shares = config["batch_samples"], config["cached_shares"]
    half = len(ids) // 2 // batch * batch
    parent = request.folder / "packing"
    folders = _build(parent, (ids.max(0) + 1).tolist(), _trace_of(ids[:half], batch), config)
    found = {share: _measure(folders, _misses(ids, half, batch, share), config) for share in shares}
    shutil.rmtree(parent)
    return Report(
        question="Do packed rows bring in several rows with each read, at the device's limit?",
        tables=[_table(found)],
        figures={
            f"{share:g}, {layout}": each._asdict() | {"over_limit": each.over_limit}
            for share, layouts in found.items()
            for layout, each in layouts.items()
        },
        goals=[
            Goal(
                name=f"{share:.0%} of the rows cached: packed rows a read",
                value=round(layouts["packed"].rows_per_page, 3),
                at_least=WANTED[share],
            )
            for share, layouts in found.items()
        ],
        notes=[
            "Over limit: distinct rows a second over direct 4 KiB reads a second. Cached: the share of rows that a "
            "cache holds, those most frequent in the first half of Criteo's rows; what is read are the other rows of a "
            "batch. Packed by the first half of Criteo's rows and measured on the second. Rows are numbered in order "
            "of first use. As trained: all rows were written as numbered, then those of the trace's last "
            f"{config['trained_batches']} batches again, as they left a cache of {_DDR}."
        ],
    )


def _table(found: dict[float, dict[str, Measured]]) -> Table:
    rows = [
        [
            f"{share:.0%}",
            *(f"{each.rows_per_page:.2f}" for each in layouts.values()),
            *(f"{each.rows_per_s:,.0f}" for each in layouts.values()),
            f"{layouts['packed'].limit_per_s:,.0f}",
            *(f"{each.over_limit:.2f}" for each in layouts.values()),
        ]
        for share, layouts in found.items()
    ]
    by_layout = ("numbered", "packed")
    columns = ["cached", "rows/read, trained", *by_layout, "rows/s, trained", *by_layout, "limit, reads/s"]
    return Table(
        title="cold reads of Criteo's 26 tables, 64 float32 a row: as trained, as numbered and packed",
        columns=[*columns, "over limit, trained", *by_layout],
        rows=rows,
    )


if __name__ == "__main__":
    sys.exit(program("packing", run))
