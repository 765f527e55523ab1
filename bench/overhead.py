"""What does tierstore take where tiers gain nothing: small steps, lookups of one id, checks, first use, the demo?

Small steps and lookups stand beside one nn.EmbeddingBag, checked reads of rows that the page cache has beside
numpy.take of the same bytes, and the README's example on a machine without compiled kernels beside one with them.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore
from tierstore.plan.measure import page_cache

from .common import Goal, Part, Report, Run, Spread, Table, Told, measure, program, run_parts
from .data import ROOT
from .rowdata import Rows, TierReader, build_flat, build_store, open_flat
from .workload import read_every_row, write_every_row

__all__ = ["run"]

OURS: Final = "tierstore"
ONE_BAG: Final = "one torch.nn.EmbeddingBag(sparse=True)"
TAKE: Final = "numpy.take"


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


# Small steps, and lookups of one id


def _measure_small(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, path = request.config, request.folder / "overhead_store"
    shutil.rmtree(path, ignore_errors=True)
    tables, rows, dim = config["tables"], config["rows"], config["dim"]
    rule, names = tierstore.optim.Adagrad(lr=config["lr"]), [f"f{table}" for table in range(tables)]
    with tierstore.open(path, ddr=tables * rows * dim * 16) as store:
        for name in names:
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=dim, optimizer=rule))
            write_every_row(store[name], 0.01)
        store.commit()
        module = tierstore.TieredEmbeddingBagCollection(store)
        bag = torch.nn.EmbeddingBag(tables * rows, dim, mode="sum", sparse=True)
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=config["lr"])
        steps = {}
        for batch in config["batches"]:
            ids, offsets = torch.randint(rows, (tables * batch,)), torch.arange(tables * batch + 1)
            shift, gradient = torch.arange(tables).repeat_interleave(batch) * rows, torch.ones(batch, tables * dim)

            def ours(ids: Any = ids, offsets: Any = offsets, gradient: Any = gradient) -> None:
                module(tierstore.KeyedJaggedTensor(names, ids, offsets=offsets)).values().backward(gradient)

            def one(
                ids: Any = ids, offsets: Any = offsets, gradient: Any = gradient, shift: Any = shift, batch: int = batch
            ) -> None:
                optimizer.zero_grad()
                pooled = bag(ids + shift, offsets[:-1]).view(tables, batch, dim)
                pooled.transpose(0, 1).reshape(batch, tables * dim).backward(gradient)
                optimizer.step()

            steps[str(batch)] = _medians({OURS: ours, ONE_BAG: one}, config["repetitions"])
        store.commit()
    lookups = {each.name: _one_id(path, config, each) for each in _LOOKUPS}
    shutil.rmtree(path)
    return {"steps": steps, "lookups": lookups}


def _one_id(path: Path, config: dict[str, Any], lookup: _Lookup) -> dict[str, Any]:
    """Times, and the share of lookups whose row was not in memory."""
    offsets, rows = torch.tensor([0]), torch.arange(config["rows"])
    with tierstore.open(path, ddr=lookup.ddr) as store:
        module = tierstore.TieredEmbeddingBag(store["f0"])
        bag = torch.nn.EmbeddingBag(config["rows"], config["dim"], mode="sum")
        read_every_row(store["f0"])
        page_cache.warm(path / "rows.lmdb")
        given = rows[torch.randperm(len(rows))] if lookup.is_of_all else torch.tensor([3])
        turns, before = {OURS: 0, ONE_BAG: 0}, store.stats().ddr

        def action(name: str, called: Callable[[Any, Any], object]) -> Callable[[], object]:
            def call() -> None:
                turns[name] = (turns[name] + 1) % len(given)
                called(given[turns[name] : turns[name] + 1], offsets)

            return call

        with torch.no_grad():
            actions = {name: action(name, called) for name, called in ((OURS, module), (ONE_BAG, bag))}
            found = _medians(actions, 20 * config["repetitions"])
        after = store.stats().ddr
        missed = 1 - (after.hits - before.hits) / (after.unique - before.unique)
    return found | {"missed": missed}


def _medians(actions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, Any]:
    measure(actions, repetitions=repetitions // 4)
    return {name: asdict(Spread.of(each)) for name, each in measure(actions, repetitions=repetitions).items()}


def _tell_small(found: dict[str, Any]) -> Told:
    rows, goals = [], []
    kinds = {f"a step, batch {batch}": each for batch, each in found["steps"].items()}
    for name, each in (kinds | {f"a lookup, {name}": each for name, each in found["lookups"].items()}).items():
        own, other = (1e6 * each[who]["median"] for who in (OURS, ONE_BAG))
        rows.append([name, f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"])
    for batch, each in found["steps"].items():
        ratio, most = each[OURS]["median"] / each[ONE_BAG]["median"], 1.0 if int(batch) < 512 else 0.8
        goals.append(Goal(name=f"time over one bag's: a step, batch {batch}", value=round(ratio, 3), at_most=most))
    for known in _LOOKUPS:
        own = 1e6 * found["lookups"][known.name][OURS]["median"]
        goals.append(Goal(name=f"us: a lookup, {known.name}", value=round(own, 1), at_most=known.goal_us))
    columns = ["", f"{OURS}, us", f"{ONE_BAG}, us", "ratio"]
    missed = 100 * found["lookups"][_LOOKUPS[-1].name]["missed"]
    return Told(
        tables=[Table(title="small steps and lookups of one id", columns=columns, rows=rows)], goals=goals,
        notes=[f"Of the lookups that are to miss, {missed:.0f} % do."],
    )  # fmt: skip


# Checks of rows


def _measure_checks(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, batch = request.config, request.config["checked_batch"]
    rows = Rows(count=config["checked_rows"], dim=config["checked_dim"], seed=config["seed"])
    flat_path, store = build_flat(request.folder, rows), build_store(request.folder, rows)
    flat, out = open_flat(flat_path, rows), np.empty((batch, rows.dim), np.float32)
    generator, found = np.random.default_rng(config["seed"]), {}
    ids = [generator.integers(0, rows.count, batch) for _ in range(config["checked_repetitions"])]
    for path in (flat_path, store / "rows.lmdb"):
        page_cache.warm(path)
    readers = {name: TierReader(store, rows, batch, verify=verify) for name, verify in _CHECKED.items()}
    reads: dict[str, Callable[[Any], object]] = {name: reader.read for name, reader in readers.items()}
    reads[TAKE] = lambda chosen: np.take(flat, chosen, axis=0, out=out, mode="clip")
    for each in np.arange(rows.count).reshape(-1, batch):  # maps every page
        for read in reads.values():
            read(each)
    seconds = {name: list[float]() for name in reads}
    for each in ids:
        turns = {name: (lambda read=read, each=each: read(each)) for name, read in reads.items()}
        for name, taken in measure(turns, repetitions=1).items():
            seconds[name] += taken
    for name, reader in readers.items():
        reader.read(ids[0])
        if not np.array_equal(reader.rows(), flat[ids[0]]):
            raise RuntimeError(f"{name} reads other rows than numpy")
        reader.close()
    for name, taken in seconds.items():
        found[name] = asdict(Spread.of([1e9 * each / batch for each in taken]))
    return {"ns_a_row": found}


_CHECKED: Final = {f"{OURS}, checked": True, f"{OURS}, unchecked": False}


def _tell_checks(found: dict[str, Any]) -> Told:
    times = {name: each["median"] for name, each in found["ns_a_row"].items()}
    rows = [[name, f"{each:.0f}", f"{times[TAKE] / each:.2f}"] for name, each in times.items()]
    goals = [
        Goal(name=f"rows/s of numpy.take's: {name}", value=round(times[TAKE] / times[name], 3), at_least=least)
        for name, least in zip(_CHECKED, (0.65, 0.9), strict=True)
    ]
    table = Table(title="reads of rows that the page cache has", columns=["", "ns a row", "of numpy.take"], rows=rows)
    return Told(tables=[table], goals=goals)


# First use


def _measure_first(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    found: dict[str, list[float]] = {name: [] for name in _FIRST}
    for _repetition in range(request.config["first_repetitions"]):
        with tempfile.TemporaryDirectory(dir=request.folder) as kernels:
            for name in _FIRST:  # the second finds the first one's kernels
                found[name].append(_example_s(example, Path(kernels), request.folder))
    return {name: asdict(Spread.of(each)) for name, each in found.items()}


_FIRST: Final = ("without kernels", "with kernels")


def _example_s(example: str, kernels: Path, folder: Path) -> float:
    """Of a processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        environment = os.environ | {"NUMBA_CACHE_DIR": str(kernels), "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", example], cwd=work, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _tell_first(found: dict[str, Any]) -> Told:
    rows = [[name, f"{found[name]['median']:.1f}"] for name in _FIRST]
    compiled = found[_FIRST[0]]["median"] - found[_FIRST[1]]["median"]
    return Told(
        tables=[Table(title="the README's example", columns=["", "s of a processor"], rows=rows)],
        goals=[Goal(name="s of a processor that first use compiles", value=round(compiled, 2), at_most=4)],
    )


