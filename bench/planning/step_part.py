"""Part "steps": predicted against measured hit rates and step times."""

import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import tierstore
from tierstore.plan import Host
from tierstore.plan.measure import measure
from tierstore.plan.prediction import in_words

from ..common import Goal, Run, Table
from ..data import find_criteo
from ..parts import Part, Told
from ..steps import StepWorkload, criteo, fill, zipf
from .validation import Point, hit_rate_of, points_of

__all__ = ["PART"]

_RMC2_TABLES, _RMC2_ROWS, _RMC2_LOOKUPS = 32, 500_000, 120


class _Case(NamedTuple):
    workload: StepWorkload
    exponent: float | None


def _cases(config: dict[str, Any]) -> Iterator[_Case]:
    exponent = config["exponent"]
    path = find_criteo()
    if path is not None:
        whole = config["criteo_passes"] * 80_000 // config["criteo_batch"]
        yield _Case(criteo(path, config, whole), None)
    yield _Case(zipf(config, exponent, config["zipf_steps"]), exponent)
    shape = {
        "tables": _RMC2_TABLES,
        "rows": int(_RMC2_ROWS * config["rmc2_scale"]),
        "batch": config["rmc2_batch"],
        "pooling_factor": _RMC2_LOOKUPS,
    }
    rmc2 = zipf(config | shape, exponent, config["rmc2_steps"])
    yield _Case(rmc2._replace(name=f"RMC2, rows x {config['rmc2_scale']:g}"), exponent)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    path = request.folder / "plan_store"
    points: list[Point] = []

    def host() -> Host:
        return measure(request.folder, seconds=request.config["machine_seconds"])

    for case in _cases(request.config):
        fill(path, case.workload, tierstore.optim.RowWiseAdagrad(lr=request.config["lr"]))
        points += points_of(path, case.workload, host, case.exponent, request.config)
    shutil.rmtree(path)
    spoken = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))}
    return {"points": [_plain(point) for point in points], "environment": spoken}


def _plain(point: Point) -> dict[str, Any]:
    analytic = point.analytic
    return {
        "workload": point.workload,
        "budget_percent": point.budget_percent,
        **point.measured._asdict(),
        "step_s_of_rounds": [run.step_s for run in point.runs],
        "predicted_hit_rate": hit_rate_of(point.predicted),
        "analytic_hit_rate": None if analytic is None else hit_rate_of(analytic),
        "predicted_step_s": point.predicted.step_s,
        "predicted_step_s_of_rounds": [prediction.step_s for prediction in point.predictions],
        "bottleneck": point.predicted.bottleneck,
        "loads": {load.resource: load.seconds for load in point.predicted.loads},
    }


def _tell(figures: dict[str, Any]) -> Told:
    points: list[dict[str, Any]] = figures["points"]
    hits = [100 * (each["predicted_hit_rate"] - each["hit_rate"]) for each in points]
    times = [100 * (each["predicted_step_s"] / each["step_s"] - 1) for each in points]
    goals = [
        Goal(name="points the predicted hit rate is off, on average", value=_mean(hits), at_most=1),
        Goal(name="points it is off at worst", value=round(max(map(abs, hits)), 3), at_most=2),
        Goal(name="% the predicted step time is off, on average", value=_mean(times), at_most=15),
    ]
    errors = [100 * (each["analytic_hit_rate"] - each["hit_rate"]) for each in points if each["analytic_hit_rate"]]
    formula = f"{_mean(errors)} points off on average, {max(map(abs, errors)):.2f} at worst" if errors else "none"
    note = f"{_NOTE} Hit rates predicted by Zipf's law alone, where it holds: {formula}."
    return Told(tables=[_table(points)], goals=goals, notes=[note])


def _mean(errors: Sequence[float]) -> float:
    return round(statistics.mean(map(abs, errors)), 3)


def _rate(point: dict[str, Any], key: str) -> str:
    return "" if point[key] is None else f"{point[key]:.2%}"


def _table(points: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            each["workload"], f"{each['budget_percent']:g} %", _rate(each, "hit_rate"),
            _rate(each, "predicted_hit_rate"),
            _rate(each, "analytic_hit_rate"), f"{1e3 * each['step_s']:.1f}",
            f"{1e3 * each['predicted_step_s']:.1f}", f"{each['predicted_step_s'] / each['step_s'] - 1:+.0%}",
            in_words(each["bottleneck"]),
        ]
        for each in points
    ]  # fmt: skip
    columns = [
        "workload", "DDR", "hits measured", "predicted", "by formula", "step ms measured", "predicted",
        "off", "bottleneck",
    ]  # fmt: skip
    return Table(title="training steps over host memory and SSD, predicted and measured", columns=columns, rows=rows)


_NOTE: Final = (
    "Steps: lookup, backward and row-wise Adagrad of the tables alone, batches fetched ahead; every row was written "
    "before, and the file is in the page cache. The first half of the batches fills the cache; the second is measured. "
    "Predicted is by the miss-ratio curve of that half, warm from the first, and by the costs that `tierstore plan "
    "measure` found on this machine, from other loops; with as many rows moved by cleaning as were, since runs are too "
    "short for it to be steady. Each workload is run in rounds, with costs measured before each, as others use the "
    "machine too; step times are the medians of the rounds."
)

PART: Final = Part(_measure, _tell)
