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
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore
from tierstore.models import DLRM
from tierstore.plan.published import KAGGLE_ROWS

from . import oscache
from .common import Goal, Report, Run, Table, program
from .data import criteo_keys, find_criteo
from .device import direct_reader
from .workload import ids_of

__all__ = ["run"]

ROWS_FILE: Final = "rows.lmdb"
LIMIT_DEPTH: Final = 64
DEVICE_READ_BYTES: Final = 4096
_CHUNK: Final = 200_000


class Workload(NamedTuple):
    """Tables, and batches of ids for them: one bag a sample and table."""

    name: str
    rows: Sequence[int]
    dim: int
    batches: list[tierstore.KeyedJaggedTensor]
    is_model: bool = False
    """With MLPs around the tables."""

    @property
    def table_bytes(self) -> int:
        """Of all rows, with the one accumulator that row-wise Adagrad keeps, in a cache."""
        return sum(self.rows) * (self.dim * 4 + 8)


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


def _jagged(ids: Sequence[Any], pooling_factor: int) -> tierstore.KeyedJaggedTensor:
    values = torch.from_numpy(np.concatenate(ids))
    keys = [f"f{table}" for table in range(len(ids))]
    return tierstore.KeyedJaggedTensor(keys, values, offsets=torch.arange(0, len(values) + 1, pooling_factor))


def _zipf(config: dict[str, Any], exponent: float, count: int) -> Workload:
    generator = np.random.default_rng(config["seed"])
    rows, size = [config["rows"]] * config["tables"], config["batch"] * config["pooling_factor"]
    drawn = [ids_of(generator, each, size * count, exponent).reshape(count, size) for each in rows]
    batches = [_jagged([each[step] for each in drawn], config["pooling_factor"]) for step in range(count)]
    return Workload(f"Zipf {exponent}", rows, config["dim"], batches)


def _criteo(path: Path, config: dict[str, Any], count: int) -> Workload:
    """Criteo's lookups, each table's ids in order of first use, batch after batch, from the start again at the end."""
    keys = criteo_keys(path)
    columns, batch = keys >> 40, config["criteo_batch"]
    # A row lists its columns in ascending order.
    samples = np.cumsum(np.diff(columns, prepend=columns[0]) <= 0)
    ids, rows = np.empty(len(keys), np.int64), []
    for table in range(26):
        _, firsts, inverse = np.unique(keys[columns == table], return_index=True, return_inverse=True)
        ids[columns == table] = np.argsort(np.argsort(firsts))[inverse]
        rows.append(len(firsts))
    whole = int(samples[-1]) // batch
    batches = []
    for step in range(whole):
        own = samples // batch == step
        values, places = ids[own], columns[own] * batch + samples[own] % batch
        order = np.argsort(places, kind="stable")
        lengths = np.bincount(places, minlength=26 * batch)
        batches.append(
            tierstore.KeyedJaggedTensor(
                [f"f{table}" for table in range(26)],
                torch.from_numpy(values[order]),
                lengths=torch.from_numpy(lengths),
            )
        )
    return Workload("Criteo's lookups", rows, config["dim"], [batches[step % whole] for step in range(count)])


def _kaggle(config: dict[str, Any], count: int) -> Workload:
    generator = np.random.default_rng(config["seed"])
    rows = [max(3, int(each * config["kaggle_scale"])) for each in KAGGLE_ROWS]
    size = config["kaggle_batch"]
    drawn = [ids_of(generator, each, size * count, 1.05).reshape(count, size) for each in rows]
    batches = [_jagged([each[step] for each in drawn], 1) for step in range(count)]
    return Workload("Criteo-Kaggle's tables, Zipf 1.05", rows, config["kaggle_dim"], batches)


