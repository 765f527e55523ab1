"""Predicted against measured: hit rates and step times of training over tiers, at several budgets."""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import tierstore
from tierstore.plan import Accesses, Host, MissRatioCurve, Prediction, Setup, TableShape, Workload, accesses_of
from tierstore.plan.curves import curve
from tierstore.plan.demand import Demand
from tierstore.plan.dense import DenseWork
from tierstore.plan.model import predict
from tierstore.plan.tiers import pool_loads
from tierstore.plan.workload import OptimizerName
from tierstore.trace import TableTrace, Trace

from ..steps import CHUNK, StepWorkload, step_of, timed

__all__ = [
    "Measured",
    "Point",
    "as_cleaned",
    "fully_measured",
    "hit_rate_of",
    "measured",
    "newest_half",
    "points_of",
    "trace_of",
    "warm_pages",
    "workload_of",
]

ROWS_FILE: Final = "rows.lmdb"
MINIMUM_BYTES: Final = 2**20


class Measured(NamedTuple):
    """One run with one budget: means over the steps that counted."""

    ddr_bytes: int
    hit_rate: float
    step_s: float
    rows_read: float
    pages_read: float
    rows_written: float
    rows_moved: float


class Point(NamedTuple):
    """One budget of one workload.

    Attributes:
        runs: one in each round.
        predictions: by the trace of the very lookups, whole, and by the costs that were measured before each round.
        analytic: by Zipf's law alone; None where the lookups are none of it.
    """

    workload: str
    budget_percent: float
    runs: tuple[Measured, ...]
    predictions: tuple[Prediction, ...]
    analytic: Prediction | None

    @property
    def measured(self) -> Measured:
        """The run whose steps took longer than half of the others'."""
        return sorted(self.runs, key=lambda run: run.step_s)[len(self.runs) // 2]

    @property
    def predicted(self) -> Prediction:
        """Likewise."""
        return sorted(self.predictions, key=lambda prediction: prediction.step_s)[len(self.predictions) // 2]


def trace_of(workload: StepWorkload) -> Trace:
    """What the batches look up."""
    tables: dict[str, list[Any]] = {f"t{table}": [] for table in range(len(workload.rows))}
    lengths: dict[str, list[Any]] = {name: [] for name in tables}
    samples = workload.batches[0].stride()
    for batch in workload.batches:
        values, offsets = batch.values().numpy(), batch.offsets().numpy()
        for table, name in enumerate(tables):
            own = offsets[table * samples : (table + 1) * samples + 1]
            tables[name].append(values[own[0] : own[-1]])
            lengths[name].append(np.diff(own))
    found = {
        name: TableTrace(np.concatenate(tables[name]), np.append(0, np.cumsum(np.concatenate(lengths[name]))))
        for name in tables
    }
    return Trace(tables=found, batch_samples=samples)


def workload_of(
    workload: StepWorkload,
    exponent: float,
    optimizer: OptimizerName = "rowwise_adagrad",
    dense: DenseWork | None = None,
) -> Workload:
    """The same, as the planner is told of it; without ``dense`` steps of the tables alone."""
    samples = workload.batches[0].stride()
    lookups = statistics.mean(len(batch.values()) for batch in workload.batches)
    factor = lookups / samples / len(workload.rows)
    return Workload(
        name=workload.name,
        tables=tuple(
            TableShape(
                name=f"t{number}",
                num_embeddings=rows,
                embedding_dim=workload.dim,
                pooling_factor=factor,
                exponent=exponent,
            )
            for number, rows in enumerate(workload.rows)
        ),
        batch_samples=samples,
        optimizer=optimizer,
        **({} if dense is None else dense._asdict()),
    )


def newest_half(accesses: Accesses, policy: str) -> MissRatioCurve:
    """The curve of the second half, the cache being warm from the first: what is measured too."""
    return curve(accesses, policy, skip=accesses.num_batches // 2)


def fully_measured(path: Path, workload: StepWorkload, percent: float, config: dict[str, Any]) -> Measured:
    """Train on the first half of the batches, then measure over the second.

    What the first half wrote is on its way to the device when the second begins, and what the second wrote when it
    ends: as at any moment of a long run.
    """
    budget = max(int(workload.table_bytes * percent / 100), MINIMUM_BYTES)
    with tierstore.open(path, mode="w", ddr=budget, policy=config["policy"], threads=config["threads"]) as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        return measured(budget, store, module, step_of(module, workload), workload.batches, config["depth"])


def measured(
    budget: int, store: tierstore.Store, module: Any, step: Callable[[Any], None], batches: list[Any], depth: int
) -> Measured:
    """Train on the first half of the batches; means over the second.

    Args:
        budget: of the store, whose rows the module looks up.
    """
    half = len(batches) // 2
    with contextlib.closing(timed(module, step, batches[:half], depth)) as before:
        for _ in before:
            pass
    began, start = store.stats(), time.perf_counter()
    steps = len(list(timed(module, step, batches[half:], depth)))
    seconds, ended = time.perf_counter() - start, store.stats()
    page = next(iter(store.tables.values())).layout.page_bytes
    unique = ended.ddr.unique - began.ddr.unique
    return Measured(
        budget,
        (ended.ddr.hits - began.ddr.hits) / max(unique, 1),
        seconds / steps,
        (ended.ssd.lookups - began.ssd.lookups) / steps,
        (ended.ssd.bytes_read - began.ssd.bytes_read) / page / steps,
        (ended.ssd.rows_written - began.ssd.rows_written) / steps,
        (ended.ssd.rows_moved - began.ssd.rows_moved) / steps,
    )


def points_of(
    path: Path,
    workload: StepWorkload,
    measure: Callable[[], Host],
    exponent: float | None,
    config: dict[str, Any],
) -> list[Point]:
    """All budgets of a workload whose rows are in the store at ``path``; they are read into the page cache.

    Args:
        measure: finds this machine's costs; asked before each round of runs, as others use the machine too, so that it
            is as fast as it just was and not as it was in another part.
    """
    shape = workload_of(workload, 0.0 if exponent is None else exponent)
    accesses = accesses_of(trace_of(workload))
    exact = Demand.from_accesses(shape, accesses, config["policy"], make_curve=newest_half)
    analytic = None if exponent is None else Demand.analytic(shape, config["policy"])
    hosts: list[Host] = []
    runs: dict[float, list[Measured]] = {percent: [] for percent in config["budgets"]}
    for _ in range(config["step_rounds"]):
        hosts.append(measure())
        warm_pages(path / ROWS_FILE)
        for percent, of_budget in runs.items():
            of_budget.append(fully_measured(path, workload, percent, config))
            print(f"  {workload.name}, {percent:g} %: {1e3 * of_budget[-1].step_s:.1f} ms a step", flush=True)
    points = []
    for percent, of_budget in runs.items():
        setups = [
            Setup(
                workload=shape,
                host=host,
                ddr_bytes=of_budget[0].ddr_bytes,
                page_cache_bytes=config["page_cache_gib"] * 2**30,
                policy=config["policy"],
                prefetch_depth=config["depth"],
                threads=config["threads"],
            )
            for host in hosts
        ]
        points.append(
            Point(
                workload=workload.name,
                budget_percent=percent,
                runs=tuple(of_budget),
                predictions=tuple(
                    predict(as_cleaned(setup, exact, run.rows_moved), exact)
                    for setup, run in zip(setups, of_budget, strict=True)
                ),
                analytic=None if analytic is None else predict(setups[0], analytic),
            )
        )
        _show(points[-1])
    return points


def as_cleaned(setup: Setup, demand: Demand, moved_rows: float) -> Setup:
    """With as much cleaning as was measured: a run is too short for it to be steady.

    Args:
        moved_rows: a step, of a rank.
    """
    steady = sum(pool.rows_moved for pool in pool_loads(setup.of_a_rank, demand.laid_out(setup.workload)))
    return replace(setup, cleaning=moved_rows / steady if steady else 0.0)


def hit_rate_of(prediction: Prediction) -> float:
    """Of host memory."""
    return next(tier.hit_rate for tier in prediction.tiers if tier.tier == "ddr")


def _show(point: Point) -> None:
    print(
        f"  {point.workload}, {point.budget_percent:g} %: hits {point.measured.hit_rate:.4f} measured, "
        f"{hit_rate_of(point.predicted):.4f} predicted; step {1e3 * point.measured.step_s:.1f} ms measured, "
        f"{1e3 * point.predicted.step_s:.1f} predicted ({point.predicted.bottleneck})",
        flush=True,
    )


def warm_pages(path: Path) -> None:
    """Read the file of rows into the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(CHUNK):
            pass
