"""Is a training step over tiers no slower than its compute, or than the device needs for its pages?

Steps of the tables alone (lookup, backward, optimizer), rows of later batches brought in ahead; of the Criteo-Kaggle
shape also of the whole model, with the MLPs of the published DLRM baseline. Steps that do not count go before, which
fill the cache and bring the row file to its steady size. The row file is put into the page cache before them, or
out of it behind them, and then read past it, as one that is larger than memory.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import tierstore
from tierstore.io.lmdb import LmdbColdTier
from tierstore.plan.measure import page_cache

from . import device
from .common import Goal, Part, Report, Run, Table, fresh_folder, run_parts, start
from .rowdata import take_as_large
from .steps import StepWorkload, criteo, fill, kaggle, step_of, timed, zipf
from .workload import read_every_row

ROWS_FILE: Final = "rows.lmdb"
PAGE_BYTES: Final = 4096
_CRITEO: Final = "Criteo's lookups"
Point = dict[str, Any]
"""A workload under one budget: means over steps, and "rows_in_ddr" (share of the rows that the cache holds),
"cleaning_read" and "cleaning_written" (pages, beside "pages_read" and "pages_written"), "dirtied" (bytes of pages
written, cleaning included, for a byte of the rows that were evicted), "file_bytes" (of the row file, over bytes of all
rows and their state)."""


class _Case(NamedTuple):
    """A workload under one budget, its store filled."""

    workload: StepWorkload
    percent: float
    is_cached: bool = False


_Cases = Callable[[dict[str, Any], Path], Iterator[_Case]]


def _budget(path: Path, workload: StepWorkload, percent: float) -> int:
    """Bytes of DDR. Of Criteo's lookups those with which the cache holds that share of the rows."""
    if percent >= 100:
        return workload.table_bytes * 3 // 2  # all in memory takes some bytes a row beside the rows
    budget = max(int(workload.table_bytes * percent / 100), 2**22)
    if workload.name != _CRITEO:
        return budget
    wanted, low, high = sum(workload.rows) * percent / 100, budget, 4 * budget
    while high - low > 2**16:
        middle = (low + high) // 2
        with tierstore.open(path, mode="w", ddr=middle) as store:
            store["t0"].read(torch.zeros(1, dtype=torch.int64))
            is_enough = store.stats().ddr.capacity_rows >= wanted
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _point(path: Path, case: _Case, config: dict[str, Any]) -> Point:
    workload = case.workload
    steps = len(workload.batches) // 2 if workload.name == _CRITEO else config["steps"]
    with tierstore.open(path, mode="w", ddr=_budget(path, workload, case.percent)) as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = step_of(module, workload)
        before_them = workload.batches[:-steps]
        if case.is_cached:  # before the steps that do not count: their reads map the pages, at some 4 us for 16
            page_cache.warm(path / ROWS_FILE)
        if case.percent >= 100:
            before_them = before_them[:3]
            for table in store.tables.values():
                read_every_row(table)
        for _ in timed(module, step, before_them, config["depth"]):
            pass
        if not case.is_cached:  # as a file that is larger than memory
            page_cache.drop(path / ROWS_FILE)
            assert isinstance(store._cold, LmdbColdTier)
            take_as_large(store._cold)
        before, cpu = store.stats(), time.process_time()
        seconds = list(timed(module, step, workload.batches[-steps:], config["depth"]))
        after, cpu = store.stats(), time.process_time() - cpu

        def a_step(tier: str, name: str) -> float:
            now, then = (getattr(getattr(stats, tier), name) for stats in (after, before))
            return float(now - then) / steps

        evicted = a_step("ssd", "rows_written") * (4 * workload.dim + 4)
        written = a_step("ssd", "bytes_written") + a_step("ssd", "bytes_moved")
        return {
            "workload": workload.name,
            "budget_percent": case.percent,
            "is_cached": case.is_cached,
            "rows_in_ddr": after.ddr.capacity_rows / sum(workload.rows),
            "step_s": statistics.mean(seconds),
            "cpu_s": cpu / steps,
            "hit_rate": a_step("ddr", "hits") / max(a_step("ddr", "unique"), 1 / steps),
            "rows_read": a_step("ssd", "lookups"),
            "pages_read": a_step("ssd", "bytes_read") / PAGE_BYTES,
            "rows_written": a_step("ssd", "rows_written"),
            "pages_written": a_step("ssd", "bytes_written") / PAGE_BYTES,
            "cleaning_read": a_step("ssd", "pages_moved"),
            "cleaning_written": a_step("ssd", "bytes_moved") / PAGE_BYTES,
            "dirtied": written / evicted if evicted else 0.0,
            "file_bytes": os.path.getsize(path / ROWS_FILE) / workload.table_bytes,
        }


