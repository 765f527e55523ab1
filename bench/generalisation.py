"""How does the batch size change AUC and the sharpness of minima, by dense optimizer, Hessian-free steps among them?

On two real sets. Each pair of optimizer and batch gets the same number of drawn pairs of rates, of rows and of dense
weights; the pair with the least loss on the validation rows, and its epoch, train with seeds of their own. Rows are
trained by Adagrad.
"""

import contextlib
import itertools
import logging
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tierstore.metrics import Predictions
from tierstore.train import RunConfig, sharpness_of, train
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.trainer import feed, set_rates, train_step, warm_up

from .common import Report, Run, Table, fresh_folder, start
from .data import ROOT, require_criteo
from .runs import run_config, scored

_FILES: Final = {"criteo": ROOT / "examples" / "criteo.toml", "items": ROOT / "bench" / "generalise" / "items.toml"}
_EVALUATED: Final = 4096
_SETS: Final = {"criteo": "Criteo", "items": "next items"}
_NAMES: Final = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "hessian-free": "Hessian-free, Bi-CGSTAB"}
_SHARP: Final = ("whole_1e3_percent", "whole_5e4_percent", "subspace_1e3_percent", "largest_eigenvalue")
_KEYS: Final = ("set", "optimizer", "batch")
_COLUMNS: Final = [
    "dense optimizer", "batch", "rate of rows", "of weights", "epochs", "test AUC", "log loss", "steps", "seconds",
    "sharpness 1e-3, %", "5e-4, %", "1e-3, 100 dimensions, %", "largest eigenvalue",
]  # fmt: skip
Cell = tuple[str, str, int]
"""Set, optimizer, batch."""


def _drawn_rates(config: dict[str, Any], optimizer: str, batch: int) -> list[tuple[float, float]]:
    """Of rows and dense weights, evenly over the logarithms of their ranges (Sobol); first-order ones as they are at
    ``rates_batch``, and by the root of the batch over it elsewhere. A Hessian-free step's is its first length."""
    ranges = [config["rates"][name] for name in ("rows", optimizer)]
    found = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(config["trials"])  # type: ignore[no-untyped-call]
    scale = (batch / config["rates_batch"]) ** 0.5
    scales = scale, 1.0 if optimizer == "hessian-free" else scale
    low, high = torch.tensor(ranges, dtype=torch.float64).T
    pairs = low * (high / low) ** found * torch.tensor(scales, dtype=torch.float64)
    return [(rows, dense) for rows, dense in pairs.tolist()]


def _config(config: dict[str, Any], cell: Cell, rates: tuple[float, float], folder: Path, *more: str) -> RunConfig:
    """To be trained on all rows but those of validation and test; ``rates`` are of rows and of dense weights."""
    name, optimizer, batch = cell
    given = [f"data.train_rows={config['train_rows'][name]}", f"data.test_rows={config['validation_rows']}"]
    given += ["train.commit_every=0", f'optimizer.dense="{optimizer}"', f"train.batch_size={batch}"]
    given += [f"optimizer.sparse_lr={rates[0]!r}", f"optimizer.dense_lr={rates[1]!r}", *more]
    data = None if name == "criteo" else _items_file(config, folder)
    return run_config(_FILES[name], folder / f"{name}-{optimizer}-{batch}-{os.getpid()}", *given, data=data)


