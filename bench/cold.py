"""Do cold reads run at the device's own random-read limit?

At what cost, and what do they read that nobody asked for? Batches of random rows from a store that is not in memory:
the page cache is dropped before each. The limits are how many 4 KiB pages fio reads a second of the store's own file at
queue depth 64, past the page cache and by way of it, in turns with the batches. So the store is read both ways: as one
that is larger than memory, and as one that memory has room for. A store of several tables is read in a call for each of
them, one after another.
"""

import contextlib
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from tierstore.plan.measure import page_cache

from . import device
from .common import Goal, Report, Run, Table, per_second, start
from .peers import rocksdb_rows
from .peers.rocksdb_rows import RocksdbRows
from .rowdata import Int64s, Rows, TierReader, build_flat, build_store, open_flat

OWN: Final = "tierstore, every row verified"
CACHED: Final = "tierstore, by way of the page cache"
LIMIT: Final = "fio, the device's limit: direct reads of 4 KiB, queue depth 64"
LIMIT_CACHED: Final = "fio, the same by way of the page cache"
LIMITS: Final = {OWN: LIMIT, CACHED: LIMIT_CACHED}
ROCKSDB: Final = "RocksDB MultiGet, one key a row, a thread a core"
ROCKSDB_MANY: Final = "RocksDB MultiGet, one key a row, 32 threads"
MANY_THREADS: Final = 32


class _Contender(NamedTuple):
    """Something that reads batches of rows from files that are out of the page cache."""

    name: str
    paths: list[Path]
    read: Callable[[Int64s], object]
    batch_rows: int


class _Taken(NamedTuple):
    """By a batch: seconds by the clock and of a processor, bytes from the device, and the share of a file that stayed
    in the page cache before."""

    elapsed: float
    processor: float
    bytes_read: int = 0
    resident: float = 0.0


