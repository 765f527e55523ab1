"""Does bringing rows in ahead pay, and does depth="auto" find out?"""

import contextlib
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any, Final

import tierstore
from tierstore.plan.measure import page_cache

from .common import Goal, Part, Report, Run, Table, Told, program, run_parts
from .steps import StepWorkload, fill, step_of, timed, zipf
from .workload import read_every_row

__all__ = ["run"]

DEPTHS: Final = (0, 2, "auto")
PLACES: Final = ("in memory", "page cached", "cold")


def _measure_ahead(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, path = request.config, request.folder / "pipeline_store"
    points = []
    for batch, steps in zip(config["batches"], config["steps"], strict=True):
        workload = zipf(config | {"batch": batch}, config["exponent"], steps)._replace(is_model=True)
        fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
        for place in PLACES:
            seconds: dict[str, list[float]] = {str(depth): [] for depth in DEPTHS}
            for _repetition in range(config["repetitions"]):
                for depth in DEPTHS:
                    seconds[str(depth)].append(_mean_step(path, workload, place, depth))
            points.append(
                {"batch": batch, "place": place}
                | {f"depth_{depth}_s": statistics.median(each) for depth, each in seconds.items()}
            )
            print(points[-1], flush=True)
    shutil.rmtree(path)
    return {"points": points}


def _mean_step(path: Path, workload: StepWorkload, place: str, depth: Any) -> float:
    """Of the steps after the first quarter."""
    ddr = workload.table_bytes * (2 if place == "in memory" else 0.05) + 2**22
    with tierstore.open(path, mode="w", ddr=int(ddr)) as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = step_of(module, workload)
        if place == "in memory":
            for table in store.tables.values():
                read_every_row(table)
        (page_cache.drop if place == "cold" else page_cache.warm)(path / "rows.lmdb")
        with contextlib.closing(timed(module, step, workload.batches, depth)) as steps:
            seconds = list(steps)
        store.rollback(store.version)
    return statistics.mean(seconds[len(seconds) // 4 :])


def _tell_ahead(found: dict[str, Any]) -> Told:
    rows, goals = [], []
    for point in found["points"]:
        times = [point[f"depth_{depth}_s"] for depth in DEPTHS]
        ratio = min(times[:2]) / times[2]
        cells = [f"{1e3 * each:.2f}" for each in times]
        rows.append([f"{point['batch']:,}", point["place"], *cells, f"{times[0] / times[1]:.2f}", f"{ratio:.2f}"])
        name = f"auto over the better of 0 and 2, batch {point['batch']:,}, {point['place']}"
        goals.append(Goal(name=name, value=round(ratio, 3), at_least=0.97))
    columns = ["batch", "rows", *(f"depth {depth}, ms" for depth in DEPTHS), "2 over 0", "auto over the better"]
    return Told(tables=[Table(title="steps a second by depth", columns=columns, rows=rows)], goals=goals)


PARTS: Final = {"ahead": Part(_measure_ahead, _tell_ahead)}


def run(request: Run) -> Report:
    return run_parts(request, 'Does bringing rows in ahead pay, and does depth="auto" find out?', PARTS)


if __name__ == "__main__":
    sys.exit(program("pipeline", run, parts=tuple(PARTS)))
