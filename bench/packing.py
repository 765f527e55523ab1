"""Do packed rows bring in several rows with each read, at the device's limit?

Stores of 64 float32 a row, as training leaves their rows, and after ``tierstore compact``, without a trace and with
one. What a batch looks up and a cache does not hold is read from the device, the page cache dropped before each read.
The limit is how many 4 KiB pages the device gives a second to direct reads of the same file at queue depth 64, in turns
with the batches; times the rows that a page brings in it is what packing could reach.
"""

import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.io import LmdbColdTier
from tierstore.offline.compaction import compact_store
from tierstore.store.lineage import NO_LINEAGE
from tierstore.store.manifest import Manifest
from tierstore.store.version import TableState, pack
from tierstore.trace import TableTrace, Trace, write_trace

from . import oscache
from .common import Goal, Report, Run, Table, program
from .data import find_criteo
from .device import DirectReader, direct_reader

__all__ = ["run"]

Int64s = NDArray[np.int64]

LIMIT_DEPTH = 64
_WRITE_BYTES = 64 << 20
_DDR = "10% of tables"
_COLUMNS = 26
ONE_SPACE, TABLES, ZIPF = "Criteo, one table", "Criteo, 26 tables", "Zipf"
TRAINED, NUMBERED, PACKED = "as trained", "as numbered", "packed"

AS_PUBLISHED = {
    (ONE_SPACE, "1 %"): 4.5,
    (ONE_SPACE, "5 %"): 3.88,
    (ONE_SPACE, "10 %"): 4.07,
    (ZIPF, "nothing, 1 batch"): 1.5,
    (ZIPF, "1 %, 1 batch"): 1.03,
    (ZIPF, "1 %, 10 batches"): 1.25,
    (ZIPF, "1 %, 50 batches"): 1.79,
}
"""Useful rows a read, simulated with rows in order of their frequency: in Criteo's first half, in Zipf's law."""
REACHED_BEFORE = {
    (ONE_SPACE, "1 %"): 4.74,
    (ONE_SPACE, "5 %"): 4.09,
    (ONE_SPACE, "10 %"): 4.46,
    (TABLES, "1 %"): 4.55,
    (TABLES, "5 %"): 3.89,
    (TABLES, "10 %"): 4.17,
    (ZIPF, "nothing, 1 batch"): 1.5,
    (ZIPF, "1 %, 1 batch"): 1.02,
    (ZIPF, "1 %, 10 batches"): 1.19,
    (ZIPF, "1 %, 50 batches"): 1.59,
}
"""Useful rows a read, of packed rows while rows lay at fixed places: 2026-11-21, commit addc78a."""


class Reads(NamedTuple):
    """What is read from one store: of each cache the misses of some batches, each one call."""

    name: str
    sizes: dict[str, int]
    """Rows of each table."""
    trace: Trace
    misses: dict[str, list[Int64s]]
    """Distinct keys."""


class Measured(NamedTuple):
    rows_per_page: float
    rows_per_s: float
    limit_per_s: float

    @property
    def over_limit(self) -> float:
        return self.rows_per_s / self.limit_per_s


def _criteo_values(path: Path) -> Int64s:
    """int64 [samples, 26]; of each column, ids in order of first use, -1 where missing."""
    import gzip

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
    numbered: Int64s = np.take(rank, number.reshape(values.shape))
    return numbered


def _criteo_reads(config: dict[str, Any], path: Path) -> list[Reads]:
    columns = _criteo_values(path)
    spread = np.where(columns >= 0, columns + (np.arange(_COLUMNS) << 40), -1)
    batch = config["batch_samples"]
    half = len(columns) // 2 // batch * batch
    found = []
    for name, keys in ((ONE_SPACE, _by_first_use(spread)), (TABLES, spread)):
        tables = [keys] if name == ONE_SPACE else list(columns.T[:, :, None])
        sizes = {f"t{i}": int(ids.max()) + 1 for i, ids in enumerate(tables)}
        trace = Trace(tables={f"t{i}": _table_trace(ids[:half]) for i, ids in enumerate(tables)}, batch_samples=batch)
        misses = {
            f"{share:.0%}".replace("%", " %"): _misses(keys, half, batch, int(share * sum(sizes.values())))
            for share in config["cached_shares"]
        }
        found.append(Reads(name, sizes, trace, misses))
    return found


def _table_trace(ids: Int64s) -> TableTrace:
    """Of ids [samples, n], negative where missing."""
    present = ids >= 0
    return TableTrace(ids[present], np.concatenate([[0], np.cumsum(present.sum(1))]))


def _misses(keys: Int64s, half: int, batch: int, cached: int) -> list[Int64s]:
    """The second half's batches without the rows that are most frequent in the first."""
    before = keys[:half][keys[:half] >= 0]
    rows, first, counts = np.unique(before, return_index=True, return_counts=True)
    hot = rows[np.lexsort((first, -counts))[:cached]]
    batches = [np.unique(keys[start : start + batch]) for start in range(half, len(keys), batch)]
    return [np.setdiff1d(distinct[distinct >= 0], hot) for distinct in batches]