# The demonstration


def _measure_demo(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    """Samples a second of its two trainings, of which the first may keep a tenth of its rows in memory."""
    found: dict[str, list[float]] = {name: [] for name in _DEMO}
    for _repetition in range(request.config["demo_repetitions"]):
        with tempfile.TemporaryDirectory(dir=request.folder) as work:
            folder, rows = Path(work) / "demo", str(request.config["demo_rows"])
            command = [sys.executable, "-m", "tierstore", "demo", "--dir", str(folder), "--rows", rows]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
            for name in _DEMO:
                found[name].append(json.loads((folder / f"{name}.json").read_text())["samples_per_second"])
    return {name: asdict(Spread.of(each)) for name, each in found.items()}


_DEMO: Final = ("tiered", "in-memory")


def _tell_demo(found: dict[str, Any]) -> Told:
    tiered, whole = (found[name]["median"] for name in _DEMO)
    rows = [["a tenth of its rows in memory", f"{tiered:,.0f}"], ["all in memory", f"{whole:,.0f}"]]
    return Told(
        tables=[Table(title="`tierstore demo`", columns=["", "samples/s"], rows=rows)],
        goals=[Goal(name="the demo's speed over all in memory", value=round(tiered / whole, 3), at_least=0.9)],
    )


PARTS: Final = {
    "small": Part(_measure_small, _tell_small),
    "checks": Part(_measure_checks, _tell_checks),
    "first": Part(_measure_first, _tell_first),
    "demo": Part(_measure_demo, _tell_demo),
}


def run(request: Run) -> Report:
    return run_parts(request, "What does tierstore take where tiers gain nothing?", PARTS)


if __name__ == "__main__":
    sys.exit(program("overhead", run, parts=tuple(PARTS)))
