"""How near does a pooled lookup, all rows in memory, come to torch.nn.functional.embedding_bag over a plain tensor?

The tensor needs no step from id to row, and has no row that may be missing. Both check every id.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore

from .common import Goal, Report, Run, Spread, Table, measure, per_second, program
from .peers import fbgemm
from .workload import Batches, make_store

__all__ = ["run"]

OURS: Final = "tierstore"
TORCH: Final = "embedding_bag over a tensor"
FBGEMM: Final = "FBGEMM, table-batched"


class Point(NamedTuple):
    exponent: float
    dim: int
    batch: int
    rates: dict[str, Spread]

    @property
    def share(self) -> float:
        return self.rates[OURS].median / self.rates[TORCH].median


class OneBag(NamedTuple):
    """Microseconds of lookups of one bag."""

    dim: int
    us_p50: dict[str, float]
    us_p99: dict[str, float]


def _lookups(
    table: tierstore.Table, weights: torch.Tensor, theirs: Any, batches: Batches
) -> dict[str, Callable[[int], torch.Tensor]]:
    starts = batches.offsets[:-1]
    values, offsets = batches.values, batches.offsets
    found: dict[str, Callable[[int], torch.Tensor]] = {
        OURS: lambda index: table.pooled(values[index], offsets),
        TORCH: lambda index: torch.nn.functional.embedding_bag(values[index], weights, starts, mode="sum"),
    }
    if theirs is not None:
        found[FBGEMM] = lambda index: theirs.forward(values[index], offsets)
    return found


def _point(lookups: dict[str, Callable[[int], torch.Tensor]], batches: Batches, config: dict[str, Any]) -> Any:
    expected = lookups[TORCH](0)
    for name, lookup in lookups.items():
        if not torch.allclose(lookup(0), expected, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"{name} finds other sums than torch")
    # Calls of some microseconds are timed by the dozen.
    calls = max(1, 20_000 // batches.lookups)
    turn = {"index": 0}

    def action(lookup: Callable[[int], torch.Tensor]) -> Callable[[], object]:
        def call() -> None:
            for step in range(calls):
                lookup((turn["index"] + step) % batches.count)
            turn["index"] += 1

        return call

    actions: dict[str, Callable[[], object]] = {name: action(lookup) for name, lookup in lookups.items()}
    measure(actions, repetitions=3)
    seconds = measure(actions, repetitions=config["repetitions"])
    return {name: per_second(batches.lookups * calls, values) for name, values in seconds.items()}


def _one_bag(lookups: dict[str, Callable[[int], torch.Tensor]], count: int, batches: Batches, dim: int) -> OneBag:
    times: dict[str, list[float]] = {name: [] for name in lookups}
    for step in range(count):
        for name, lookup in lookups.items():
            start = time.perf_counter()
            lookup(step % batches.count)
            times[name].append(1e6 * (time.perf_counter() - start))
    quantiles = {name: np.percentile(values, [50, 99]).tolist() for name, values in times.items()}
    return OneBag(dim, {name: q[0] for name, q in quantiles.items()}, {name: q[1] for name, q in quantiles.items()})


def _measure(request: Run) -> tuple[list[Point], list[OneBag]]:
    config = request.config
    points, bags = [], []
    for dim in config["dims"]:
        path = request.folder / "lookup_store"
        shutil.rmtree(path, ignore_errors=True)
        shape = {"tables": 1, "rows": config["rows"], "ddr": config["ddr"]}
        with make_store(path, dim=dim, optimizer=tierstore.optim.SGD(lr=0.1), **shape) as store:
            table = store["t0"]
            weights = table.read(torch.arange(config["rows"]))
            theirs = fbgemm.Fbgemm([weights], optimizer="EXACT_SGD", lr=0.1, eps=0.0) if fbgemm.is_there() else None
            for exponent in config["exponents"]:
                for batch in config["batches"]:
                    batches = Batches(
                        tables=1, rows=config["rows"], batch=batch, pooling_factor=config["pooling_factor"],
                        exponent=exponent, count=config["distinct_batches"], seed=config["seed"],
                    )  # fmt: skip
                    lookups = _lookups(table, weights, theirs, batches)
                    points.append(Point(exponent, dim, batch, _point(lookups, batches, config)))
                    if batch == 1 and exponent:
                        bags.append(_one_bag(lookups, config["one_bag_repetitions"], batches, dim))
        shutil.rmtree(path)
    return points, bags


def _share_table(points: list[Point], config: dict[str, Any]) -> Table:
    rows = []
    for exponent in config["exponents"]:
        for dim in config["dims"]:
            own = {point.batch: point for point in points if (point.exponent, point.dim) == (exponent, dim)}
            cells = [f"{own[batch].share:.2f}" for batch in config["batches"]]
            rows.append([f"Zipf {exponent}" if exponent else "uniform", str(dim), *cells])
    columns = ["ids", "dim", *(f"{batch:,}" for batch in config["batches"])]
    return Table(title="lookups a second over those of embedding_bag, by bags a call", columns=columns, rows=rows)


def _rate_table(points: list[Point], config: dict[str, Any]) -> Table:
    largest = max(config["batches"])
    rows = [
        [
            f"Zipf {point.exponent}" if point.exponent else "uniform",
            str(point.dim),
            *(f"{rate.median / 1e6:.1f} M" for rate in point.rates.values()),
        ]
        for point in points
        if point.batch == largest
    ]
    return Table(
        title=f"lookups a second, {largest:,} bags a call", columns=["ids", "dim", *points[0].rates], rows=rows
    )


def run(request: Run) -> Report:
    config = request.config
    points, bags = _measure(request)
    goals = [
        Goal(
            name=f"lookups a second over embedding_bag's, {batch:,} bags a call, the worst of dims and ids",
            value=round(min(point.share for point in points if point.batch == batch), 3),
            at_least=0.9,
        )
        for batch in config["batches"]
    ]
    names = list(points[0].rates)
    one_bag = Table(
        title="microseconds of a lookup of one bag, p50 / p99",
        columns=["dim", *names],
        rows=[[str(b.dim), *(f"{b.us_p50[name]:.0f} / {b.us_p99[name]:.0f}" for name in names)] for b in bags],
    )
    return Report(
        question="How near does a pooled lookup, all rows in memory, come to torch's over a plain tensor?",
        tables=[_share_table(points, config), _rate_table(points, config), one_bag],
        figures={
            "points": [
                {
                    "exponent": point.exponent,
                    "dim": point.dim,
                    "batch": point.batch,
                    "share": point.share,
                    "lookups_per_s": {name: asdict(rate) for name, rate in point.rates.items()},
                }
                for point in points
            ],
            "one_bag": [bag._asdict() for bag in bags],
            "threads": len(os.sched_getaffinity(0)),
        },
        goals=goals,
        notes=[
            f"One table of {config['rows']:,} rows in float32, {config['pooling_factor']} ids a bag, "
            f"{config['repetitions']} repetitions in turns; all may use all threads. Both check every "
            "id, the table also whether its row is in memory."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("lookup", run))