def _device_seconds(point: Point, limit: dict[str, float]) -> float:
    """For the pages that were asked for, and those written, whether or not they were in the page cache."""
    written = (point["pages_written"] + point["cleaning_written"]) * PAGE_BYTES
    read = point["pages_read"] + point["cleaning_read"]
    return float(read / limit["reads_per_s"] + written / limit["written_bytes_per_s"])


def _budgets(workload: StepWorkload, path: Path, config: dict[str, Any]) -> Iterator[_Case]:
    for percent in config["budgets"]:
        fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
        yield _Case(workload, percent)


def _zipf(config: dict[str, Any], path: Path) -> Iterator[_Case]:
    for exponent in config["exponents"]:
        yield from _budgets(zipf(config, exponent, config["warm_steps"] + config["steps"]), path, config)


def _criteo(config: dict[str, Any], path: Path) -> Iterator[_Case]:
    yield from _budgets(criteo(config, config["criteo_steps"]), path, config)


def _kaggle(config: dict[str, Any], path: Path) -> Iterator[_Case]:
    workload = kaggle(config, config["warm_steps"] + config["steps"])
    model = workload._replace(name="Criteo-Kaggle's model, Zipf 1.05", is_model=True)
    fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
    for each in (workload, model):
        for percent, is_cached in ((1, False), (1, True), (100, False)):
            yield _Case(each, percent, is_cached)


