"""How near do reads by address come to numpy.take on a flat memmap, when all pages are in the page cache?

Same rows, same batches, same number of threads, in turns.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from tierstore.plan.measure import page_cache

from .common import Goal, Report, Run, Spread, Table, measure, per_second, program
from .peers.lmdb_rows import LmdbRows
from .rowdata import Floats, Int64s, Rows, TierReader, build_flat, build_store, open_flat

__all__ = ["run"]

TAKE = "numpy.take, flat memmap"
PLAIN = "tierstore, not verified"
VERIFIED = "tierstore, every row verified"
KEYED = "py-lmdb getmulti, one key a row"

Rates = dict[str, Spread]


class Splitter:
    """Hands the parts of a batch to threads, the calling one included."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(threads - 1, 1), "warm")

    def run(self, read: Callable[[Int64s, int], None], ids: Int64s) -> None:
        """``read(part, first position of the part)`` for each part."""
        bounds = [len(ids) * part // self._threads for part in range(self._threads + 1)]
        others = [self._pool.submit(read, ids[a:b], a) for a, b in itertools.pairwise(bounds[1:])]
        read(ids[: bounds[1]], 0)
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()


def _touch_all(reader: TierReader, flat: Floats, batch: int) -> None:
    """Fault every page of both maps in, and see that both hold the same rows."""
    whole = len(flat) // batch * batch
    for start in range(0, whole, batch):
        ids = np.arange(start, start + batch)
        reader.read(ids)
        if not np.array_equal(reader.rows(), flat[start : start + batch]):
            raise RuntimeError(f"rows {start} to {start + batch} of the store are not those of the flat file")


def _measure(
    reader: TierReader, name: str, flat: Floats, config: dict[str, Any], threads: int
) -> dict[str, list[float]]:
    """Seconds of each batch read by the tier and by numpy.take, in turns."""
    generator = np.random.default_rng(config["seed"] + threads)
    batch = config["batch_rows"]
    target = np.empty((batch, flat.shape[1]), np.float32)
    ids = np.empty(batch, np.int64)

    def take(part: Int64s, start: int) -> None:
        # Without a check of bounds: with one numpy makes a copy of the result first.
        np.take(flat, part, axis=0, out=target[start : start + len(part)], mode="clip")

    def draw() -> None:
        ids[:] = generator.integers(0, len(flat), batch)

    with contextlib.closing(Splitter(threads)) as splitter:
        # Each draws a batch of its own: a second read of the same rows would find them in the processor's caches.
        actions: dict[str, Callable[[], object]] = {
            "draw 1": draw,
            TAKE: lambda: splitter.run(take, ids),
            "draw 2": draw,
            name: lambda: splitter.run(reader.read, ids),
        }
        measure(actions, repetitions=3)
        seconds = measure(actions, repetitions=config["repetitions"])
    return {key: seconds[key] for key in (TAKE, name)}


def _keyed_rate(request: Run, rows: Rows) -> Spread:
    """py-lmdb on one thread: it holds the GIL."""
    config = request.config
    generator = np.random.default_rng(config["seed"])
    with contextlib.closing(LmdbRows(request.folder, rows)) as keyed:
        page_cache.warm(keyed.path)
        count = config["batch_rows"] // 4
        read = {KEYED: lambda: keyed.read(generator.integers(0, rows.count, count))}
        measure(read, repetitions=2)
        return per_second(count, measure(read, repetitions=max(3, config["repetitions"] // 8))[KEYED])


def _rates(request: Run, rows: Rows) -> tuple[dict[int, Rates], dict[str, float]]:
    """Rates by thread count, and the medians of each contender over numpy.take in the same turns."""
    config = request.config
    batch = config["batch_rows"]
    store, flat_path = build_store(request.folder, rows), build_flat(request.folder, rows)
    flat = open_flat(flat_path, rows)
    page_cache.warm(flat_path)
    times: dict[int, dict[str, list[float]]] = {threads: {TAKE: []} for threads in config["threads"]}
    shares: dict[str, float] = {}
    for name, verify in ((PLAIN, False), (VERIFIED, True)):
        with contextlib.closing(TierReader(store, rows, batch, verify=verify)) as reader:
            page_cache.warm(reader.path)
            _touch_all(reader, flat, batch)
            for threads in config["threads"]:
                seconds = _measure(reader, name, flat, config, threads)
                times[threads][TAKE] += seconds[TAKE]
                times[threads][name] = seconds[name]
                shares[f"{name}, {threads}"] = float(np.median(seconds[TAKE]) / np.median(seconds[name]))
    rates = {
        threads: {name: per_second(batch, values) for name, values in by_name.items()}
        for threads, by_name in times.items()
    }
    return rates, shares


def _table(rates: dict[int, Rates], shares: dict[str, float], keyed: Spread | None, config: dict[str, Any]) -> Table:
    shown = []
    for threads, by_name in rates.items():
        for name, rate in by_name.items():
            share = shares.get(f"{name}, {threads}", 1.0)
            shown.append([name, str(threads), f"{rate.median / 1e6:.2f} M", f"{share:.2f}"])
    if keyed:
        share = keyed.median / rates[config["threads"][0]][TAKE].median
        shown.append([KEYED, "1", f"{keyed.median / 1e6:.2f} M", f"{share:.2f}"])
    return Table(
        title=f"page-cache-warm reads: {config['rows']:,} rows of {config['dim']} float32",
        columns=["read by", "threads", "rows/s", "of numpy.take"],
        rows=shown,
    )


def run(request: Run) -> Report:
    config = request.config
    rows = Rows.of(config)
    rates, shares = _rates(request, rows)
    keyed = _keyed_rate(request, rows) if config["peers"] else None
    goals = [
        Goal(
            name=f"{name}: rows a second over numpy.take's, {threads} thread{'s' if threads > 1 else ''}",
            value=round(shares[f"{name}, {threads}"], 3),
            at_least=wanted,
        )
        for name, wanted in ((PLAIN, 0.8), (VERIFIED, 0.55))
        for threads in config["threads"]
    ]
    return Report(
        question="How near do reads by address come to numpy.take on a flat memmap, all pages in the page cache?",
        tables=[_table(rates, shares, keyed, config)],
        figures={
            "rows_per_s": {
                str(threads): {name: asdict(rate) for name, rate in by_name.items()}
                for threads, by_name in rates.items()
            },
            "share_of_numpy_take": shares,
            "py_lmdb_rows_per_s": asdict(keyed) if keyed else None,
        },
        goals=goals,
        notes=[
            f"Batches of {config['batch_rows']:,} uniformly random rows into buffers that are reused, "
            f'{config["repetitions"]} repetitions in turns with numpy.take (mode="clip", its fastest). Before, every '
            "page of both maps was touched and every row of the store compared with the flat file's."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("warm", run))
