"""How near does a pooled lookup, all rows in memory, come to torch's over a plain tensor?

By torch.nn.functional.embedding_bag. The tensor needs no step from id to row, and has no row that may be missing. Both
check every id.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

import tierstore

from .common import Goal, Report, Run, Spread, Table, fresh_folder, measure, per_second, start
from .peers import fbgemm
from .workload import Batches, make_store

__all__ = ["run"]

OURS: Final = "tierstore"
TORCH: Final = "embedding_bag over a tensor"
FBGEMM: Final = "FBGEMM, table-batched"
Lookups = dict[str, Callable[[int], torch.Tensor]]


class Point(NamedTuple):
    exponent: float
    dim: int
    batch: int
    share: float
    """Lookups a second, of torch's."""
    lookups_per_s: dict[str, Spread]

    @property
    def cells(self) -> list[str]:
        return [f"Zipf {self.exponent}" if self.exponent else "uniform", str(self.dim)]


def _lookups(table: tierstore.Table, weights: torch.Tensor, theirs: Any, batches: Batches) -> Lookups:
    values, offsets, starts = batches.values, batches.offsets, batches.offsets[:-1]
    found: Lookups = {
        OURS: lambda index: table.pooled(values[index], offsets),
        TORCH: lambda index: torch.nn.functional.embedding_bag(values[index], weights, starts, mode="sum"),
    }
    if theirs is not None:
        found[FBGEMM] = lambda index: theirs.forward(values[index], offsets)
    for name, lookup in found.items():
        if not torch.allclose(lookup(0), found[TORCH](0), rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"{name} finds other sums than torch")
    return found


def _rates(lookups: Lookups, batches: Batches, repetitions: int) -> dict[str, Spread]:
    # Calls of some microseconds are timed by the dozen.
    calls = max(1, 20_000 // batches.lookups)
    turn = 0

    def action(lookup: Callable[[int], torch.Tensor]) -> Callable[[], object]:
        def call() -> None:
            nonlocal turn
            for step in range(calls):
                lookup((turn + step) % batches.count)
            turn += 1

        return call

    actions = {name: action(lookup) for name, lookup in lookups.items()}
    seconds = measure(actions, repetitions=repetitions, warm_up=3)
    return {name: per_second(batches.lookups * calls, values) for name, values in seconds.items()}


def _measure(request: Run) -> list[Point]:
    config = request.config
    points, rows = [], config["rows"]
    for dim in config["dims"]:
        with (
            fresh_folder(request.folder / "lookup_store") as path,
            make_store(path, rows=rows, ddr=config["ddr"], dim=dim, optimizer=tierstore.optim.SGD(lr=0.1)) as store,
        ):
            table = store["t0"]
            weights = table.read(torch.arange(rows))
            theirs = fbgemm.Fbgemm([weights], optimizer="EXACT_SGD", lr=0.1, eps=0.0) if fbgemm.is_there() else None
            for exponent, batch in itertools.product(config["exponents"], config["batches"]):
                batches = Batches(
                    tables=1, rows=rows, batch=batch, pooling_factor=config["pooling_factor"], exponent=exponent,
                    count=config["distinct_batches"], seed=config["seed"],
                )  # fmt: skip
                rates = _rates(_lookups(table, weights, theirs, batches), batches, config["repetitions"])
                points.append(Point(exponent, dim, batch, rates[OURS].median / rates[TORCH].median, rates))
    return points


def _tables(points: list[Point], config: dict[str, Any]) -> list[Table]:
    shares, largest, names = [], max(config["batches"]), list(points[0].lookups_per_s)
    for exponent, dim in itertools.product(config["exponents"], config["dims"]):
        own = [point for point in points if (point.exponent, point.dim) == (exponent, dim)]
        shares.append([*own[0].cells, *(f"{point.share:.2f}" for point in own)])
    rates = [
        [*point.cells, *(f"{rate.median / 1e6:.1f} M" for rate in point.lookups_per_s.values())]
        for point in points
        if point.batch == largest
    ]
    by_batch = ["ids", "dim", *(f"{batch:,}" for batch in config["batches"])]
    return [
        Table("lookups a second over those of embedding_bag, by bags a call", by_batch, shares),
        Table(f"lookups a second, {largest:,} bags a call", ["ids", "dim", *names], rates),
    ]


def run(request: Run) -> Report:
    config, points = request.config, _measure(request)
    worst = {batch: min(point.share for point in points if point.batch == batch) for batch in config["batches"]}
    name = "lookups a second over embedding_bag's, {:,} bags a call, the worst of dims and ids"
    goals = [Goal(name.format(batch), round(share, 3), at_least=0.9) for batch, share in worst.items()]
    note = (
        f"One table of {config['rows']:,} rows in float32, {config['pooling_factor']} ids a bag, "
        f"{config['repetitions']} repetitions in turns; all may use all threads. Both check every "
        "id, the table also whether its row is in memory."
    )
    figures = {"points": points, "threads": len(os.sched_getaffinity(0))}
    return Report(_tables(points, config), goals, [note], figures)


if __name__ == "__main__":
    start("lookup")
