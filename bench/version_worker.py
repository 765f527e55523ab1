"""One version under ``bench.versions``: prints the names of its parts, then the seconds of each that it is asked for.

It is run by its path, in the folder of a tree whose modules are imported.
"""

import gc
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import tierstore
from bench.rowdata import Rows, TierReader, build_store
from bench.workload import Batches, make_store
from tierstore.plan.measure import page_cache

Action = Callable[[], float]


def _timed(action: Callable[[], object], times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        action()
    return time.perf_counter() - start


def _batches(config: dict[str, Any], batch: int, tables: int) -> Batches:
    keys = ("rows", "pooling_factor", "exponent", "seed")
    return Batches(batch=batch, tables=tables, count=config["batches"], **{key: config[key] for key in keys})


def _features(batches: Batches) -> list[tierstore.KeyedJaggedTensor]:
    return [batches.jagged(index) for index in range(batches.count)]


def _store(folder: Path, config: dict[str, Any], optimizer: Any, **options: Any) -> Any:
    path = folder / f"trained-{type(optimizer).__name__}"
    shutil.rmtree(path, ignore_errors=True)
    shape = {key: config[key] for key in ("tables", "rows", "dim", "ddr")}
    return make_store(path, optimizer=optimizer, **shape, **options)


def _train(folder: Path, config: dict[str, Any]) -> dict[str, Action]:
    features = _features(_batches(config, config["batch"], config["tables"]))
    gradient = torch.randn(config["batch"], config["tables"] * config["dim"], generator=torch.manual_seed(0)) / 100

    def steps(optimizer: Any) -> Action:
        module = tierstore.TieredEmbeddingBagCollection(_store(folder, config, optimizer))

        def step() -> None:
            for each in features:
                module(each).values().backward(gradient)

        step()
        return lambda: _timed(step)

    return {
        "train: SGD": steps(tierstore.optim.SGD(lr=0.05)),
        "train: row-wise Adagrad": steps(tierstore.optim.RowWiseAdagrad(lr=0.05)),
    }


def _lookup(folder: Path, config: dict[str, Any]) -> dict[str, Action]:
    table = _store(folder, config, tierstore.optim.SGD(lr=0.05))["t0"]
    table.read(torch.arange(config["rows"]))

    def lookups(bags: int, calls: int) -> Action:
        batches = _batches(config, bags, 1)
        values = cycle(batches.values)
        return lambda: _timed(lambda: table.pooled(next(values), batches.offsets), calls)

    pairs = zip(config["bags"], config["calls"], strict=True)
    return {f"lookup: {bags} bag{'s' * (bags > 1)}": lookups(bags, calls) for bags, calls in pairs}


def _partly(folder: Path, config: dict[str, Any]) -> dict[str, Action]:
    """Lookups of two tables, and their gradients, a quarter of the rows being in memory and all on SSD."""
    rows, dim = config["rows"], config["dim"]
    few = config | {"tables": 2, "ddr": 2 * rows * dim}
    store = _store(folder, few, tierstore.optim.SGD(lr=0.05), value=0.5)
    module = tierstore.TieredEmbeddingBagCollection(store)

    def steps(batch: int, part: int) -> Action:
        own, gradient = cycle(_features(_batches(few, batch, 2))), torch.ones(batch, 2 * dim)

        def step() -> float:
            start = time.perf_counter()
            out = module(next(own)).values()
            middle = time.perf_counter()
            out.backward(gradient)
            return (middle - start, time.perf_counter() - middle)[part]

        return lambda: statistics.median([step() for _ in range(config["partly_steps"])])

    def one(kind: str) -> Action:
        table, ids = store["t0"], iter(torch.split(torch.randperm(rows), 1))
        hot = torch.tensor([0])

        def read() -> float:
            if kind == "hits":
                return _timed(lambda: table.read(hot), config["one_reads"]) / int(config["one_reads"])
            table.read(torch.randperm(rows)[: rows // 2])  # of which few are resident in the end, and pages are cached
            return statistics.median([_timed(partial(table.read, next(ids))) for _ in range(config["one_reads"])])

        return read

    found = {
        f"partly: {what}, batch {batch:,}": steps(batch, part)
        for batch in config["partly"]
        for part, what in enumerate(("lookup", "gradient"))
    }
    return found | {f"one id that {kind}": one(kind) for kind in ("hits", "misses")}


def _reads(folder: Path, config: dict[str, Any]) -> dict[str, Action]:
    """Of random rows, which the other version has not just read."""
    rows = Rows(count=config["cold_rows"], dim=config["dim"], seed=config["seed"])
    reader = TierReader(build_store(folder, rows), rows, config["read_rows"], verify=True)
    generator = np.random.default_rng()

    def draw() -> Any:
        return generator.integers(0, rows.count, config["read_rows"])

    def cold() -> float:
        ids = draw()
        page_cache.drop(reader.path)
        seconds = _timed(lambda: reader.read(ids))
        page_cache.zap_maps(reader.path)  # the other version cannot put out what this process has mapped
        return seconds

    def warm() -> float:
        page_cache.warm(reader.path)
        return _timed(lambda: reader.read(draw()), config["warm_reads"])

    return {"cold: read from the device": cold, "warm: read from the page cache": warm}


def _commit(folder: Path, config: dict[str, Any]) -> dict[str, Action]:
    store = _store(folder, config, tierstore.optim.SGD(lr=0.05))
    table, generator = store["t0"], torch.manual_seed(config["seed"])

    def commits(rows: int) -> Action:
        values = torch.rand(rows, config["dim"])

        def commit() -> float:
            table.write(torch.randperm(config["rows"], generator=generator)[:rows], values)
            return _timed(store.commit)

        return commit

    return {f"commit: {rows:,} row{'s' * (rows > 1)} changed": commits(rows) for rows in config["commit_rows"]}


def _calls(folder: Path, config: dict[str, Any]) -> dict[str, Action]:
    """What a lookup of two tables and its gradient run through, a quarter of the rows being in memory; no times."""
    few = config | {"tables": 2, "batches": 3, "ddr": 2 * config["rows"] * config["dim"]}
    *before, last = _features(_batches(few, config["batch"], 2))
    module = tierstore.TieredEmbeddingBagCollection(_store(folder, few, tierstore.optim.SGD(lr=0.05)))
    for each in before:
        module(each).values().sum().backward()
    found: list[Any] = []
    counts = _profiled("lookup", lambda: found.append(module(last).values()))
    counts |= _profiled("gradient", lambda: found[0].backward(torch.ones_like(found[0])))
    return {name: partial(float, count) for name, count in counts.items()}


def _profiled(what: str, action: Callable[[], object]) -> dict[str, int]:
    """Calls, functions and files of the package that this thread runs through."""
    package = str(Path(tierstore.__file__).parent)
    codes: list[Any] = []

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            codes.append(frame.f_code)

    gc.disable()  # the package is called at each collection
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    counted = {"calls": codes, "functions": set(codes), "files": {code.co_filename for code in codes}}
    return {f"{name} of a {what}": len(each) for name, each in counted.items()}


_TASKS: Final = {
    "train": _train, "lookup": _lookup, "partly": _partly, "reads": _reads, "commit": _commit, "calls": _calls,
}  # fmt: skip


def main(folder: Path, task: str, config: str) -> None:
    if not Path(tierstore.__file__).is_relative_to(Path.cwd()):
        raise RuntimeError(f"tierstore of {tierstore.__file__} is measured in place of {Path.cwd()}'s")
    folder.mkdir(parents=True, exist_ok=True)
    answers, sys.stdout = sys.stdout, sys.stderr
    actions = _TASKS[task](folder, json.loads(config))
    print(json.dumps(list(actions)), file=answers, flush=True)
    for line in sys.stdin:
        print(actions[line.strip()](), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
