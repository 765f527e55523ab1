"""How do lookups go with the size of the table, of the cache and of the batch, and with threads?

Pooled lookups in a table nothing of which was ever written, so that rows that are not in the cache are computed and the
device has no part. One thing changes at a time; the rest is as the configuration's first lines say.
"""

import shutil
import sys
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tierstore

from .common import Goal, Report, Run, Spread, Table, measure, per_second, program
from .workload import make_store

__all__ = ["power_law_ids", "run"]

_SCATTER: Final = 2_654_435_761
"""A prime above any number of rows here, so that multiplying by it modulo that number permutes the rows."""
_SWEEPS: Final = {"rows": "rows of the table", "ddr": "DDR", "bags": "bags a call", "threads": "threads"}


class Point(NamedTuple):
    """One setting, and lookups a second with it."""

    sweep: str
    value: int | str
    exponent: float
    rate: Spread
    hit_rate: float


def power_law_ids(generator: np.random.Generator, rows: int, count: int, exponent: float) -> NDArray[np.int64]:
    """Ids of ``rows`` rows, by the continuous power law of that exponent, scattered; 0 for uniform.

    Inverts the distribution function instead of summing it up, so ``rows`` may be a thousand million. 1 is no exponent.
    """
    if not exponent:
        return generator.integers(0, rows, count)
    power = 1 - exponent
    ranks = (1 + generator.random(count) * ((rows + 1.0) ** power - 1)) ** (1 / power)
    scattered: NDArray[np.int64] = (np.minimum(ranks.astype(np.int64) - 1, rows - 1) * _SCATTER) % rows
    return scattered


def _batches(setting: dict[str, Any], exponent: float) -> list[Tensor]:
    generator = np.random.default_rng(setting["seed"])
    count = setting["bags"] * setting["pooling_factor"]
    return [
        torch.from_numpy(power_law_ids(generator, setting["rows"], count, exponent)) for _ in range(setting["batches"])
    ]


def _point(request: Run, sweep: str, value: int | str, exponent: float) -> Point:
    setting = request.config | {sweep: value}
    path = request.folder / "growth_store"
    shutil.rmtree(path, ignore_errors=True)
    shape = {name: setting[name] for name in ("rows", "dim", "ddr", "threads")}
    batches = _batches(setting, exponent)
    offsets = torch.arange(0, len(batches[0]) + 1, setting["pooling_factor"])
    turn = 0
    # Calls of some microseconds are timed by the dozen.
    calls = max(1, 20_000 // len(batches[0]))
    with make_store(path, tables=1, optimizer=tierstore.optim.SGD(lr=0.1), **shape) as store:

        def look_up() -> None:
            nonlocal turn
            for _ in range(calls):
                store["t0"].pooled(batches[turn % len(batches)], offsets)
                turn += 1

        measure({"warm up": look_up}, repetitions=-(-len(batches) // calls))
        before = store.stats().ddr
        seconds = measure({"look up": look_up}, repetitions=setting["repetitions"])["look up"]
        after = store.stats().ddr
    shutil.rmtree(path)
    hits = (after.hits - before.hits) / (after.unique - before.unique)
    return Point(sweep, value, exponent, per_second(len(batches[0]) * calls, seconds), hits)


def _ids(exponent: float) -> str:
    return f"Zipf {exponent}" if exponent else "uniform"


def _show(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _table(sweep: str, points: list[Point]) -> Table:
    mine = [point for point in points if point.sweep == sweep]
    return Table(
        title=f"lookups by {_SWEEPS[sweep]}",
        columns=[_SWEEPS[sweep], "ids", "lookups/s", "lowest - highest", "distinct rows found in DDR"],
        rows=[
            [
                _show(point.value),
                _ids(point.exponent),
                f"{point.rate.median / 1e6:.2f} M",
                f"{point.rate.lowest / 1e6:.2f} - {point.rate.highest / 1e6:.2f} M",
                f"{point.hit_rate:.1%}",
            ]
            for point in mine
        ],
    )


def run(request: Run) -> Report:
    config = request.config
    points = [
        _point(request, sweep, value, exponent)
        for sweep in _SWEEPS
        for exponent in config["exponents"]
        for value in config["sweeps"][sweep]
    ]
    of_rows = [point for point in points if point.sweep == "rows" and not point.exponent]
    less, more = of_rows[-2:]
    return Report(
        question="How do lookups go with the size of the table, of the cache and of the batch, and with threads?",
        tables=[_table(sweep, points) for sweep in _SWEEPS],
        figures={"points": [point._asdict() | {"rate": asdict(point.rate)} for point in points]},
        goals=[
            Goal(
                name=f"uniform ids: lookups a second in {_show(more.value)} rows over {_show(less.value)}",
                value=round(more.rate.median / less.rate.median, 3),
                at_least=0.8,
            )
        ],
        notes=[
            f"Where it is not what changes: {config['rows']:,} rows of {config['dim']} float32, {config['ddr']} of "
            f"DDR, {config['bags']:,} bags of {config['pooling_factor']} ids a call, {config['threads']} threads; "
            f"{config['repetitions']} repetitions over {config['batches']} batches. Rows that are not in DDR are "
            "computed, as they were never written."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("growth", run))
