"""Is a training step over tiers no slower than its compute, or than the device reads and writes the pages of it?

Steps of the tables alone (lookup, backward, optimizer), rows of later batches brought in ahead; of the Criteo-Kaggle
shape also of the whole model, with the MLPs of the published DLRM baseline. Steps that do not count go before, which
fill the cache and bring the row file to its steady size. The row file is put into the page cache before them, or
out of it behind them, and then read past it, as one that is larger than memory.
"""

import os
import shutil
import statistics
import sys
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
from .common import Goal, Part, Report, Run, Table, Told, program, run_parts
from .data import CRITEO_NAME, find_criteo
from .rowdata import take_as_large
from .steps import StepWorkload, criteo, fill, kaggle, step_of, timed, zipf
from .workload import read_every_row

__all__ = ["run"]

ROWS_FILE: Final = "rows.lmdb"
PAGE_BYTES: Final = 4096


class Point(NamedTuple):
    """Means over steps.

    Attributes:
        rows_in_ddr: share of the rows that the cache holds.
        cleaning_read, cleaning_written: pages, beside ``pages_read`` and ``pages_written``.
        dirtied: bytes of pages written, cleaning included, for a byte of the rows that were evicted.
        file_bytes: of the row file, over bytes of all rows and their state.
    """

    workload: str
    budget_percent: float
    is_cached: bool
    rows_in_ddr: float
    step_s: float
    cpu_s: float
    hit_rate: float
    rows_read: float
    pages_read: float
    rows_written: float
    pages_written: float
    cleaning_read: float
    cleaning_written: float
    dirtied: float
    file_bytes: float


class _Case(NamedTuple):
    """A workload under one budget."""

    path: Path
    workload: StepWorkload
    percent: float
    is_cached: bool = False


_Cases = Callable[[Run, Path], Iterator[_Case]]
"""Yields each with its store filled."""


def _budget(path: Path, workload: StepWorkload, percent: float) -> int:
    """Bytes of DDR. Of Criteo's lookups those with which the cache holds that share of the rows."""
    if percent >= 100:
        return workload.table_bytes * 3 // 2  # all in memory takes some bytes a row beside the rows
    budget = max(int(workload.table_bytes * percent / 100), 2**22)
    if not workload.name.startswith("Criteo's"):
        return budget
    wanted, low, high = sum(workload.rows) * percent / 100, budget, 4 * budget
    while high - low > 2**16:
        middle = (low + high) // 2
        with tierstore.open(path, mode="w", ddr=middle) as store:
            store["t0"].read(torch.zeros(1, dtype=torch.int64))
            is_enough = store.stats().ddr.capacity_rows >= wanted
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _point(case: _Case, config: dict[str, Any]) -> Point:
    path, workload = case.path, case.workload
    steps = len(workload.batches) // 2 if workload.name.startswith("Criteo's") else config["steps"]
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
        return Point(
            workload.name,
            case.percent,
            case.is_cached,
            after.ddr.capacity_rows / sum(workload.rows),
            statistics.mean(seconds),
            cpu / steps,
            a_step("ddr", "hits") / max(a_step("ddr", "unique"), 1 / steps),
            a_step("ssd", "lookups"),
            a_step("ssd", "bytes_read") / PAGE_BYTES,
            a_step("ssd", "rows_written"),
            a_step("ssd", "bytes_written") / PAGE_BYTES,
            a_step("ssd", "pages_moved"),
            a_step("ssd", "bytes_moved") / PAGE_BYTES,
            written / evicted if evicted else 0.0,
            os.path.getsize(path / ROWS_FILE) / workload.table_bytes,
        )


class _Limits(NamedTuple):
    """Of the device."""

    reads_per_s: float
    written_bytes_per_s: float

    def seconds(self, point: Point) -> float:
        """For the pages that were asked for, and those written, whether or not they were in the page cache."""
        read = point.pages_read + point.cleaning_read
        written = (point.pages_written + point.cleaning_written) * PAGE_BYTES
        return read / self.reads_per_s + written / self.written_bytes_per_s


def _zipf(request: Run, path: Path) -> Iterator[_Case]:
    config = request.config
    for exponent in config["exponents"]:
        yield from _budgets(zipf(config, exponent, config["warm_steps"] + config["steps"]), path, config)


def _criteo(request: Run, path: Path) -> Iterator[_Case]:
    found = find_criteo()
    if found is None:
        print(f"without {CRITEO_NAME}: set TIERSTORE_CRITEO to the file")
    else:
        yield from _budgets(criteo(found, request.config, request.config["criteo_steps"]), path, request.config)


def _budgets(workload: StepWorkload, path: Path, config: dict[str, Any]) -> Iterator[_Case]:
    for percent in config["budgets"]:
        fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
        yield _Case(path, workload, percent)


def _kaggle(request: Run, path: Path) -> Iterator[_Case]:
    config = request.config
    workload = kaggle(config, config["warm_steps"] + config["steps"])
    model = workload._replace(name="Criteo-Kaggle's model, Zipf 1.05", is_model=True)
    fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
    for each in (workload, model):
        for percent, is_cached in ((1, False), (1, True), (100, False)):
            yield _Case(path, each, percent, is_cached)


