"""How many rows a second go back to the device while others are read at full speed, and what is written for them?

Every step reads a batch of random rows that are not in memory and overwrites them, so that each evicts as many newer
rows as it brings in. Then everything is committed, waited for or in the background with steps beside it. What a commit
holds training up by is told by ``bench.commit``.
"""

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tierstore

from . import diskio, oscache
from .common import Goal, Report, Run, Spread, Table, program
from .device import direct_reader
from .workload import ids_of, seeded_init

__all__ = ["run"]

_LIMIT_DEPTH = 64


class Period(NamedTuple):
    """What happened in a stretch of time."""

    seconds: float
    rows_read: int
    rows_written: int
    segment_bytes: int
    """Of segments that were appended, those of cleaning too, by the store's own count."""
    process_bytes: int
    """Dirtied by the process (/proc/self/io)."""
    device_bytes: int | None
    """Written to the device by everyone."""


class _Meter:
    """Differences of the counters of a store, its process and its device between calls."""

    def __init__(self, store: tierstore.Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._last = self._now()

    def _now(self) -> tuple[float, Any, diskio.DiskBytes, diskio.DiskBytes | None]:
        device = diskio.of_device(self._folder)
        return time.perf_counter(), self._store.stats().ssd, diskio.of_process(), device

    def period(self) -> Period:
        """Since the last call."""
        (began, ssd, process, device), self._last = self._last, self._now()
        ended, ssd_now, process_now, device_now = self._last
        return Period(
            ended - began,
            ssd_now.lookups - ssd.lookups,
            ssd_now.rows_written - ssd.rows_written,
            ssd_now.bytes_written + ssd_now.bytes_moved - ssd.bytes_written - ssd.bytes_moved,
            (process_now - process).written,
            (device_now - device).written if device is not None and device_now is not None else None,
        )


class _Case(NamedTuple):
    """One way in which ids are drawn."""

    name: str
    row_bytes: int
    reads_per_s: Spread
    limit_reads_per_s: Spread
    steady: list[Period]
    waited: list[Period]
    background: list[Period]


def _table(store: tierstore.Store, config: dict[str, Any]) -> tierstore.Table:
    return store.create_table(
        tierstore.TableConfig(
            name="item",
            num_embeddings=config["rows"],
            embedding_dim=config["dim"],
            init=seeded_init(),
            optimizer=tierstore.optim.RowWiseAdagrad(lr=0.05),
        )
    )


class _Work:
    """Steps over one table: random rows read, changed and written."""

    def __init__(self, store: tierstore.Store, config: dict[str, Any], exponent: float) -> None:
        self._table = _table(store, config)
        self._config = config
        self._generator = np.random.default_rng(config["seed"])
        self._exponent = exponent

    def fill(self) -> None:
        rows = self._config["rows"]
        step = 200_000
        for start in range(0, rows, step):
            ids = torch.arange(start, min(start + step, rows))
            self._table.write(ids, torch.zeros(len(ids), self._config["dim"]))

    def ids(self) -> torch.Tensor:
        drawn = ids_of(self._generator, self._config["rows"], self._config["batch_rows"], self._exponent)
        return torch.from_numpy(drawn)

    def read(self) -> float:
        """Rows read a second, none changed."""
        ids = self.ids()
        start = time.perf_counter()
        self._table.read(ids)
        return len(ids) / (time.perf_counter() - start)

    def steps(self, count: int) -> None:
        for _ in range(count):
            ids = self.ids()
            self._table.write(ids, self._table.read(ids) + 1)


def _limit(path: Path, config: dict[str, Any]) -> list[float]:
    """4 KiB reads a second of the device, direct, at queue depth 64."""
    generator = np.random.default_rng(config["seed"])
    found = []
    with direct_reader(path, _LIMIT_DEPTH) as reader:
        for _ in range(3):
            start = time.perf_counter()
            reader.read(reader.random_offsets(generator, config["batch_rows"]))
            found.append(config["batch_rows"] / (time.perf_counter() - start))
    return found


def _measure(config: dict[str, Any], folder: Path, name: str, exponent: float) -> _Case:
    steady, waited, background = [], [], []
    path = folder / "rows.lmdb"
    with tierstore.open(folder, ddr=config["ddr"]) as store:
        work = _Work(store, config, exponent)
        work.fill()
        store.commit()
        row_bytes = store["item"].layout.stored_row_words * 8
        oscache.drop(path)
        reads = [work.read() for _ in range(5)]
        limit = _limit(path, config)
        work.steps(config["steps"])
        for _ in range(config["repetitions"]):
            oscache.drop(path)
            meter = _Meter(store, folder)
            work.steps(config["steps"])
            steady.append(meter.period())
            store.commit()
            waited.append(meter.period())
            work.steps(config["steps"])
            meter.period()
            pending = store.commit_async()
            while not pending.done():
                work.steps(1)
            pending.result()
            background.append(meter.period())
    return _Case(name, row_bytes, Spread.of(reads), Spread.of(limit), steady, waited, background)


def _apart(request: Run, name: str, exponent: float) -> _Case:
    folder = request.folder / "writeback"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return _measure(request.config, folder, name, exponent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(case: _Case, name: str, periods: list[Period]) -> list[str]:
    def amplified(total: int | None) -> str:
        return "" if total is None or not rows else f"{total / (rows * case.row_bytes):.1f}"

    rows = sum(each.rows_written for each in periods)
    read = Spread.of([each.rows_read / each.seconds for each in periods])
    wrote = Spread.of([each.rows_written / each.seconds for each in periods])
    device = [each.device_bytes for each in periods]
    return [
        case.name,
        name,
        f"{1000 * statistics.median(each.seconds for each in periods):,.0f}",
        f"{read.median:,.0f}",
        f"{wrote.median:,.0f}",
        amplified(sum(each.segment_bytes for each in periods)),
        amplified(sum(each.process_bytes for each in periods)),
        amplified(None if None in device else sum(each for each in device if each is not None)),
    ]


def _figures(case: _Case) -> dict[str, Any]:
    return {
        "row_bytes": case.row_bytes,
        "cold_reads_per_s": case.reads_per_s.median,
        "limit_reads_per_s": case.limit_reads_per_s.median,
        **{
            name: [each._asdict() for each in periods]
            for name, periods in (("steady", case.steady), ("waited", case.waited), ("background", case.background))
        },
    }


def run(request: Run) -> Report:
    config = request.config
    cases = [_apart(request, f"Zipf {x}" if x else "uniform", x) for x in config["exponents"]]
    rows = [
        row
        for case in cases
        for row in (
            _row(case, "steps", case.steady),
            _row(case, "commit, waited for", case.waited),
            _row(case, "commit beside steps", case.background),
        )
    ]
    uniform = next(case for case in cases if case.name == "uniform")
    moved = statistics.median((each.rows_read + each.rows_written) / each.seconds for each in uniform.steady)
    return Report(
        question="How many rows a second go back while others are read at full speed, and what is written for them?",
        tables=[
            Table(
                title=f"{config['rows']:,} rows of {config['dim']} float32, {config['ddr']} of DDR; bytes written over "
                "bytes of the rows that went back",
                columns=[
                    "ids",
                    "while",
                    "ms",
                    "rows read/s",
                    "rows written/s",
                    "appended",
                    "dirtied by the process",
                    "written by the device",
                ],
                rows=rows,
            )
        ],
        figures={case.name: _figures(case) for case in cases},
        goals=[
            Goal(
                name="uniform ids: rows read and written back a second, of the device's 4 KiB reads a second",
                value=round(moved / uniform.limit_reads_per_s.median, 3),
                at_least=0.5,
            )
        ],
        notes=[
            f"Steps of {config['batch_rows']:,} rows, {config['steps']} between commits, {config['repetitions']} "
            f"repetitions; a stored row has {uniform.row_bytes} bytes. Appended: bytes of segments, cleaning included. "
            "The page cache was dropped before the steps. Reading alone, none changed: "
            f"{uniform.reads_per_s.median:,.0f} rows a second; the device, direct reads of 4 KiB at queue depth 64: "
            f"{uniform.limit_reads_per_s.median:,.0f}. The device's bytes are everyone's, and those of pages dirtied "
            "before may come later: the system writes them when it likes, and at commits."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("writeback", run))
