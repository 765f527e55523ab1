"""What does tierstore take where tiers gain nothing?

Small steps and lookups stand beside one nn.EmbeddingBag, checked reads of rows that the page cache has beside
numpy.take of the same bytes, the README's example on a machine without compiled kernels beside one with them, and steps
by prefetch depth beside each other: whether bringing rows in ahead pays, and depth="auto" finds out.
"""

import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore
from tierstore.plan.measure import page_cache

from .common import Goal, Part, Report, Run, Table, fresh_folder, measure, spread, start
from .data import ROOT, examples
from .rowdata import Rows, TierReader, build_flat, build_store, open_flat
from .steps import StepWorkload, fill, step_of, timed, zipf
from .workload import make_store, read_every_row

__all__ = ["PARTS"]

OURS: Final = "tierstore"
ONE_BAG: Final = "one torch.nn.EmbeddingBag(sparse=True)"
TAKE: Final = "numpy.take"
_CHECKED: Final = {f"{OURS}, checked": True, f"{OURS}, unchecked": False}
_FIRST: Final = ("without kernels", "with kernels")
_DEMO: Final = ("tiered", "in-memory")
DEPTHS: Final = (0, 2, "auto")
PLACES: Final = ("in memory", "page cached", "cold")
Figures = dict[str, Any]


