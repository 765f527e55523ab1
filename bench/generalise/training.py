"""The data sets, and training on them as ``tierstore train`` does it, but with no commit, and evaluated as it goes."""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tierstore.train import RunConfig
from tierstore.train.build import Run, build_run, open_data, open_run_store
from tierstore.train.config import load, parse_override
from tierstore.train.metrics import Evaluation, Predictions
from tierstore.train.processes import joined
from tierstore.train.readers import FeatureHasher, Reader
from tierstore.train.steps import feed, set_rates, train_step
from tierstore.train.trainer import warm_up

from ..data import ROOT, require_criteo

__all__ = ["Point", "config_of", "points"]

_ITEMS_FILE: Final = ROOT / "bench" / "generalise" / "items.toml"
_EVALUATED: Final = 4096
_DIVERGED: Final = Evaluation(0, math.nan, math.inf)


class Point(NamedTuple):
    """``seconds`` of training, without evaluation."""

    step: int
    seconds: float
    validation: Evaluation


def _items_file(config: dict[str, Any], stream: Path, folder: Path) -> Path:
    """Rows of 3 items that a reader has on a list, and a fourth: the next of the list, or one drawn from all lists.

    Both kinds of fourth items stand earlier in the stream, which has one user's list after another.
    """
    path = folder / f"items-{config['items_rows']}.csv"
    if path.exists():
        return path
    ids = np.load(stream)["ids"].astype(np.int64)
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


def config_of(config: dict[str, Any], name: str, folder: Path, *overrides: str) -> RunConfig:
    """Of the set "criteo" or "items", to be trained on all rows but those of validation and test."""
    criteo = require_criteo()
    stream = criteo.parent / "streams" / "amazon_book_kgat.npz"
    files = {"criteo": ROOT / "examples" / "criteo.toml", "items": _ITEMS_FILE}
    path = criteo if name == "criteo" else _items_file(config, stream, folder)
    given = [f'data.path="{path}"', 'store.ddr="200% of tables"', f"data.train_rows={config['train_rows'][name]}"]
    given += [f"data.test_rows={config['validation_rows']}", "train.commit_every=0", *overrides]
    return load(files[name], [parse_override(text) for text in given])


class _Trainer:
    def __init__(self, config: RunConfig, run: Run, reader: Reader, hasher: FeatureHasher) -> None:
        self.config, self.run, self._reader, self._hasher = config, run, reader, hasher

    def batches(self, first: int, stop: int, size: int) -> Any:
        processes = self.run.processes
        rows = self._reader.batches(
            self._hasher, batch_size=size, start_row=first, stop_row=stop, log_dense=self.config.data.log_dense,
            part=processes.rank, parts=processes.size,
        )  # fmt: skip
        return contextlib.closing(feed(self.run, rows, depth=self.config.train.prefetch_depth))

    def steps(self, epochs: int) -> Iterator[int]:
        """Train; the number of each step, after it."""
        config, step = self.config, 0
        for _ in range(epochs):
            with self.batches(0, config.data.train_rows, config.train.batch_size) as batches:
                for batch in batches:
                    set_rates(self.run, config.optimizer, step)
                    train_step(self.run, batch)
                    step += 1
                    yield step

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Of the validation rows."""
        predictions, first = Predictions(), self.config.data.train_rows
        with self.batches(first, first + self.config.data.test_rows, _EVALUATED) as batches:
            for batch in batches:
                predictions.add(batch.labels, self.run.model(batch.dense, batch.sparse))
        try:
            return Predictions.merged(self.run.processes.gather(predictions)).evaluate()
        except ValueError:  # not a number
            return _DIVERGED


def points(config: RunConfig, *, epochs: int, every: int, goes_on: Callable[[list[Point]], bool]) -> list[Point]:
    """Train, and evaluate after each ``every`` steps.

    Args:
        epochs: at most.
        every: 0: after each epoch.
        goes_on: given the points so far.
    """
    shutil.rmtree(config.store.path, ignore_errors=True)
    torch.set_num_threads(1)
    logging.getLogger("tierstore").setLevel(logging.ERROR)  # of changes that are not committed
    reader, hasher = open_data(config)
    every, found = every or math.ceil(config.data.train_rows / config.train.batch_size), list[Point]()
    with joined(config) as processes, open_run_store(config, processes) as store:
        warm_up(config)
        trainer = _Trainer(config, build_run(config, store, processes), reader, hasher)
        seconds, start = 0.0, time.perf_counter()
        for step in trainer.steps(epochs):
            if step % every == 0:
                seconds += time.perf_counter() - start
                found.append(Point(step, seconds, trainer.evaluate()))
                if not goes_on(found):
                    break
                start = time.perf_counter()
    shutil.rmtree(config.store.path, ignore_errors=True)
    return found