def _zipf_reads(config: dict[str, Any], seed: int) -> Reads:
    """Independent draws; popular rows lie anywhere. Cached are the most popular."""
    generator = np.random.default_rng(seed)
    num_rows, batch = config["rows"], config["batch_rows"]
    shares = np.cumsum(1.0 / np.arange(1, num_rows + 1) ** config["exponent"])
    shares /= shares[-1]
    row_of = generator.permutation(num_rows)
    hot = row_of[: int(config["cached_share"] * num_rows)]

    def draw(batches: int) -> Int64s:
        drawn: Int64s = np.take(row_of, np.searchsorted(shares, generator.random(batches * batch)))
        return drawn

    ids = draw(config["trace_batches"])
    offsets = np.arange(0, len(ids) + 1, dtype=np.int64)
    share = f"{config['cached_share']:.0%}".replace("%", " %")
    misses = {"nothing, 1 batch": [np.unique(draw(1)) for _ in range(3)]}
    for group in config["groups"]:
        name = f"{share}, {group} batch{'es' if group > 1 else ''}"
        misses[name] = [np.setdiff1d(draw(group), hot) for _ in range(3 if group < 50 else 1)]
    return Reads(ZIPF, {"t0": num_rows}, Trace(tables={"t0": TableTrace(ids, offsets)}, batch_samples=batch), misses)


def _build(folder: Path, reads: Reads, config: dict[str, Any]) -> dict[str, Path]:
    """The store after training, and its copies in order; what an earlier run built of them is kept."""
    name = reads.name.replace(" ", "-").replace(",", "")
    parent = folder / f"packing-{name}-{sum(reads.sizes.values())}x{config['dim']}-{reads.trace.num_lookups}"
    folders = {layout: parent / layout.replace(" ", "-") for layout in (TRAINED, NUMBERED, PACKED)}
    if not folders[PACKED].exists():
        shutil.rmtree(parent, ignore_errors=True)
        folders[TRAINED].mkdir(parents=True)
        _write_rows(folders[TRAINED], reads.sizes, config["dim"], config["seed"])
        _train(folders[TRAINED], reads, config["trained_batches"])
        compact_store(folders[TRAINED], folders[NUMBERED])
        write_trace(reads.trace, parent / "trace.npz")
        compact_store(folders[TRAINED], folders[PACKED], trace=parent / "trace.npz")
    return folders


def _write_rows(target: Path, sizes: dict[str, int], dim: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    manifest = Manifest.new(4096)
    for name, rows in sizes.items():
        manifest = manifest.with_table(tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=dim))
    tier = _open(target, manifest, readonly=False)
    layout = manifest.tables[0].layout(4096)
    step = layout.rows_within(_WRITE_BYTES)
    for index, rows in enumerate(sizes.values()):
        for start in range(0, rows, step):
            count = min(step, rows - start)
            weights = generator.integers(1, 1 << 63, (count, layout.weight_words)).astype(np.uint64)
            slots = np.arange(count, dtype=np.int32)
            tier.write((index << 40) + start + slots.astype(np.int64), slots, weights, weights[:, :0].copy(), epoch=1)
    states = {config.name: TableState(0, config.optimizer.lr) for config in manifest.tables}
    tier.commit(pack(states, {}, {}, NO_LINEAGE.following(0)), 1)
    tier.close()
    replace(manifest, has_rows=True).write(target)


def _train(target: Path, reads: Reads, batches: int) -> None:
    """Change every row that the last batches of the trace look up, batch by batch."""
    with tierstore.open(target, ddr=_DDR) as store:
        for first, stop in list(itertools.pairwise(reads.trace.batch_bounds.tolist()))[-batches:]:
            for name, table in reads.trace.tables.items():
                ids = torch.from_numpy(np.unique(table.ids[table.offsets[first] : table.offsets[stop]]))
                if len(ids):
                    store[name].write(ids, -store[name].read(ids))
        store.commit()


def _open(folder: Path, manifest: Manifest, *, readonly: bool) -> LmdbColdTier:
    tier = LmdbColdTier(folder, store_id=bytes.fromhex(manifest.store_id), readonly=readonly)
    for index, config in enumerate(manifest.tables):
        tier.add_table(index, config.layout(4096), config.num_embeddings)
    return tier


class _Reader:
    """A tier and room for the most that is read from it at once."""

    def __init__(self, folder: Path, most: int) -> None:
        manifest = Manifest.read(folder)
        self.tier = _open(folder, manifest, readonly=True)
        layout = manifest.tables[0].layout(4096)
        self._weights = np.zeros((most, layout.weight_words), np.uint64)
        self._state = np.zeros((most, 0), np.uint64)

    def read(self, keys: Int64s) -> float:
        """Seconds that a cold read takes; every row must be there."""
        present = np.zeros(len(keys), np.bool_)
        oscache.drop(self.tier.path)
        start = time.perf_counter()
        self.tier.read(keys, np.arange(len(keys), dtype=np.int32), self._weights, self._state, present)
        seconds = time.perf_counter() - start
        assert present.all(), "a row of the store is missing"
        return seconds


