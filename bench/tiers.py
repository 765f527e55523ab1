"""Is a training step over tiers no slower than its compute, or than the device gives the blocks it reads?

Steps of the tables alone (lookup, backward, optimizer), rows of later batches brought in ahead; of the Criteo-Kaggle
shape also of the whole model, with the MLPs of the published DLRM baseline. Steps that do not count go before, until
the cache is full; then the file of rows is put out of the page cache.
"""

import contextlib
import functools
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore

from . import oscache
from .common import Goal, Report, Run, Table, program
from .data import find_criteo
from .device import direct_reader
from .steps import CHUNK, StepWorkload, criteo, fill, kaggle, step_of, timed, zipf

__all__ = ["run"]

ROWS_FILE: Final = "rows.lmdb"
LIMIT_DEPTH: Final = 64
DEVICE_READ_BYTES: Final = 4096


class Point(NamedTuple):
    """Means over steps, but for the median of their times."""

    workload: str
    budget_percent: float
    step_s: float
    step_s_median: float
    hit_rate: float
    rows_read: float
    blocks_read: float
    blocks_written: float
    device_read_bytes: float
    device_written_bytes: float


def _device_bytes() -> tuple[int, int]:
    """(read, written) by this process from and to devices."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def _point(path: Path, workload: StepWorkload, percent: float, config: dict[str, Any]) -> Point:
    # All in memory takes some bytes a row beside the rows.
    budget = workload.table_bytes * 3 // 2 if percent >= 100 else int(workload.table_bytes * percent / 100)
    warm, steps = config["warm_steps"], config["steps"]
    with tierstore.open(path, mode="w", ddr=f"{max(budget, 2**22)}") as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = step_of(module, workload)
        if percent >= 100:
            for table in store.tables.values():
                for first in range(0, table.config.num_embeddings, CHUNK):
                    table.read(torch.arange(first, min(first + CHUNK, table.config.num_embeddings)))
        with contextlib.closing(timed(module, step, workload.batches[:warm], config["depth"])) as steps_before:
            for _ in steps_before:
                ddr = store.stats().ddr
                if percent >= 100 or ddr.misses > ddr.capacity_rows:
                    break
        oscache.drop(path / ROWS_FILE)
        before, read_before, written_before = store.stats(), *_device_bytes()
        seconds = list(timed(module, step, workload.batches[warm : warm + steps], config["depth"]))
        after, read_after, written_after = store.stats(), *_device_bytes()
        unique = after.ddr.unique - before.ddr.unique
        page = store["t0"].layout.page_bytes
        return Point(
            workload.name,
            percent,
            statistics.mean(seconds),
            statistics.median(seconds),
            (after.ddr.hits - before.ddr.hits) / max(unique, 1),
            (after.ssd.lookups - before.ssd.lookups) / steps,
            (after.ssd.bytes_read - before.ssd.bytes_read) / page / steps,
            (after.ssd.bytes_written - before.ssd.bytes_written) / page / steps,
            (read_after - read_before) / steps,
            (written_after - written_before) / steps,
        )


def _limit(path: Path) -> float:
    """Reads of 4 KiB a second at queue depth 64."""
    with direct_reader(path / ROWS_FILE, LIMIT_DEPTH) as reader:
        generator = np.random.default_rng(0)
        rates = []
        for _ in range(5):
            offsets = reader.random_offsets(generator, 20_000)
            start = time.perf_counter()
            reader.read(offsets)
            rates.append(len(offsets) / (time.perf_counter() - start))
    return statistics.median(rates)


class Measured(NamedTuple):
    points: list[Point]
    blocks_per_s: float

    def compute_s(self, workload: str) -> float:
        return next(point.step_s for point in self.points if (point.workload, point.budget_percent) == (workload, 100))

    def roofline_s(self, point: Point) -> float:
        """The slower of compute, all rows in memory, and of reading the blocks that were asked for."""
        return max(self.compute_s(point.workload), point.blocks_read / self.blocks_per_s)

    def device_s(self, point: Point) -> float:
        """The slower of compute and of what the device itself read and wrote: most blocks are in the page cache."""
        pages = (point.device_read_bytes + point.device_written_bytes) / DEVICE_READ_BYTES
        return max(self.compute_s(point.workload), pages / self.blocks_per_s)


def _measure(request: Run) -> Measured:
    config = request.config
    count = config["warm_steps"] + config["steps"]
    workloads = [functools.partial(zipf, config, exponent, count) for exponent in config["exponents"]]
    path_of_criteo = find_criteo()
    if path_of_criteo is not None:
        workloads.append(functools.partial(criteo, path_of_criteo, config, count))
    path = request.folder / "tiers_store"
    points: list[Point] = []
    limits: list[float] = []
    shape: Any = None
    for make in workloads:
        workload = make()
        if shape != (workload.rows, workload.dim):
            fill(path, workload, config)
            shape = workload.rows, workload.dim
        points += [_point(path, workload, percent, config) for percent in config["budgets"]]
        limits.append(_limit(path))
    workload = kaggle(config, count)
    fill(path, workload, config)
    model = workload._replace(name="Criteo-Kaggle's model, Zipf 1.05", is_model=True)
    points += [_point(path, each, percent, config) for each in (workload, model) for percent in (1, 100)]
    shutil.rmtree(path)
    return Measured(points, statistics.median(limits))


def run(request: Run) -> Report:
    config = request.config
    measured = _measure(request)
    rows, goals, figures = [], [], []
    for point in measured.points:
        roofline = measured.roofline_s(point)
        ratio = point.step_s / roofline
        rows.append(
            [
                point.workload, f"{point.budget_percent:g} %", f"{point.hit_rate:.1%}", f"{1e3 * point.step_s:.1f}",
                f"{point.blocks_read:,.0f}", f"{point.blocks_written:,.0f}", f"{point.device_read_bytes / 2**20:.1f}",
                f"{point.device_written_bytes / 2**20:.1f}", f"{1e3 * roofline:.1f}", f"{ratio:.2f}",
                f"{point.step_s / measured.device_s(point):.2f}",
            ]
        )  # fmt: skip
        figures.append(
            point._asdict() | {"roofline_s": roofline, "over_roofline": ratio, "device_s": measured.device_s(point)}
        )
    for name in dict.fromkeys(point.workload for point in measured.points):
        own = [point for point in measured.points if point.workload == name and point.budget_percent < 100]
        if name.startswith("Criteo-Kaggle"):
            value = measured.compute_s(name) / own[0].step_s
            goals.append(
                Goal(name=f"{name}: speed with 1 % in DDR, of all in DDR", value=round(value, 3), at_least=0.9)
            )
        else:
            worst = max(point.step_s / measured.roofline_s(point) for point in own)
            goals.append(Goal(name=f"{name}: the worst step over its roofline", value=round(worst, 3), at_most=1.15))
    return Report(
        question="Is a training step over tiers no slower than its compute, or than the device gives what it reads?",
        tables=[
            Table(
                title="a step of the tables, by how much of them is in DDR",
                columns=[
                    "ids",
                    "DDR",
                    "hits",
                    "step ms",
                    "blocks read",
                    "written",
                    "device read MiB",
                    "device written MiB",
                    "roofline ms",
                    "step / roofline",
                    "step / device",
                ],
                rows=rows,
            )
        ],
        figures={"points": figures, "device_blocks_per_s": measured.blocks_per_s},
        goals=goals,
        notes=[
            f"Row-wise Adagrad, {config['steps']} steps after up to {config['warm_steps']} that fill the cache, "
            f"{config['depth']} batches brought in ahead; Zipf: {config['tables']} tables of {config['rows']:,} rows "
            f"of {config['dim']}, {config['batch']:,} samples of {config['pooling_factor']} ids a table. Roofline: the "
            "larger of a step with every row in DDR, and of the blocks read over what the device gives at queue depth "
            f"{LIMIT_DEPTH} ({measured.blocks_per_s:,.0f} blocks/s); device: the same of "
            "the bytes that the device itself read and wrote, as the system's page cache holds most blocks. "
            "Where all rows are in DDR every lookup is a hit, and repeated ids are counted as often as they come; else "
            "once a batch."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("tiers", run))
