"""Do cold reads run at the device's own random-read limit?

Batches of random rows from a store that is not in memory: the page cache is dropped before each. The limit is how many
4 KiB pages the device gives a second to direct reads of the store's own file at queue depth 64, in turns with the
batches.
"""

import contextlib
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import oscache
from .common import Goal, Report, Run, Spread, Table, per_second, program
from .device import DirectReader, direct_reader
from .peers.lmdb_rows import LmdbRows
from .rowdata import Int64s, Rows, TierReader, build_flat, build_store, open_flat

__all__ = ["run"]

OWN = "tierstore, every row verified"
LIMIT = "device limit: direct reads of 4 KiB, queue depth 64"
LIMIT_DEPTH = 64


class Contender(NamedTuple):
    """Something that reads batches of rows from a file that is out of the page cache."""

    name: str
    path: Path
    read: Callable[[Int64s], object]
    batch_rows: int


def _peers(request: Run, rows: Rows, stack: contextlib.ExitStack) -> list[Contender]:
    if not request.config["peers"]:
        return []
    # These take a page fault a row, one after another: a smaller batch tells as much.
    batch = request.config["batch_rows"] // 4
    flat_path = build_flat(request.folder, rows)
    flat = open_flat(flat_path, rows, mmap.MADV_RANDOM)
    keyed = LmdbRows(request.folder, rows)
    stack.callback(keyed.close)
    return [
        Contender("numpy.take, flat memmap, MADV_RANDOM", flat_path, lambda ids: np.take(flat, ids, axis=0), batch),
        Contender("py-lmdb getmulti, one key a row", keyed.path, keyed.read, batch),
    ]


class Measured(NamedTuple):
    limit: list[float]
    seconds: dict[str, list[float]]
    resident_share_max: float


def _measure(contenders: list[Contender], device: DirectReader, config: dict[str, Any]) -> Measured:
    generator = np.random.default_rng(config["seed"])
    limit: list[float] = []
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    resident = 0.0
    for _ in range(config["repetitions"] + 1):
        oscache.drop(contenders[0].path)
        offsets = device.random_offsets(generator, config["limit_reads"])
        start = time.perf_counter()
        device.read(offsets)
        limit.append(time.perf_counter() - start)
        for each in contenders:
            ids = generator.integers(0, config["rows"], each.batch_rows)
            oscache.drop(each.path)
            resident = max(resident, oscache.resident_share(each.path))
            start = time.perf_counter()
            each.read(ids)
            seconds[each.name].append(time.perf_counter() - start)
    # The first round compiles kernels and starts threads.
    return Measured(limit[1:], {name: times[1:] for name, times in seconds.items()}, resident)


def _report(measured: Measured, contenders: list[Contender], config: dict[str, Any], pages_per_row: float) -> Report:
    store_bytes = contenders[0].path.stat().st_size
    limit = per_second(config["limit_reads"], measured.limit)
    rates = {each.name: per_second(each.batch_rows, measured.seconds[each.name]) for each in contenders}
    share = rates[OWN].median / limit.median
    # Each batch against the limit right before it: a device shared with others has good and bad moments.
    shares = Spread.of(
        [
            (config["batch_rows"] / own) / (config["limit_reads"] / device)
            for own, device in zip(measured.seconds[OWN], measured.limit, strict=True)
        ]
    )
    shown = [
        [
            name,
            *(f"{value:,.0f}" for value in (rate.median, rate.lowest, rate.highest)),
            f"{rate.median / limit.median:.2f}",
        ]
        for name, rate in {LIMIT: limit, **rates}.items()
    ]
    return Report(
        question="Do cold reads run at the device's own random-read limit?",
        tables=[
            Table(
                title=f"cold reads: {config['rows']:,} rows of {config['dim']} float32, {store_bytes / 1e9:.2f} GB",
                columns=["read by", "rows or reads/s", "lowest", "highest", "of the limit"],
                rows=shown,
            )
        ],
        figures={
            "limit_reads_per_s": asdict(limit),
            "rows_per_s": {name: asdict(rate) for name, rate in rates.items()},
            "share_of_limit": share,
            "share_of_limit_batch_by_batch": asdict(shares),
            "pages_per_row": pages_per_row,
            "store_bytes": store_bytes,
            "resident_share_max": measured.resident_share_max,
        },
        goals=[
            Goal(name="rows a second over the device's reads a second", value=round(share, 3), at_least=0.9),
            Goal(name="GB of the store's row file", value=round(store_bytes / 1e9, 2), at_least=2),
        ],
        notes=[
            f"Batches of {config['batch_rows']:,} random rows, one thread; {config['repetitions']} repetitions. "
            f"A row cost {pages_per_row:.3f} page reads, as rows of one batch may share a page. Before each batch the "
            "file was put out of every map and out of the page cache; at most "
            f"{measured.resident_share_max:.2%} of it stayed (mincore)."
        ],
    )


def run(request: Run) -> Report:
    config = request.config
    rows = Rows.of(config)
    with contextlib.ExitStack() as stack:
        store = build_store(request.folder, rows)
        reader = TierReader(store, rows, config["batch_rows"], verify=True)
        stack.callback(reader.close)
        own = Contender(OWN, reader.path, reader.read, config["batch_rows"])
        contenders = [own, *_peers(request, rows, stack)]
        device = stack.enter_context(direct_reader(own.path, LIMIT_DEPTH))
        measured = _measure(contenders, device, config)
        counted = reader.tier.counters()
        return _report(measured, contenders, config, counted.pages_read / counted.rows_read)


if __name__ == "__main__":
    sys.exit(program("cold", run))