def _measure(cases: _Cases, request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    path = request.folder / "tiers_store"
    points: list[Point] = []
    limits: list[_Limits] = []
    for case in cases(request, path):
        points.append(_point(case, request.config))
        reads, written = device.reads_per_s(path / ROWS_FILE), device.written_bytes_per_s(request.folder)
        limits += [_Limits(reads, written)] if reads and written else []
        print("  ".join(_row(points[-1], "")), flush=True)
    shutil.rmtree(path, ignore_errors=True)
    limit = _Limits(*(statistics.median(each) for each in zip(*limits, strict=True))) if limits else None
    compute = {point.workload: point.step_s for point in points if point.budget_percent >= 100}
    rooflines = [max(compute[each.workload], limit.seconds(each) if limit else 0.0) for each in points]
    return {
        "device": limit and limit._asdict(),
        "points": [
            point._asdict() | {"roofline_s": roofline} for point, roofline in zip(points, rooflines, strict=True)
        ],
    }


_COLUMNS: Final = (
    "ids", "DDR", "rows in DDR", "hits", "step ms", "CPU ms", "rows read", "pages read", "rows evicted",
    "pages written", "cleaning read / written", "dirtied for a byte", "file over rows", "roofline ms",
)  # fmt: skip


def _row(point: Point, roofline: str) -> list[str]:
    name = f"{point.workload}, in the page cache" if point.is_cached else point.workload
    return [
        name, f"{point.budget_percent:g} %", f"{point.rows_in_ddr:.1%}", f"{point.hit_rate:.1%}",
        f"{1e3 * point.step_s:.1f}", f"{1e3 * point.cpu_s:.1f}", f"{point.rows_read:,.0f}", f"{point.pages_read:,.0f}",
        f"{point.rows_written:,.0f}", f"{point.pages_written:,.0f}",
        f"{point.cleaning_read:,.0f} / {point.cleaning_written:,.0f}", f"{point.dirtied:.2f}",
        f"{point.file_bytes:.2f}", roofline,
    ]  # fmt: skip


def _goals(points: list[Point], rooflines: dict[Point, float], *, has_limit: bool) -> Iterator[Goal]:
    for name in dict.fromkeys(point.workload for point in points):
        own = [point for point in points if point.workload == name and point.budget_percent < 100]
        whole = next(point for point in points if (point.workload, point.budget_percent) == (name, 100))
        worst = max(point.step_s / rooflines[point] for point in own if not point.is_cached)
        if has_limit:
            yield Goal(name=f"{name}: the worst step over its roofline", value=round(worst, 3), at_most=1.15)
        dirtied = max(point.dirtied for point in own)
        yield Goal(name=f"{name}: bytes dirtied for one of an evicted row", value=round(dirtied, 2), at_most=2.5)
        if name.startswith("Criteo-Kaggle's model"):
            for point in own:
                where = "in the page cache" if point.is_cached else "on the device"
                speed = round(whole.step_s / point.step_s, 3)
                goal = f"{name}: speed with 1 % in DDR and the pages {where}, of all in DDR"
                yield Goal(name=goal, value=speed, at_least=0.95 if point.is_cached else 0.8)
        for point in own:
            if point.is_cached and name.startswith("Criteo-Kaggle's tables"):
                more = round(1e3 * (point.cpu_s - whole.cpu_s), 1)
                yield Goal(name=f"{name}: ms of a processor for rows that miss, pages cached", value=more, at_most=6)
        if name.startswith("Criteo's"):
            useful = min(point.rows_read / point.pages_read for point in own)
            yield Goal(name=f"{name}: rows that a page read brings", value=round(useful, 2), at_least=2.4)


def _tell(title: str, note: str, figures: dict[str, Any]) -> Told:
    rooflines = {
        Point(**{name: each[name] for name in Point._fields}): each["roofline_s"] for each in figures["points"]
    }
    limit = figures["device"]
    gives = (
        f"The device reads {limit['reads_per_s']:,.0f} pages a second at queue depth {device.DEPTH}, and writes "
        f"{limit['written_bytes_per_s'] / 2**20:,.0f} MiB a second, one after the other."
        if limit
        else device.MISSING
    )
    return Told(
        tables=[
            Table(
                title=f"{title}: a step, by how much of the tables is in DDR",
                columns=list(_COLUMNS),
                rows=[_row(point, f"{1e3 * roofline:.1f}") for point, roofline in rooflines.items()],
            )
        ],
        goals=list(_goals(list(rooflines), rooflines, has_limit=bool(limit))),
        notes=[f"{note} {gives}"],
    )


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
    parts = {name: Part(partial(_measure, cases), partial(_tell, name, notes[name])) for name, cases in _PARTS.items()}
    question = "Is a training step over tiers no slower than its compute, or than the device needs for its pages?"
    report = run_parts(request, question, parts)
    report.notes.append(
        f"Row-wise Adagrad, {config['depth']} batches brought in ahead; every row was written and committed before the "
        "first step. Pages and rows are of a step. Roofline: the larger of a step with every row in DDR, and of what "
        "the device needs for the pages read and written, as if none were in the page cache. Where all rows are in DDR "
        "every lookup is a hit, and repeated ids are counted as often as they come; else once a batch."
    )
    return report


_PARTS: Final[dict[str, _Cases]] = {"zipf": _zipf, "criteo": _criteo, "kaggle": _kaggle}


if __name__ == "__main__":
    sys.exit(program("tiers", run, parts=tuple(_PARTS)))
