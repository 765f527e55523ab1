"""What a prediction would be were one thing, or two, another; all else staying."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from .demand import Demand
from .host import Host
from .prediction import Prediction, Setup
from .result import Grid, Line

__all__ = ["Predict", "batch_line", "ddr_line", "ddr_sizes", "exponent_line", "grid_of"]

Predict = Callable[[Setup, Demand], Prediction]
"""``model.predict`` with its other arguments given."""

_GRID_SIZES: Final = 9
_FACTORS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SHIFTS: Final = (-0.2, -0.1, 0.0, 0.1, 0.2)
_BATCH_FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_LEAST: Final = 1024
"""The smallest budget is one of so many parts of all rows."""


def ddr_sizes(setup: Setup, steps: int = 2) -> tuple[float, ...]:
    """Budgets around the setup's, which is among them: from a thousandth of a host's rows to all of them and more.

    Args:
        steps: to each doubling.
    """
    whole = setup.workload.table_bytes / setup.hosts
    low, high = min(setup.ddr_bytes, whole / _LEAST), max(2 * setup.ddr_bytes, 1.5 * whole)
    first = math.floor(steps * math.log2(low / setup.ddr_bytes))
    last = math.ceil(steps * math.log2(high / setup.ddr_bytes))
    return tuple(setup.ddr_bytes * 2 ** (power / steps) for power in range(first, last + 1))


def ddr_line(setup: Setup, demand: Demand, predict: Predict) -> Line:
    """Over the budget of host memory; beyond what the host has, as if it had more."""
    at, sizes = with_ddr_of(setup), ddr_sizes(setup)
    return _line("DDR for rows", "bytes", sizes, setup.ddr_bytes, lambda size: predict(at(size), demand))


def with_ddr_of(setup: Setup) -> Callable[[float], Setup]:
    """The setup with another budget, in a host that has room for it."""

    def changed(ddr_bytes: float) -> Setup:
        more = max(0.0, ddr_bytes - setup.ddr_bytes)
        ddr = replace(setup.host.ddr, capacity_bytes=setup.host.ddr.capacity_bytes + more)
        return replace(setup, ddr_bytes=ddr_bytes, host=replace(setup.host, ddr=ddr))

    return changed


def _reads_per_s(host: Host) -> float:
    return sum(drive.reads_per_s for drive in host.storage)


def _with_reads(setup: Setup, factor: float) -> Setup:
    drives = tuple(replace(drive, reads_per_s=max(1.0, drive.reads_per_s * factor)) for drive in setup.host.storage)
    return replace(setup, host=replace(setup.host, storage=drives))


def _line(
    quantity: str, unit: str, values: Iterable[float], chosen: float, predicted: Callable[[float], Prediction]
) -> Line:
    """Values at which nothing can be predicted, such as too little memory for a store to begin with, are left out."""
    found: dict[float, Prediction] = {}
    for value in values:
        with contextlib.suppress(ValueError):
            found[value] = predicted(value)
    seconds = [{load.resource: load.seconds for load in each.loads if load.seconds} for each in found.values()]
    names = dict.fromkeys(name for each in seconds for name in each)
    return Line(
        quantity,
        unit,
        tuple(found),
        tuple(prediction.step_s for prediction in found.values()),
        tuple(prediction.samples_per_s for prediction in found.values()),
        {name: tuple(each.get(name, 0.0) for each in seconds) for name in names},
        chosen,
    )


def batch_line(setup: Setup, policy: str, predict: Predict) -> Line:
    """Over the samples of a batch; by the law of the tables, since a trace has its own batches."""

    def predicted(samples: float) -> Prediction:
        workload = replace(setup.workload, batch_samples=int(samples))
        return predict(replace(setup, workload=workload), Demand.analytic(workload, policy))

    now = setup.workload.batch_samples
    values = sorted({float(max(1, round(now * factor))) for factor in _BATCH_FACTORS})
    return _line("batch", "samples", values, float(now), predicted)


def exponent_line(setup: Setup, policy: str, predict: Predict) -> Line:
    """Over how uneven the accesses are: the exponents of all tables, moved together."""

    def predicted(shift: float) -> Prediction:
        tables = tuple(replace(each, exponent=max(0.0, each.exponent + shift)) for each in setup.workload.tables)
        workload = replace(setup.workload, tables=tables)
        return predict(replace(setup, workload=workload), Demand.analytic(workload, policy))

    return _line("change of all exponents", "", _SHIFTS, 0.0, predicted)


def grid_of(setup: Setup, demand: Demand, predict: Predict) -> Grid | None:
    """Budgets of memory by reads of the drives; None without drives."""
    now = _reads_per_s(setup.host)
    at = with_ddr_of(setup)
    able = _line("", "", ddr_sizes(setup, 1), 0.0, lambda size: predict(at(size), demand)).values
    # The plan's own is among the most, and what is smallest changes least.
    sizes = able[-_GRID_SIZES:]
    if not now or len(sizes) < 2:
        return None
    rows = tuple(
        tuple(predict(_with_reads(at(size), factor), demand).samples_per_s for size in sizes) for factor in _FACTORS
    )
    return Grid(tuple(sizes), tuple(now * factor for factor in _FACTORS), rows, setup.ddr_bytes, now)