@contextlib.contextmanager
def _opened(folders: dict[str, Path], most: int) -> Iterator[dict[str, tuple[_Reader, DirectReader]]]:
    with contextlib.ExitStack() as stack:
        opened = {}
        for name, folder in folders.items():
            reader = _Reader(folder, most)
            stack.callback(reader.tier.close)
            opened[name] = reader, stack.enter_context(direct_reader(reader.tier.path, LIMIT_DEPTH))
        yield opened


def _measure(folders: dict[str, Path], batches: list[Int64s], config: dict[str, Any]) -> dict[str, Measured]:
    """Batch by batch, each store in its turn, with the device's limit right before it."""
    generator = np.random.default_rng(config["seed"])
    chosen = (batches * config["repetitions"])[: max(config["repetitions"], min(len(batches), 10))]
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    limits: dict[str, list[float]] = {name: [] for name in folders}
    pages = {}
    with _opened(folders, max(map(len, batches))) as opened:
        for keys in (chosen[0], *chosen):  # the first round compiles kernels and starts threads
            for name, (reader, device) in opened.items():
                offsets = device.random_offsets(generator, config["limit_reads"])
                oscache.drop(reader.tier.path)
                start = time.perf_counter()
                device.read(offsets)
                limits[name].append(config["limit_reads"] / (time.perf_counter() - start))
                seconds[name].append(reader.read(keys) / len(keys))
        for name, (reader, _) in opened.items():
            counted = reader.tier.counters()
            pages[name] = counted.rows_read / counted.pages_read
    return {
        name: Measured(pages[name], 1 / float(np.median(seconds[name][1:])), float(np.median(limits[name][1:])))
        for name in folders
    }


def run(request: Run) -> Report:
    config = request.config
    criteo = find_criteo()
    every = [] if criteo is None else _criteo_reads(config["criteo"], criteo)
    every.append(_zipf_reads(config["zipf"], config["seed"]))
    found: dict[tuple[str, str], dict[str, Measured]] = {}
    for reads in every:
        folders = _build(request.folder, reads, config)
        for cached, batches in reads.misses.items():
            found[reads.name, cached] = _measure(folders, batches, config)
    return Report(
        question="Do packed rows bring in several rows with each read, at the device's limit?",
        tables=[_table(found)],
        figures={
            f"{name}, {cached}, {layout}": each._asdict() | {"over_limit": each.over_limit}
            for (name, cached), layouts in found.items()
            for layout, each in layouts.items()
        },
        goals=_goals(found),
        notes=[
            "Over limit: distinct rows a second over direct 4 KiB reads a second. Cached: the share of rows that a "
            "cache holds, those most frequent in the first half of Criteo's rows, or the most popular of Zipf's; what "
            "is read are the other rows of a batch, or of several together. Packed by the first half of Criteo's rows "
            f"and measured on the second; by {config['zipf']['trace_batches']} batches of Zipf's and on later "
            "ones. Criteo's rows are numbered in order of first use, Zipf's popular ones lie anywhere. As trained: all "
            f"rows were written as numbered, then those of the trace's last {config['trained_batches']} batches again, "
            f"as they left a cache of {_DDR}."
        ],
    )


def _table(found: dict[tuple[str, str], dict[str, Measured]]) -> Table:
    rows = []
    for (name, cached), layouts in found.items():
        wanted = AS_PUBLISHED.get((name, cached))
        rows.append(
            [
                f"{name}, cached: {cached}",
                *(f"{each.rows_per_page:.2f}" for each in layouts.values()),
                "" if wanted is None else f"{wanted:.2f}",
                *(f"{each.rows_per_s:,.0f}" for each in layouts.values()),
                f"{layouts[PACKED].limit_per_s:,.0f}",
                *(f"{each.over_limit:.2f}" for each in layouts.values()),
            ]
        )
    return Table(
        title=f"cold reads of 64 float32 a row, {TRAINED}, {NUMBERED} and {PACKED}",
        columns=[
            "rows of",
            "rows/read, trained",
            "numbered",
            "packed",
            "simulated",
            "rows/s, trained",
            "numbered",
            "packed",
            "limit, reads/s",
            "over limit, trained",
            "numbered",
            "packed",
        ],
        rows=rows,
    )


def _goals(found: dict[tuple[str, str], dict[str, Measured]]) -> list[Goal]:
    return [
        Goal(
            name=f"{name}, cached: {cached}: packed rows a read",
            value=round(layouts[PACKED].rows_per_page, 3),
            at_least=REACHED_BEFORE[name, cached],
        )
        for (name, cached), layouts in found.items()
        if (name, cached) in REACHED_BEFORE
    ] + [
        Goal(
            name=f"{name}, cached: {cached}: packed rows a second over the device's reads a second",
            value=round(layouts[PACKED].over_limit, 3),
            at_least=round(0.9 * AS_PUBLISHED[name, cached], 3),
        )
        for (name, cached), layouts in found.items()
        if (name, cached) in AS_PUBLISHED
    ]


if __name__ == "__main__":
    sys.exit(program("packing", run))
