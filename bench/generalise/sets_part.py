"""Part "sets": AUC against batch size, by dense optimizer, on two real sets; how sharp the minima are beside it.

Each pair of optimizer and batch gets the same number of drawn pairs of rates, of rows and of dense weights; the pair
with the least loss on the validation rows, and its epoch, train with seeds of their own. Rows are trained by Adagrad.
"""

import math
import os
import shutil
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from tierstore.train import RunConfig, sharpness_of, train

from ..common import Part, Run, Table, Told
from ..quality import evaluated
from .training import Point, config_of, points

__all__ = ["PART"]

_SETS: Final = {"criteo": "Criteo", "items": "next items"}
_NAMES: Final = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "hessian-free": "Hessian-free, Bi-CGSTAB"}
_SHARP: Final = ("whole_1e3_percent", "whole_5e4_percent", "subspace_1e3_percent", "largest_eigenvalue")
Cell = tuple[str, str, int]
"""Set, optimizer, batch."""


def _drawn_rates(config: dict[str, Any], optimizer: str, batch: int) -> list[tuple[float, float]]:
    """Of rows and dense weights, evenly over the logarithms of their ranges (Sobol); first-order ones as they are at
    ``rates_batch``, and by the root of the batch over it elsewhere. A Hessian-free step's is its first length."""
    ranges = config["rates"]
    found = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(config["trials"])  # type: ignore[no-untyped-call]
    scale = (batch / config["rates_batch"]) ** 0.5
    scales = scale, 1.0 if optimizer == "hessian-free" else scale

    def rate(share: float, low: float, high: float) -> float:
        return float(low * (high / low) ** share)

    pairs = [
        [rate(share, *ranges[name]) for share, name in zip(each, ("rows", optimizer), strict=True)]
        for each in found.tolist()
    ]
    return [(rows * scales[0], dense * scales[1]) for rows, dense in pairs]


def _config(config: dict[str, Any], cell: Cell, rates: tuple[float, float], folder: Path, *overrides: str) -> RunConfig:
    name, optimizer, batch = cell
    own = folder / f"{name}-{optimizer}-{batch}-{os.getpid()}"
    given = [f'store.path="{own}"', f"train.batch_size={batch}", f'optimizer.dense="{optimizer}"']
    given += [f"optimizer.sparse_lr={rates[0]!r}", f"optimizer.dense_lr={rates[1]!r}", *overrides]
    return config_of(config, name, folder, *given)


def _falls(found: Sequence[Point]) -> bool:
    return len(found) < 2 or found[-1].validation.log_loss < found[-2].validation.log_loss


def _tried(config: dict[str, Any], cell: Cell, rates: tuple[float, float], folder: Path) -> dict[str, Any]:
    found = points(_config(config, cell, rates, folder), epochs=config["epochs"], every=0, goes_on=_falls)
    losses = [each.validation.log_loss for each in found]
    best = min(range(len(losses)), key=losses.__getitem__)
    return {"rates": rates, "epochs": best + 1, "log_loss": losses[best]}


