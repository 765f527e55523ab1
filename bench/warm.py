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
from .rowdata import Floats, Int64s, Rows, TierReader, build_flat, build_store, open_flat

__all__ = ["run"]

TAKE = "numpy.take, flat memmap"
_WANTED = {"tierstore, not verified": 0.8, "tierstore, every row verified": 0.55}


def _touch_all(reader: TierReader, flat: Floats, batch: int) -> None:
    """Fault every page of both maps in, and see that both hold the same rows."""
    for start in range(0, len(flat) // batch * batch, batch):
        reader.read(np.arange(start, start + batch))
        if not np.array_equal(reader.rows(), flat[start : start + batch]):
            raise RuntimeError(f"rows {start} to {start + batch} of the store are not those of the flat file")


def _measure(reader: TierReader, flat: Floats, config: dict[str, Any], threads: int) -> tuple[Spread, Spread, float]:
    """Rows a second of numpy.take and of the tier, in turns, and the tier's median over numpy's."""
    generator, batch = np.random.default_rng(config["seed"] + threads), config["batch_rows"]
    target, ids = np.empty((batch, flat.shape[1]), np.float32), np.empty(batch, np.int64)
    bounds = [batch * part // threads for part in range(threads + 1)]

    def take(part: Int64s, start: int) -> None:
        # Without a check of bounds: with one numpy makes a copy of the result first.
        np.take(flat, part, axis=0, out=target[start : start + len(part)], mode="clip")

    def draw() -> None:
        ids[:] = generator.integers(0, len(flat), batch)

    with ThreadPoolExecutor(threads) as pool:

        def split(read: Callable[[Int64s, int], None]) -> Callable[[], object]:
            """The batch's parts over threads, this one included."""

            def act() -> None:
                others = [pool.submit(read, ids[a:b], a) for a, b in itertools.pairwise(bounds[1:])]
                read(ids[: bounds[1]], 0)
                for other in others:
                    other.result()

            return act

        # Each draws a batch of its own: a second read of the same rows would find them in the processor's caches.
        actions = {"draw 1": draw, TAKE: split(take), "draw 2": draw, "tier": split(reader.read)}
        measure(actions, repetitions=3)
        seconds = measure(actions, repetitions=config["repetitions"])
    share = float(np.median(seconds[TAKE]) / np.median(seconds["tier"]))
    return per_second(batch, seconds[TAKE]), per_second(batch, seconds["tier"]), share


def run(request: Run) -> Report:
    config, rows = request.config, Rows.of(request.config)
    batch = config["batch_rows"]
    store, flat_path = build_store(request.folder, rows), build_flat(request.folder, rows)
    flat = open_flat(flat_path, rows)
    page_cache.warm(flat_path)
    shown, goals, figures = [], [], []
    for name, wanted in _WANTED.items():
        with contextlib.closing(TierReader(store, rows, batch, verify="not" not in name)) as reader:
            page_cache.warm(reader.path)
            _touch_all(reader, flat, batch)
            for threads in config["threads"]:
                take, tier, share = _measure(reader, flat, config, threads)
                shown.append(
                    [name, str(threads), f"{tier.median / 1e6:.2f} M", f"{take.median / 1e6:.2f} M", f"{share:.2f}"]
                )
                figures.append(
                    {"name": name, "threads": threads, "take": asdict(take), "tier": asdict(tier), "share": share}
                )
                of = f"{name}: rows a second over numpy.take's, {threads} thread{'s' if threads > 1 else ''}"
                goals.append(Goal(name=of, value=round(share, 3), at_least=wanted))
    return Report(
        question="How near do reads by address come to numpy.take on a flat memmap, all pages in the page cache?",
        tables=[
            Table(
                title=f"page-cache-warm reads: {config['rows']:,} rows of {config['dim']} float32",
                columns=["read by", "threads", "rows/s", "of numpy.take in turns", "over numpy.take"],
                rows=shown,
            )
        ],
        figures={"ways": figures},
        goals=goals,
        notes=[
            f"Batches of {batch:,} uniformly random rows into buffers that are reused, {config['repetitions']} "
            'repetitions in turns with numpy.take (mode="clip", its fastest). Before, every page of both maps was '
            "touched and every row of the store compared with the flat file's."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("warm", run))