def _medians(actions: dict[str, Callable[[], object]], repetitions: int) -> Figures:
    found = measure(actions, repetitions=repetitions, warm_up=repetitions // 4)
    return {name: spread(each) for name, each in found.items()}


# Small steps, and lookups of one id


class _Lookup(NamedTuple):
    """Lookups of one id: the budget of DDR, and whether each is of another row."""

    name: str
    ddr: str
    goal_us: float
    is_of_all: bool = False


_LOOKUPS: Final = (
    _Lookup("TieredEmbeddingBag, all rows in memory", "300% of tables", 25),
    _Lookup("TieredEmbeddingBag, rows may leave, a hit", "20% of tables", 25),
    _Lookup("TieredEmbeddingBag, a miss, pages cached", "1MiB", 80, is_of_all=True),
)


def _measure_small(request: Run, _: Figures) -> Figures:
    config = request.config
    tables, rows, dim, lr = (config[name] for name in ("tables", "rows", "dim", "lr"))
    shape = {"tables": tables, "rows": rows, "dim": dim, "ddr": tables * rows * dim * 16, "value": 0.01}
    names, steps = [f"f{table}" for table in range(tables)], {}
    with fresh_folder(request.folder / "overhead_store") as path:
        with make_store(path, optimizer=tierstore.optim.Adagrad(lr=lr), **shape) as store:
            module = tierstore.TieredEmbeddingBagCollection(store)
            bag = torch.nn.EmbeddingBag(tables * rows, dim, mode="sum", sparse=True)
            optimizer = torch.optim.Adagrad(bag.parameters(), lr=lr)
            for batch in config["batches"]:
                ids, offsets = torch.randint(rows, (tables * batch,)), torch.arange(tables * batch + 1)
                shift, gradient = torch.arange(tables).repeat_interleave(batch) * rows, torch.ones(batch, tables * dim)

                def ours(ids: Any = ids, offsets: Any = offsets, gradient: Any = gradient) -> None:
                    module(tierstore.KeyedJaggedTensor(names, ids, offsets=offsets)).values().backward(gradient)

                def one(
                    ids: Any = ids, starts: Any = offsets[:-1], own: Any = gradient, to: Any = shift, batch: int = batch
                ) -> None:
                    optimizer.zero_grad()
                    pooled = bag(ids + to, starts).view(tables, batch, dim)
                    pooled.transpose(0, 1).reshape(batch, tables * dim).backward(own)
                    optimizer.step()

                steps[str(batch)] = _medians({OURS: ours, ONE_BAG: one}, config["repetitions"])
            store.commit()
        lookups = {each.name: _one_id(path, config, each) for each in _LOOKUPS}
    return {"steps": steps, "lookups": lookups}


def _one_id(path: Path, config: Figures, lookup: _Lookup) -> Figures:
    """Times, and the share of lookups whose row was not in memory."""
    offsets, rows = torch.tensor([0]), torch.arange(config["rows"])
    with tierstore.open(path, ddr=lookup.ddr) as store:
        module = tierstore.TieredEmbeddingBag(store["t0"])
        bag = torch.nn.EmbeddingBag(config["rows"], config["dim"], mode="sum")
        read_every_row(store["t0"])
        page_cache.warm(path / "rows.lmdb")
        given, before = rows[torch.randperm(len(rows))] if lookup.is_of_all else torch.tensor([3]), store.stats().ddr

        def action(called: Callable[[Any, Any], object]) -> Callable[[], object]:
            turns = itertools.cycle(torch.split(given, 1))
            return lambda: called(next(turns), offsets)

        with torch.no_grad():
            found = _medians({OURS: action(module), ONE_BAG: action(bag)}, 20 * config["repetitions"])
        after = store.stats().ddr
        missed = 1 - (after.hits - before.hits) / (after.unique - before.unique)
    return found | {"missed": missed}


def _tell_small(found: Figures) -> Report:
    rows, goals = [], []
    kinds = {f"a step, batch {batch}": each for batch, each in found["steps"].items()}
    for name, each in (kinds | {f"a lookup, {name}": each for name, each in found["lookups"].items()}).items():
        own, other = (1e6 * each[who]["median"] for who in (OURS, ONE_BAG))
        rows.append([name, f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"])
    for batch, each in found["steps"].items():
        ratio, most = each[OURS]["median"] / each[ONE_BAG]["median"], 1.0 if int(batch) < 512 else 0.8
        goals.append(Goal(f"time over one bag's: a step, batch {batch}", round(ratio, 3), at_most=most))
    for known in _LOOKUPS:
        own = 1e6 * found["lookups"][known.name][OURS]["median"]
        goals.append(Goal(f"us: a lookup, {known.name}", round(own, 1), at_most=known.goal_us))
    missed = 100 * found["lookups"][_LOOKUPS[-1].name]["missed"]
    table = Table("small steps and lookups of one id", ["", f"{OURS}, us", f"{ONE_BAG}, us", "ratio"], rows)
    return Report([table], goals, [f"Of the lookups that are to miss, {missed:.0f} % do."])


# Checks of rows


def _measure_checks(request: Run, _: Figures) -> Figures:
    config, batch = request.config, request.config["checked_batch"]
    rows = Rows(count=config["checked_rows"], dim=config["checked_dim"], seed=config["seed"])
    flat_path, store = build_flat(request.folder, rows), build_store(request.folder, rows)
    flat, out = open_flat(flat_path, rows), np.empty((batch, rows.dim), np.float32)
    for path in (flat_path, store / "rows.lmdb"):
        page_cache.warm(path)
    readers = {name: TierReader(store, rows, batch, verify=verify) for name, verify in _CHECKED.items()}
    reads: dict[str, Callable[[Any], object]] = {name: reader.read for name, reader in readers.items()}
    reads[TAKE] = lambda chosen: np.take(flat, chosen, axis=0, out=out, mode="clip")
    for each in np.arange(rows.count).reshape(-1, batch):  # maps every page
        for read in reads.values():
            read(each)
    ids, generator = np.zeros(batch, np.int64), np.random.default_rng(config["seed"])

    def draw() -> None:
        ids[:] = generator.integers(0, rows.count, batch)

    actions = {"draw": draw} | {name: (lambda read=read: read(ids)) for name, read in reads.items()}
    seconds = measure(actions, repetitions=config["checked_repetitions"])
    for name, reader in readers.items():
        reader.read(ids)
        if not np.array_equal(reader.rows(), flat[ids]):
            raise RuntimeError(f"{name} reads other rows than numpy")
        reader.close()
    return {"ns_a_row": {name: spread([1e9 * each / batch for each in seconds[name]]) for name in reads}}


def _tell_checks(found: Figures) -> Report:
    times = {name: each["median"] for name, each in found["ns_a_row"].items()}
    rows = [[name, f"{each:.0f}", f"{times[TAKE] / each:.2f}"] for name, each in times.items()]
    goals = [
        Goal(f"rows/s of numpy.take's: {name}", round(times[TAKE] / times[name], 3), at_least=least)
        for name, least in zip(_CHECKED, (0.65, 0.9), strict=True)
    ]
    return Report([Table("reads of rows that the page cache has", ["", "ns a row", "of numpy.take"], rows)], goals)


# First use, and the demonstration


def _run(command: list[str], work: str, **variables: str) -> float:
    """Seconds of a processor that Python takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    subprocess.run([sys.executable, *command], cwd=work, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measure_first(request: Run, _: Figures) -> Figures:
    example, found = examples("README.md")[0], dict[str, list[float]]()
    for _repetition in range(request.config["first_repetitions"]):
        with tempfile.TemporaryDirectory(dir=request.folder) as kernels:
            for name in _FIRST:  # the second finds the first one's kernels
                with tempfile.TemporaryDirectory(dir=request.folder) as work:
                    found.setdefault(name, []).append(
                        _run(["-c", example], work, NUMBA_CACHE_DIR=os.path.abspath(kernels))
                    )
    return {name: spread(each) for name, each in found.items()}


def _tell_first(found: Figures) -> Report:
    rows = [[name, f"{found[name]['median']:.1f}"] for name in _FIRST]
    compiled = round(found[_FIRST[0]]["median"] - found[_FIRST[1]]["median"], 2)
    goal = Goal("s of a processor that first use compiles", compiled, at_most=4)
    return Report([Table("the README's example", ["", "s of a processor"], rows)], [goal])


def _measure_demo(request: Run, _: Figures) -> Figures:
    """Samples a second of its two trainings, of which the first may keep a tenth of its rows in memory."""
    found, rows = dict[str, list[float]](), str(request.config["demo_rows"])
    for _repetition in range(request.config["demo_repetitions"]):
        with tempfile.TemporaryDirectory(dir=request.folder) as work:
            folder = Path(work).absolute() / "demo"
            _run(["-m", "tierstore", "demo", "--dir", str(folder), "--rows", rows], work)
            for name in _DEMO:
                speed = json.loads((folder / f"{name}.json").read_text())["samples_per_second"]
                found.setdefault(name, []).append(speed)
    return {name: spread(each) for name, each in found.items()}


def _tell_demo(found: Figures) -> Report:
    tiered, whole = (found[name]["median"] for name in _DEMO)
    rows = [["a tenth of its rows in memory", f"{tiered:,.0f}"], ["all in memory", f"{whole:,.0f}"]]
    goal = Goal("the demo's speed over all in memory", round(tiered / whole, 3), at_least=0.9)
    return Report([Table("`tierstore demo`", ["", "samples/s"], rows)], [goal])


# Rows brought in ahead


def _measure_ahead(request: Run, _: Figures) -> Figures:
    config, points = request.config, list[Figures]()
    with fresh_folder(request.folder / "ahead_store") as path:
        for batch, steps in zip(config["ahead_batches"], config["ahead_steps"], strict=True):
            workload = zipf(config | {"batch": batch}, config["exponent"], steps)._replace(is_model=True)
            fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
            for place in PLACES:
                turns = [
                    [_mean_step(path, workload, place, depth) for depth in DEPTHS]
                    for _repetition in range(config["ahead_repetitions"])
                ]
                medians = map(statistics.median, zip(*turns, strict=True))
                seconds = {f"depth_{depth}_s": each for depth, each in zip(DEPTHS, medians, strict=True)}
                points.append({"batch": batch, "place": place} | seconds)
                print(points[-1], flush=True)
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


def _tell_ahead(found: Figures) -> Report:
    rows, goals = [], []
    for point in found["points"]:
        times = [point[f"depth_{depth}_s"] for depth in DEPTHS]
        ratio, cells = min(times[:2]) / times[2], [f"{1e3 * each:.2f}" for each in times]
        rows.append([f"{point['batch']:,}", point["place"], *cells, f"{times[0] / times[1]:.2f}", f"{ratio:.2f}"])
        name = f"auto over the better of 0 and 2, batch {point['batch']:,}, {point['place']}"
        goals.append(Goal(name, round(ratio, 3), at_least=0.97))
    columns = ["batch", "rows", *(f"depth {depth}, ms" for depth in DEPTHS), "2 over 0", "auto over the better"]
    return Report([Table("steps a second by depth", columns, rows)], goals)


PARTS: Final = {
    "small": Part(_measure_small, _tell_small),
    "checks": Part(_measure_checks, _tell_checks),
    "first": Part(_measure_first, _tell_first),
    "demo": Part(_measure_demo, _tell_demo),
    "ahead": Part(_measure_ahead, _tell_ahead),
}

if __name__ == "__main__":
    start("overhead")
