"""Predicted against measured: hit rates and step times of training over tiers, at several budgets."""

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import tierstore
from tierstore.plan import Host, MissRatioCurve, Prediction, Setup, TableShape, Workload, accesses_of
from tierstore.plan.curves import windows
from tierstore.plan.demand import Demand
from tierstore.plan.model import predict
from tierstore.trace import TableTrace, Trace

from ..steps import CHUNK, StepWorkload, step_of, timed

__all__ = ["ROWS_FILE", "Point", "fully_measured", "points_of", "trace_of", "workload_of"]

ROWS_FILE: Final = "rows.lmdb"
MINIMUM_BYTES: Final = 2**20
_DENSE_FLOPS: Final = 0.0
"""Steps are of the tables alone."""


class Measured(NamedTuple):
    """Of one budget: means over the steps that counted."""

    ddr_bytes: int
    hit_rate: float
    step_s: float
    rows_read: float
    blocks_written: float


class Point(NamedTuple):
    """One budget of one workload.

    Attributes:
        predicted: by the trace of the very lookups, whole.
        sampled: by a sample of its rows.
        analytic: by Zipf's law alone; None where the lookups are none of it.
    """

    workload: str
    budget_percent: float
    measured: Measured
    predicted: Prediction
    sampled: Prediction
    analytic: Prediction | None


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


def workload_of(workload: StepWorkload, exponent: float) -> Workload:
    """The same, as the planner is told of it."""
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
        optimizer="rowwise_adagrad",
        dense_flops=_DENSE_FLOPS,
    )


def _newest_half(accesses: Any, policy: str, /, *, sampling_rate: float) -> MissRatioCurve:
    """The curve of the second half, the cache being warm from the first: what is measured too."""
    return windows(accesses, policy, 2, sampling_rate=sampling_rate)[-1].curve


def fully_measured(path: Path, workload: StepWorkload, percent: float, config: dict[str, Any]) -> Measured:
    """Train on the first half of the batches, then measure over the second.

    What the first half wrote is on its way to the device when the second begins, and what the second wrote when it
    ends: as at any moment of a long run.
    """
    budget = max(int(workload.table_bytes * percent / 100), MINIMUM_BYTES)
    half = len(workload.batches) // 2
    with tierstore.open(path, mode="w", ddr=budget, policy=config["policy"], threads=config["threads"]) as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = step_of(module, workload)
        with contextlib.closing(timed(module, step, workload.batches[:half], config["depth"])) as before:
            for _ in before:
                pass
        began, start = store.stats(), time.perf_counter()
        steps = len(list(timed(module, step, workload.batches[half:], config["depth"])))
        seconds, ended = time.perf_counter() - start, store.stats()
        page = store["t0"].layout.page_bytes
    unique = ended.ddr.unique - began.ddr.unique
    return Measured(
        budget,
        (ended.ddr.hits - began.ddr.hits) / max(unique, 1),
        seconds / steps,
        (ended.ssd.lookups - began.ssd.lookups) / steps,
        (ended.ssd.bytes_written - began.ssd.bytes_written) / page / steps,
    )


def points_of(
    path: Path, workload: StepWorkload, host: Host, exponent: float | None, config: dict[str, Any]
) -> list[Point]:
    """All budgets of a workload whose rows are in the store at ``path``, in the page cache."""
    shape = workload_of(workload, 0.0 if exponent is None else exponent)
    accesses = accesses_of(trace_of(workload))
    rates = (1.0, config["curve_sampling_rate"])
    exact, sampled = (
        Demand.from_accesses(shape, accesses, config["policy"], sampling_rate=rate, make_curve=_newest_half)
        for rate in rates
    )
    analytic = None if exponent is None else Demand.analytic(shape, config["policy"])
    points = []
    for percent in config["budgets"]:
        measured = fully_measured(path, workload, percent, config)
        setup = Setup(
            workload=shape,
            host=host,
            ddr_bytes=measured.ddr_bytes,
            page_cache_bytes=config["page_cache_gib"] * 2**30,
            policy=config["policy"],
            prefetch_depth=config["depth"],
            threads=config["threads"],
        )
        predictions = [None if demand is None else predict(setup, demand) for demand in (exact, sampled, analytic)]
        points.append(Point(workload.name, percent, measured, *predictions))  # type: ignore[arg-type]
        _show(points[-1])
    return points


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
