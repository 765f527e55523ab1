"""Does bringing rows in ahead pay, and does depth="auto" find out? Are small steps as fast as one nn.EmbeddingBag's?"""

import contextlib
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

import tierstore
from tierstore.plan.measure import page_cache

from .common import Goal, Part, Report, Run, Spread, Table, Told, measure, program, run_parts
from .steps import StepWorkload, fill, step_of, timed, zipf
from .workload import read_every_row

__all__ = ["run"]

DEPTHS: Final = (0, 2, "auto")
PLACES: Final = ("in memory", "page cached", "cold")
OURS: Final = "tierstore"
ONE_BAG: Final = "one torch.nn.EmbeddingBag(sparse=True)"
_LOOKUPS: Final = {"TieredEmbeddingBag, all rows in memory": "300%", "TieredEmbeddingBag, rows may leave": "20%"}


# With and without rows that are brought in ahead


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


# Small steps


def _measure_small(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, path = request.config, request.folder / "small_store"
    shutil.rmtree(path, ignore_errors=True)
    tables, rows, dim = config["tables"], config["rows"], config["dim"]
    rule, names = tierstore.optim.Adagrad(lr=config["lr"]), [f"f{table}" for table in range(tables)]
    with tierstore.open(path, ddr=tables * rows * dim * 16) as store:
        for name in names:
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=dim, optimizer=rule))
            store[name].read(torch.arange(rows))
        module = tierstore.TieredEmbeddingBagCollection(store)
        bag = torch.nn.EmbeddingBag(tables * rows, dim, mode="sum", sparse=True)
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=config["lr"])
        steps = {}
        for batch in config["small_batches"]:
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

            steps[str(batch)] = _medians({OURS: ours, ONE_BAG: one}, config["small_repetitions"])
    lookups = {name: _one_id(path, config, share) for name, share in _LOOKUPS.items()}
    shutil.rmtree(path)
    return {"steps": steps, "lookups": lookups}


def _one_id(path: Path, config: dict[str, Any], share: str) -> dict[str, Any]:
    with tierstore.open(path, ddr=f"{share} of tables") as store:
        table, ids, offsets = store["f0"], torch.tensor([3]), torch.tensor([0])
        module = tierstore.TieredEmbeddingBag(table)
        bag = torch.nn.EmbeddingBag(config["rows"], config["dim"], mode="sum")
        read_every_row(table)
        with torch.no_grad():
            actions = {OURS: lambda: module(ids, offsets), ONE_BAG: lambda: bag(ids, offsets)}
            return _medians(actions, 20 * config["small_repetitions"])


def _medians(actions: dict[str, Callable[[], object]], repetitions: int) -> dict[str, Any]:
    measure(actions, repetitions=repetitions // 4)
    return {name: asdict(Spread.of(each)) for name, each in measure(actions, repetitions=repetitions).items()}


def _tell_small(found: dict[str, Any]) -> Told:
    rows, goals = [], []
    kinds = {f"a step, batch {batch}": each for batch, each in found["steps"].items()}
    for name, each in (kinds | {f"a lookup, {name}": each for name, each in found["lookups"].items()}).items():
        own, other = (1e6 * each[who]["median"] for who in (OURS, ONE_BAG))
        rows.append([name, f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"])
        if name.startswith("a step"):
            most = 1.0 if int(name.split()[-1]) < 512 else 0.8
            goals.append(Goal(name=f"time over one bag's: {name}", value=round(own / other, 3), at_most=most))
        else:
            goals.append(Goal(name=f"us: {name}", value=round(own, 1), at_most=25))
    columns = ["", f"{OURS}, us", f"{ONE_BAG}, us", "ratio"]
    return Told(tables=[Table(title="small steps and lookups of one id", columns=columns, rows=rows)], goals=goals)


PARTS: Final = {"ahead": Part(_measure_ahead, _tell_ahead), "small": Part(_measure_small, _tell_small)}


def run(request: Run) -> Report:
    return run_parts(request, "Does bringing rows in ahead pay, and are small steps fast?", PARTS)


if __name__ == "__main__":
    sys.exit(program("pipeline", run, parts=tuple(PARTS)))