def _ended(config: dict[str, Any], cell: Cell, best: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    own = _config(config, cell, best["rates"], folder, f"train.seed={seed}", f"train.epochs={best['epochs']}")
    shutil.rmtree(own.store.path, ignore_errors=True)
    summary = train(own)
    later = replace(own.data, train_rows=own.data.train_rows + own.data.test_rows, test_rows=config["test_rows"])
    test = evaluated(replace(own, data=later), Path(own.store.path)).evaluation
    sharp = sharpness_of(own.store.path, rows=config["sharpness_rows"])._asdict()
    shutil.rmtree(own.store.path)
    kept = {name: sharp[name] for name in _SHARP}
    return {"auc": test.auc, "log_loss": test.log_loss, "steps": summary.step, "seconds": summary.seconds, **kept}


def _measure(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, folder = request.config, request.folder / "generalise"
    folder.mkdir(exist_ok=True)
    for name in _SETS:
        config_of(config, name, folder)  # writes the rows
    cells = [(name, optimizer, batch) for name in _SETS for optimizer in _NAMES for batch in config["batches"]]
    cells.sort(key=lambda cell: cell[2])
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        tries = [
            (cell, pool.submit(_tried, config, cell, rates, folder))
            for cell in cells
            for rates in _drawn_rates(config, *cell[1:])
        ]
        best: dict[Cell, dict[str, Any]] = {}
        for cell, future in tries:
            found = future.result()
            print(*cell, found, flush=True)
            if not best.get(cell, {"log_loss": math.inf})["log_loss"] <= found["log_loss"]:
                best[cell] = found
        runs = [
            (cell, pool.submit(_ended, config, cell, best[cell], seed, folder))
            for cell in cells
            for seed in config["seeds"]
        ]
        ended: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
        for cell, future in runs:
            ended[cell].append(future.result())
            print(*cell, ended[cell][-1], flush=True)
    order = sorted(cells, key=lambda cell: (list(_SETS).index(cell[0]), list(_NAMES).index(cell[1]), cell[2]))
    keys = ("set", "optimizer", "batch")
    return {"cells": [dict(zip(keys, cell, strict=True)) | best[cell] | {"runs": ended[cell]} for cell in order]}


def _mean(cell: dict[str, Any], name: str) -> float:
    return statistics.fmean(run[name] for run in cell["runs"])


def _ranked(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation of ranks."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*places)


def _row(cell: dict[str, Any]) -> list[str]:
    spread = statistics.stdev(run["auc"] for run in cell["runs"])
    rates = [f"{rate:.2g}" for rate in cell["rates"]]
    return [
        _NAMES[cell["optimizer"]], f"{cell['batch']:,}", *rates, str(cell["epochs"]),
        f"{_mean(cell, 'auc'):.4f} ± {spread:.4f}", f"{_mean(cell, 'log_loss'):.4f}", f"{_mean(cell, 'steps'):,.0f}",
        f"{_mean(cell, 'seconds'):.1f}", *(f"{_mean(cell, name):.3g}" for name in _SHARP),
    ]  # fmt: skip


def _claims(name: str, cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What AUC each optimizer loses by a batch 16 times as large, and whether the sharp end points are the bad ones."""
    rows = []
    for optimizer, shown in _NAMES.items():
        own = {cell["batch"]: cell for cell in cells if cell["optimizer"] == optimizer}
        small, large = min(own), max(own)
        lost = [_mean(own[small], "auc") - _mean(own[batch], "auc") for batch in sorted(own)[1:]]
        sharp = [_mean(cell, _SHARP[0]) for cell in own.values()]
        related = _ranked(sharp, [_mean(cell, "auc") for cell in own.values()])
        rise = _mean(own[large], _SHARP[0]) / _mean(own[small], _SHARP[0])
        rows.append([_SETS[name], shown, *(f"{each:+.4f}" for each in lost), f"{rise:.2f}", f"{related:+.2f}"])
    others = [cell for cell in cells if cell["optimizer"] != "hessian-free"]
    for shown, some in (("all", cells), ("all first-order", others)):
        related = _ranked([_mean(cell, _SHARP[0]) for cell in some], [_mean(cell, "auc") for cell in some])
        rows.append([_SETS[name], shown, *("" for _ in lost), "", f"{related:+.2f}"])
    return rows


def _tell(figures: dict[str, Any]) -> Told:
    cells, tables, claims = figures["cells"], [], list[list[str]]()
    columns = [
        "dense optimizer",
        "batch",
        "rate of rows",
        "of weights",
        "epochs",
        "test AUC",
        "log loss",
        "steps",
        "seconds",
    ]
    columns += ["sharpness 1e-3, %", "5e-4, %", "1e-3, 100 dimensions, %", "largest eigenvalue"]
    for name, shown in _SETS.items():
        own = [cell for cell in cells if cell["set"] == name]
        title = f"{shown}: means over seeds, at the rates and epochs that validation rows chose"
        tables.append(Table(title=title, columns=columns, rows=[_row(cell) for cell in own]))
        claims += _claims(name, own)
    batches = sorted({cell["batch"] for cell in cells})
    columns = ["set", "dense optimizer", *(f"AUC lost, {batches[0]:,} to {batch:,}" for batch in batches[1:])]
    columns += [f"sharpness 1e-3 at {batches[-1]:,} over {batches[0]:,}", "rank correlation of sharpness 1e-3 and AUC"]
    tables.append(
        Table(title="Do larger batches generalise worse, and are their minima sharper?", columns=columns, rows=claims)
    )
    notes = [
        "Sharpness: the largest rise of the training loss found in a box around the dense weights by ten iterations, "
        "in percent (Keskar et al., 2017). ±: standard deviation over seeds. Rates: of each optimizer and batch the "
        "same number of drawn pairs, the best by the validation rows; of Hessian-free steps, the first length. "
        "Seconds of each run on a core of its own, beside another run."
    ]
    return Told(tables=tables, notes=notes)


PART: Final = Part(_measure, _tell)