def _items_file(config: dict[str, Any], folder: Path) -> Path:
    """Rows of 3 items that a reader has on a list, and a fourth: the next of the list, or one drawn from all lists.
    Both kinds stand earlier in the stream, which has one user's list after another."""
    path = folder / f"items-{config['items_rows']}.csv"
    if path.exists():
        return path
    ids = np.load(require_criteo().parent / "streams" / "amazon_book_kgat.npz")["ids"].astype(np.int64)
    generator = np.random.default_rng(0)
    first = np.zeros(len(ids), bool)
    first[np.unique(ids, return_index=True)[1]] = True
    places = np.flatnonzero(~first)[config["items_skipped"] :]
    places = np.sort(generator.choice(places, config["items_rows"] // 2, replace=False))
    drawn = ids[generator.integers(0, places)]
    before = np.stack([ids[places - back] for back in (1, 2, 3)], 1)
    labelled = (1, ids[places]), (0, drawn)
    pairs = [np.column_stack([np.full(len(places), label), before, item]) for label, item in labelled]
    rows = np.stack(pairs, 1).reshape(-1, 5)
    beside = path.with_suffix(".new")
    np.savetxt(beside, rows, "%d", ",", header="label,last,second,third,item", comments="")
    beside.replace(path)
    return path


def _tried(config: dict[str, Any], cell: Cell, rates: tuple[float, float], folder: Path) -> dict[str, Any]:
    """The least log loss of the validation rows after an epoch: training ends where it rises."""
    logging.getLogger("tierstore").setLevel(logging.ERROR)  # of changes that are not committed
    torch.set_num_threads(1)
    own, losses = _config(config, cell, rates, folder), list[float]()
    (reader, hasher), data = open_data(own), own.data
    with fresh_folder(Path(own.store.path)), open_run_store(own) as store:
        warm_up(own)
        run, steps = build_run(own, store), itertools.count()

        def batches(first: int, stop: int, size: int) -> Any:
            rows = reader.batches(hasher, batch_size=size, start_row=first, stop_row=stop, log_dense=data.log_dense)
            return contextlib.closing(feed(run, rows, depth=own.train.prefetch_depth))

        while len(losses) < config["epochs"] and (len(losses) < 2 or losses[-1] < losses[-2]):
            with batches(0, data.train_rows, own.train.batch_size) as rows:
                for batch, step in zip(rows, steps, strict=False):
                    set_rates(run, own.optimizer, step)
                    train_step(run, batch)
            predictions = Predictions()
            with torch.no_grad(), batches(data.train_rows, data.train_rows + data.test_rows, _EVALUATED) as rows:
                for batch in rows:
                    predictions.add(batch.labels, run.model(batch.dense, batch.sparse))
            try:
                losses.append(predictions.evaluate().log_loss)
            except ValueError:  # not a number
                losses.append(math.inf)
    best = min(range(len(losses)), key=losses.__getitem__)
    return {"rates": rates, "epochs": best + 1, "log_loss": losses[best]}


def _ended(config: dict[str, Any], cell: Cell, best: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    own = _config(config, cell, best["rates"], folder, f"train.seed={seed}", f"train.epochs={best['epochs']}")
    with fresh_folder(Path(own.store.path)) as path:
        summary = train(own)
        later = replace(own.data, train_rows=own.data.train_rows + own.data.test_rows, test_rows=config["test_rows"])
        test = scored(replace(own, data=later), path).evaluation
        sharp = sharpness_of(path, rows=config["sharpness_rows"])._asdict()
    kept = {name: sharp[name] for name in _SHARP}
    return {"auc": test.auc, "log_loss": test.log_loss, "steps": summary.step, "seconds": summary.seconds, **kept}


def _cells(request: Run) -> list[dict[str, Any]]:
    config, folder = request.config, request.folder / "generalise"
    folder.mkdir(exist_ok=True)
    order = [(name, optimizer, batch) for name in _SETS for optimizer in _NAMES for batch in config["batches"]]
    _items_file(config, folder)
    cells = sorted(order, key=lambda cell: cell[2])
    best: dict[Cell, dict[str, Any]] = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        tries = [
            (cell, pool.submit(_tried, config, cell, rates, folder))
            for cell in cells
            for rates in _drawn_rates(config, *cell[1:])
        ]
        for cell, future in tries:
            found = future.result()
            if not best.get(cell, {"log_loss": math.inf})["log_loss"] <= found["log_loss"]:
                best[cell] = found
        seeds = config["seeds"]
        runs = {cell: [pool.submit(_ended, config, cell, best[cell], seed, folder) for seed in seeds] for cell in cells}
        ended = {cell: [future.result() for future in own] for cell, own in runs.items()}
    return [dict(zip(_KEYS, cell, strict=True)) | best[cell] | {"runs": ended[cell]} for cell in order]


def _mean(cell: dict[str, Any], name: str) -> float:
    return statistics.fmean(run[name] for run in cell["runs"])


def _related(cells: Sequence[dict[str, Any]]) -> str:
    """Spearman's correlation of ranks, of sharpness and AUC."""
    both = [[_mean(cell, name) for cell in cells] for name in (_SHARP[0], "auc")]
    return f"{statistics.correlation(*([sorted(each).index(value) for value in each] for each in both)):+.2f}"


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
        first, *larger = own = [cell for cell in cells if cell["optimizer"] == optimizer]
        lost = [f"{_mean(first, 'auc') - _mean(cell, 'auc'):+.4f}" for cell in larger]
        rise = _mean(own[-1], _SHARP[0]) / _mean(first, _SHARP[0])
        rows.append([_SETS[name], shown, *lost, f"{rise:.2f}", _related(own)])
    others = [cell for cell in cells if cell["optimizer"] != "hessian-free"]
    for shown, some in (("all", cells), ("all first-order", others)):
        rows.append([_SETS[name], shown, *("" for _ in lost), "", _related(some)])
    return rows


def run(request: Run) -> Report:
    cells, tables, claims = _cells(request), [], list[list[str]]()
    for name, shown in _SETS.items():
        own = [cell for cell in cells if cell["set"] == name]
        title = f"{shown}: means over seeds, at the rates and epochs that validation rows chose"
        tables.append(Table(title, _COLUMNS, [_row(cell) for cell in own]))
        claims += _claims(name, own)
    batches = sorted({cell["batch"] for cell in cells})
    columns = ["set", "dense optimizer", *(f"AUC lost, {batches[0]:,} to {batch:,}" for batch in batches[1:])]
    columns += [f"sharpness 1e-3 at {batches[-1]:,} over {batches[0]:,}", "rank correlation of sharpness 1e-3 and AUC"]
    tables.append(Table("Do larger batches generalise worse, and are their minima sharper?", columns, claims))
    note = (
        "Sharpness: the largest rise of the training loss found in a box around the dense weights by ten iterations, "
        "in percent (Keskar et al., 2017). ±: standard deviation over seeds. Rates: of each optimizer and batch the "
        "same number of drawn pairs, the best by the validation rows; of Hessian-free steps, the first length. "
        "Seconds of each run on a core of its own, beside another run."
    )
    return Report(tables, notes=[note], figures={"cells": cells})


if __name__ == "__main__":
    start("generalisation")
