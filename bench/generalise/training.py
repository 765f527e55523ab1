"""The data sets, and training on them as ``tierstore train`` does it, but with no commit, and evaluated as it goes."""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tierstore.train import RunConfig
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.metrics import Evaluation, Predictions
from tierstore.train.processes import joined
from tierstore.train.steps import feed, set_rates, train_step
from tierstore.train.trainer import warm_up

from ..common import fresh_folder
from ..data import ROOT, require_criteo
from ..runs import run_config

__all__ = ["Point", "config_of", "points"]

_FILES: Final = {"criteo": ROOT / "examples" / "criteo.toml", "items": ROOT / "bench" / "generalise" / "items.toml"}
_EVALUATED: Final = 4096
_DIVERGED: Final = Evaluation(0, math.nan, math.inf)


class Point(NamedTuple):
    """``seconds`` of training, without evaluation."""

    step: int
    seconds: float
    validation: Evaluation


def _items_file(config: dict[str, Any], folder: Path) -> Path:
    """Rows of 3 items that a reader has on a list, and a fourth: the next of the list, or one drawn from all lists.

    Both kinds of fourth items stand earlier in the stream, which has one user's list after another.
    """
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


def config_of(
    config: dict[str, Any], name: str, folder: Path, store: str, optimizer: str, rates: tuple[float, float], *more: str
) -> RunConfig:
    """Of the set "criteo" or "items", to be trained on all rows but those of validation and test.

    Args:
        rates: of rows and of dense weights, which ``optimizer`` trains.
    """
    given = [f"data.train_rows={config['train_rows'][name]}", f"data.test_rows={config['validation_rows']}"]
    given += ["train.commit_every=0", f'optimizer.dense="{optimizer}"', f"optimizer.sparse_lr={rates[0]!r}"]
    data = None if name == "criteo" else _items_file(config, folder)
    return run_config(_FILES[name], folder / store, *given, f"optimizer.dense_lr={rates[1]!r}", *more, data=data)


def points(config: RunConfig, *, epochs: int, every: int, goes_on: Callable[[list[Point]], bool]) -> list[Point]:
    """Train, and evaluate after each ``every`` steps.

    Args:
        epochs: at most.
        every: 0: after each epoch.
        goes_on: given the points so far.
    """
    torch.set_num_threads(1)
    logging.getLogger("tierstore").setLevel(logging.ERROR)  # of changes that are not committed
    (reader, hasher), data = open_data(config), config.data
    every, found = every or math.ceil(data.train_rows / config.train.batch_size), list[Point]()
    with fresh_folder(Path(config.store.path)), joined(config) as processes, open_run_store(config, processes) as store:
        warm_up(config)
        run = build_run(config, store, processes)

        def batches(first: int, stop: int, size: int) -> Any:
            part = {"part": processes.rank, "parts": processes.size}
            rows = reader.batches(
                hasher, batch_size=size, start_row=first, stop_row=stop, log_dense=data.log_dense, **part
            )
            return contextlib.closing(feed(run, rows, depth=config.train.prefetch_depth))

        @torch.no_grad()
        def evaluate() -> Evaluation:
            predictions = Predictions()
            with batches(data.train_rows, data.train_rows + data.test_rows, _EVALUATED) as rows:
                for batch in rows:
                    predictions.add(batch.labels, run.model(batch.dense, batch.sparse))
            try:
                return Predictions.merged(processes.gather(predictions)).evaluate()
            except ValueError:  # not a number
                return _DIVERGED

        steps, seconds = itertools.count(1), 0.0
        for _ in range(epochs):
            begun = time.perf_counter()
            with batches(0, data.train_rows, config.train.batch_size) as rows:
                for batch, step in zip(rows, steps, strict=False):
                    set_rates(run, config.optimizer, step - 1)
                    train_step(run, batch)
                    if step % every == 0:
                        seconds += time.perf_counter() - begun
                        found.append(Point(step, seconds, evaluate()))
                        if not goes_on(found):
                            return found
                        begun = time.perf_counter()
            seconds += time.perf_counter() - begun
    return found