def _measure(cases: _Cases, request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    points, limits = list[Point](), list[tuple[float, float]]()
    with fresh_folder(request.folder / "tiers_store") as path:
        for case in cases(request.config, path):
            points.append(_point(path, case, request.config))
            limits.append((device.reads_per_s(path / ROWS_FILE), device.written_bytes_per_s(request.folder)))
    reads, written = map(statistics.median, zip(*limits, strict=True))
    limit = {"reads_per_s": reads, "written_bytes_per_s": written}
    compute = {point["workload"]: point["step_s"] for point in points if point["budget_percent"] >= 100}
    for point in points:
        point["roofline_s"] = max(compute[point["workload"]], _device_seconds(point, limit))
    return {"device": limit, "points": points}


_COLUMNS: Final = [
    "ids", "DDR", "rows in DDR", "hits", "step ms", "CPU ms", "rows read", "pages read", "rows evicted",
    "pages written", "cleaning read / written", "dirtied for a byte", "file over rows", "roofline ms",
]  # fmt: skip


def _row(point: Point) -> list[str]:
    name = f"{point['workload']}, in the page cache" if point["is_cached"] else point["workload"]
    counts = [f"{point[key]:,.0f}" for key in ("rows_read", "pages_read", "rows_written", "pages_written")]
    return [
        name, f"{point['budget_percent']:g} %", f"{point['rows_in_ddr']:.1%}", f"{point['hit_rate']:.1%}",
        f"{1e3 * point['step_s']:.1f}", f"{1e3 * point['cpu_s']:.1f}", *counts,
        f"{point['cleaning_read']:,.0f} / {point['cleaning_written']:,.0f}", f"{point['dirtied']:.2f}",
        f"{point['file_bytes']:.2f}", f"{1e3 * point['roofline_s']:.1f}",
    ]  # fmt: skip


def _goals(name: str, whole: Point, own: list[Point]) -> Iterator[Goal]:
    """Of one workload with all rows in memory, and under the smaller budgets."""
    worst = max(point["step_s"] / point["roofline_s"] for point in own if not point["is_cached"])
    yield Goal(f"{name}: the worst step over its roofline", round(worst, 3), at_most=1.15)
    dirtied = max(point["dirtied"] for point in own)
    yield Goal(f"{name}: bytes dirtied for one of an evicted row", round(dirtied, 2), at_most=2.5)
    for point in own if name.startswith("Criteo-Kaggle's model") else ():
        where = "in the page cache" if point["is_cached"] else "on the device"
        goal = f"{name}: speed with 1 % in DDR and the pages {where}, of all in DDR"
        least = 0.95 if point["is_cached"] else 0.8
        yield Goal(goal, round(whole["step_s"] / point["step_s"], 3), at_least=least)
    for point in own:
        if point["is_cached"] and name.startswith("Criteo-Kaggle's tables"):
            more = round(1e3 * (point["cpu_s"] - whole["cpu_s"]), 1)
            yield Goal(f"{name}: ms of a processor for rows that miss, pages cached", more, at_most=6)
    if name == _CRITEO:
        useful = min(point["rows_read"] / point["pages_read"] for point in own)
        yield Goal(f"{name}: rows that a page read brings", round(useful, 2), at_least=2.4)


def _tell(title: str, note: str, figures: dict[str, Any]) -> Report:
    points, limit, goals = figures["points"], figures["device"], list[Goal]()
    gives = (
        f"The device reads {limit['reads_per_s']:,.0f} pages a second at queue depth {device.DEPTH}, and writes "
        f"{limit['written_bytes_per_s'] / 2**20:,.0f} MiB a second, one after the other."
    )
    for name in dict.fromkeys(point["workload"] for point in points):
        own = [point for point in points if point["workload"] == name]
        (whole,) = (point for point in own if point["budget_percent"] == 100)
        goals += _goals(name, whole, [point for point in own if point is not whole])
    table = Table(f"{title}: a step, by how much of the tables is in DDR", _COLUMNS, list(map(_row, points)))
    return Report([table], goals, [f"{note} {gives}"])


def run(request: Run) -> Report:
    config = request.config
    notes = {
        "zipf": f"Zipf: {config['tables']} tables of {config['rows']:,} rows of {config['dim']}, {config['batch']:,} "
        f"samples of {config['pooling_factor']} ids a table; {config['steps']} steps after {config['warm_steps']}.",
        "criteo": f"Criteo's lookups, {config['criteo_batch']:,} samples a batch, ids hashed and samples shuffled: the "
        f"second half of {config['criteo_steps']} steps.",
        "kaggle": f"Criteo-Kaggle's tables times {config['kaggle_scale']:g}, {config['kaggle_batch']:,} samples a "
        f"batch: {config['steps']} steps after {config['warm_steps']}.",
    }
    parts = {name: Part(partial(_measure, cases), partial(_tell, name, notes[name])) for name, cases in PARTS.items()}
    report = run_parts(request, parts)
    report.notes.append(
        f"Row-wise Adagrad, {config['depth']} batches brought in ahead; every row was written and committed before the "
        "first step. Pages and rows are of a step. Roofline: the larger of a step with every row in DDR, and of what "
        "the device needs for the pages read and written, as if none were in the page cache. Where all rows are in DDR "
        "every lookup is a hit, and repeated ids are counted as often as they come; else once a batch."
    )
    return report


PARTS: Final[dict[str, _Cases]] = {"zipf": _zipf, "criteo": _criteo, "kaggle": _kaggle}


if __name__ == "__main__":
    start("tiers")