def _fill(path: Path, workload: Workload, config: dict[str, Any]) -> None:
    """A store in which every row was written once, so that each has to be read."""
    shutil.rmtree(path, ignore_errors=True)
    with tierstore.open(path, mode="w", ddr="512MiB") as store:
        for number, rows in enumerate(workload.rows):
            rule = tierstore.optim.RowWiseAdagrad(lr=config["lr"])
            config_of = {"name": f"t{number}", "feature_names": (f"f{number}",), "pooling": "sum", "optimizer": rule}
            store.create_table(
                tierstore.TableConfig(num_embeddings=rows, embedding_dim=workload.dim, **config_of)  # type: ignore[arg-type]
            )
        for table in store.tables.values():
            for first in range(0, table.config.num_embeddings, _CHUNK):
                ids = torch.arange(first, min(first + _CHUNK, table.config.num_embeddings))
                table.write(ids, torch.full((len(ids), workload.dim), 0.01))
        store.commit()


def _device_bytes() -> tuple[int, int]:
    """(read, written) by this process from and to devices."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def _step(module: Any, workload: Workload) -> Callable[[Any], None]:
    """A training step, given its batch."""
    samples, columns = workload.batches[0].stride(), len(workload.rows) * workload.dim
    if not workload.is_model:
        gradient = torch.full((samples, columns), 1e-3)
        return lambda batch: module(batch).values().backward(gradient)
    torch.manual_seed(1)
    model = DLRM(
        module, num_features=len(workload.rows), embedding_dim=workload.dim, bottom_mlp=(512, 256, 64),
        top_mlp=(512, 256),
    )  # fmt: skip
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    dense, labels = torch.randn(samples, 13), torch.rand(samples).round()

    def step(batch: Any) -> None:
        rule.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(dense, batch), labels).backward()  # type: ignore[no-untyped-call]
        rule.step()

    return step


def _timed(module: Any, step: Callable[[Any], None], batches: list[Any], depth: int) -> Generator[float, None, None]:
    """Seconds from step to step."""
    with contextlib.closing(tierstore.prefetch(batches, module, depth=depth)) as ahead:
        last = time.perf_counter()
        for batch in ahead:
            step(batch)
            now = time.perf_counter()
            yield now - last
            last = now


def _point(path: Path, workload: Workload, percent: float, config: dict[str, Any]) -> Point:
    # All in memory takes some bytes a row beside the rows.
    budget = workload.table_bytes * 3 // 2 if percent >= 100 else int(workload.table_bytes * percent / 100)
    warm, steps = config["warm_steps"], config["steps"]
    with tierstore.open(path, mode="w", ddr=f"{max(budget, 2**22)}") as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = _step(module, workload)
        if percent >= 100:
            for table in store.tables.values():
                for first in range(0, table.config.num_embeddings, _CHUNK):
                    table.read(torch.arange(first, min(first + _CHUNK, table.config.num_embeddings)))
        with contextlib.closing(_timed(module, step, workload.batches[:warm], config["depth"])) as steps_before:
            for _ in steps_before:
                ddr = store.stats().ddr
                if percent >= 100 or ddr.misses > ddr.capacity_rows:
                    break
        oscache.drop(path / ROWS_FILE)
        before, read_before, written_before = store.stats(), *_device_bytes()
        seconds = list(_timed(module, step, workload.batches[warm : warm + steps], config["depth"]))
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
    workloads = [functools.partial(_zipf, config, exponent, count) for exponent in config["exponents"]]
    criteo = find_criteo()
    if criteo is not None:
        workloads.append(functools.partial(_criteo, criteo, config, count))
    path = request.folder / "tiers_store"
    points: list[Point] = []
    limits: list[float] = []
    shape: Any = None
    for make in workloads:
        workload = make()
        if shape != (workload.rows, workload.dim):
            _fill(path, workload, config)
            shape = workload.rows, workload.dim
        points += [_point(path, workload, percent, config) for percent in config["budgets"]]
        limits.append(_limit(path))
    workload = _kaggle(config, count)
    _fill(path, workload, config)
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
