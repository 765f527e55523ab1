"""Part "record": what recording lookups costs those who look up."""

import dataclasses
from typing import Any, Final

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .overhead import Shape, measure_overhead

__all__ = ["PART"]


def _shapes(quick: bool) -> list[Shape]:
    rows = 2_000 if quick else 250_000
    tables: dict[str, Any] = {"tables": 8, "rows": rows, "dim": 64, "batch": 1024, "pooling_factor": 4}
    kaggle: dict[str, Any] = {"tables": 26, "rows": rows, "dim": 16, "batch": 2048, "pooling_factor": 1}
    return [
        Shape(name="tables alone, all rows in memory", **tables),
        Shape(name="tables alone, a tenth in memory", ddr="10% of tables", **tables),
        Shape(name="DLRM of the Kaggle shape, all rows in memory", has_model=True, **kaggle),
        Shape(name="DLRM of the Kaggle shape, lookups and model only", has_model=True, trains=False, **kaggle),
    ]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    steps = request.config["record_steps"]
    found = []
    for shape in _shapes(request.quick):
        folder = request.folder / "plan_record"
        measured = measure_overhead(shape, folder, steps=steps, warm_steps=max(1, steps // 10))
        print(f"  {shape.name}: {measured.share:+.2%}", flush=True)
        found.append(dataclasses.asdict(measured))
    return {"overheads": found}


def _tell(figures: dict[str, Any]) -> Told:
    rows = [
        [
            each["shape"]["name"], f"{1e3 * each['plain_s']['median']:.2f}", f"{1e6 * each['call_s']['median']:.0f}",
            f"{each['share']:.2%}", f"{each['ns_a_lookup']:.2f}", f"{each['share_by_difference']:+.1%}",
        ]
        for each in figures["overheads"]
    ]  # fmt: skip
    columns = ["step", "ms", "us of recording", "share", "ns an id", "by difference"]
    goals = [
        Goal(
            name=f"{each['shape']['name']}: % of a step that recording takes",
            value=round(100 * each["share"], 2),
            at_most=2,
        )
        for each in figures["overheads"]
    ]
    note = (
        "Recording: 1 % of the rows; its one call a batch, timed amid steps; medians. By difference: recorded steps "
        "beside others, by turns, with all the noise of steps."
    )
    return Told(tables=[Table(title="recording of lookups", columns=columns, rows=rows)], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)