def _peers(request: Run, rows: Rows, names: list[str], stack: contextlib.ExitStack) -> list[_Contender]:
    batch, found = request.config["batch_rows"], []
    if "rocksdb" in names and rocksdb_rows.is_there():
        for name, threads in ((ROCKSDB, len(os.sched_getaffinity(0))), (ROCKSDB_MANY, MANY_THREADS)):
            keyed = RocksdbRows(request.folder, rows, threads=threads)
            stack.callback(keyed.close)
            found.append(_Contender(name, keyed.paths, keyed.read, batch))
    # It takes a page fault a row, one after another: a smaller batch tells as much.
    if "numpy" in names:
        path = build_flat(request.folder, rows)
        flat = open_flat(path, rows, mmap.MADV_RANDOM)
        take = "numpy.take, flat memmap, MADV_RANDOM"
        found.append(_Contender(take, [path], lambda ids: np.take(flat, ids, axis=0), batch // 4))
    return found


def _round(contenders: list[_Contender], rows: int, generator: np.random.Generator, reads: int) -> dict[str, _Taken]:
    """A batch of each contender, by its name, and so many reads by fio."""
    found, process, store = {}, psutil.Process(), contenders[0].paths[0]
    for limit in LIMITS.values():
        page_cache.drop(store)
        found[limit] = _Taken(*device.read_seconds(store, reads, direct=limit == LIMIT))
    for own in contenders:
        ids, resident = generator.integers(0, rows, own.batch_rows), 0.0
        for path in own.paths:
            page_cache.drop(path)
            resident = max(resident, device.resident_share(path))
        before, begun, processor = process.io_counters().read_bytes, time.perf_counter(), time.process_time()
        own.read(ids)
        seconds = time.perf_counter() - begun, time.process_time() - processor
        found[own.name] = _Taken(*seconds, process.io_counters().read_bytes - before, resident)
    return found


def _case(request: Run, given: dict[str, Any]) -> dict[str, Any]:
    """What was measured of one store, by contender where it is a dict: "share" are pages that tierstore read a second,
    of its limit right before each batch, the median; "processor_us" of a row, or of one of fio's reads;
    "amplification" bytes from the device over bytes of the rows asked for."""
    config, tables = request.config, given["tables"]
    rows, batch, reads = Rows.of(config | given), config["batch_rows"], config["limit_reads"]
    generator = np.random.default_rng(config["seed"])
    with contextlib.ExitStack() as stack:
        store = build_store(request.folder, rows, tables)
        contenders = []
        for name in (CACHED, OWN):
            reader = TierReader(store, rows, batch, verify=True, tables=tables, direct=name == OWN)
            stack.callback(reader.close)
            contenders.append(_Contender(name, [reader.path], reader.read_by_table, batch))
        contenders += _peers(request, rows, given["peers"], stack)
        rounds = [_round(contenders, rows.count, generator, reads) for _ in range(config["repetitions"] + 1)]
        counted = reader.tier.counters()
        store_bytes = reader.path.stat().st_size
    series = {name: [each[name] for each in rounds[1:]] for name in rounds[0]}  # the first one compiles and warms up
    sizes = {each.name: each.batch_rows for each in contenders}
    rates = {name: per_second(sizes.get(name, reads), [own.elapsed for own in taken]) for name, taken in series.items()}
    pages = counted.pages_read / counted.rows_read
    shares = {
        name: statistics.median(
            (batch * pages / own.elapsed) / (reads / most.elapsed)
            for own, most in zip(series[name], series[limit], strict=True)
        )
        for name, limit in LIMITS.items()
    }
    medians = {name: _Taken(*map(statistics.median, zip(*taken, strict=True))) for name, taken in series.items()}
    return {
        "name": f"dim {rows.dim}, {tables} table{'s' * (tables > 1)}",
        "dim": rows.dim,
        "store_bytes": store_bytes,
        "rates": rates,
        "share": shares,
        "processor_us": {name: 1e6 * own.processor / sizes.get(name, reads) for name, own in medians.items()},
        "pages_per_row": pages,
        "amplification": {name: medians[name].bytes_read / (size * rows.dim * 4) for name, size in sizes.items()},
        "resident_share_max": max(own.resident for taken in series.values() for own in taken),
    }


def _rates(cases: list[dict[str, Any]]) -> Table:
    rows = []
    for case in cases:
        for name, rate in case["rates"].items():
            limit = case["rates"][LIMITS.get(name, LIMIT)]
            spread = f"{rate['lowest']:,.0f} - {rate['highest']:,.0f}"
            costs = [f"{rate['median'] / limit['median']:.2f}", f"{case['processor_us'][name]:.1f}"]
            asked = f"{case['amplification'][name]:.1f}" if name in case["amplification"] else ""
            rows.append([case["name"], name, f"{rate['median']:,.0f}", spread, *costs, asked])
    columns = ["rows", "read by", "rows or reads/s", "lowest - highest", "of the limit", "processor us a row or read"]
    return Table("cold reads", [*columns, "bytes read, of asked"], rows)


def _goals(cases: list[dict[str, Any]]) -> Iterator[Goal]:
    for case in cases:
        for name, share in case["share"].items():
            yield Goal(f"{case['name']}, {name}: pages read a second, of fio's", round(share, 3), at_least=0.95)
    for case in cases:
        if ROCKSDB in case["rates"]:
            times = round(case["rates"][OWN]["median"] / case["rates"][ROCKSDB]["median"], 2)
            yield Goal(f"{case['name']}: rows a second over RocksDB's", times, at_least=2)
    for case in cases:
        for name in case["share"]:
            of_page = case["processor_us"][name] / case["pages_per_row"]
            value = round(of_page / case["processor_us"][LIMITS[name]], 2)
            yield Goal(f"{case['name']}, {name}: processor's time a page, over fio's", value, at_most=1.15)
    yield Goal("GB of the largest row file", round(max(case["store_bytes"] for case in cases) / 1e9, 2), at_least=2)


def run(request: Run) -> Report:
    config = request.config
    cases = [_case(request, given) for given in config["cases"]]
    sizes = "; ".join(
        f"{given['rows']:,} rows, {case['store_bytes'] / 1e9:.2f} GB, {case['pages_per_row']:.3f} pages a row "
        f"({case['name']})"
        for given, case in zip(config["cases"], cases, strict=True)
    )
    notes = [
        f"Batches of {config['batch_rows']:,} random rows, one thread of tierstore; {config['repetitions']} "
        "repetitions in turns. The limit of reads by way of the page cache is fio's by way of it, of all others its "
        "direct reads. Goals compare each batch with the limit right before it and count pages, as rows of "
        f"one batch may share a page: {sizes}. Before each batch the files were put out of every map "
        f"and out of the page cache; at most {max(case['resident_share_max'] for case in cases):.2%} of one stayed "
        "(mincore). Bytes read are the process's own (/proc/self/io).",
        "RocksDB: compacted, blocks of 4 KiB, 8 MiB of block cache, Bloom filters of 10 bits a key, indexes and "
        f"filters in memory, direct reads, nothing compressed; {len(os.sched_getaffinity(0))} cores. More threads "
        "keep more reads in flight; tierstore does so from one."
        if rocksdb_rows.is_there()
        else "RocksDB is not there: `make peers` brings it.",
    ]
    return Report([_rates(cases)], [*_goals(cases)], notes, {"cases": cases})


if __name__ == "__main__":
    start("cold")
