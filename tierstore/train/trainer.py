"""The training run: read, look up, step, commit, evaluate."""

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..store.commits import PendingCommit
from ..store.recording import Recorder, require_recordable
from .build import Run, build_run, open_data, open_run_store
from .checkpoint import Position, commit_run, require_resumable, restore_run
from .config import RunConfig
from .metrics import Evaluation, Predictions
from .readers import Batch, DataError, FeatureHasher, Reader
from .steps import feed, train_step
from .summary import Summary, digest_bits, own_bytes, peak_rss_bytes
from .terminal import Progress, StopRequest
from .warmup import warm_up

__all__ = ["train"]


class _Outcome(NamedTuple):
    position: Position
    version: int
    rows: int
    seconds: float
    loss: float | None
    interrupted: bool
    start_bytes: int


class _Commits:
    """The run's commits: written in the background one at a time, each told of when it is durable."""

    def __init__(self, run: Run, config: RunConfig, progress: Progress, committed_step: int) -> None:
        self._run = run
        self._config = config
        self._progress = progress
        self._step = committed_step
        self._loss: float | None = None
        self._pending: PendingCommit | None = None

    def begin(self, position: Position) -> None:
        """Commit the run as it is, once the commit before is durable."""
        self.end()
        self._pending = commit_run(self._run, self._config, position)
        self._step, self._loss = position.step, self._progress.loss

    def tell(self) -> None:
        """Say so, if a commit has become durable; raise its error, if it failed."""
        if self._pending is not None and self._pending.done():
            self.end()

    def end(self) -> None:
        """Wait for the commit under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            version = pending.result()
            self._progress.say(f"step {self._step:,}: committed version {version}, loss {self._loss:.4f}")

    def finish(self, position: Position) -> int:
        """Commit what is not committed; returns the version that the store then shows."""
        self.end()
        if position.step > self._step:
            commit_run(self._run, self._config, position).result()
        return self._run.store.version


class _Data(NamedTuple):
    reader: Reader
    hasher: FeatureHasher
    config: RunConfig

    def batches(self, start_row: int, stop_row: int | None) -> Iterator[Batch]:
        return self.reader.batches(
            self.hasher,
            batch_size=self.config.train.batch_size,
            start_row=start_row,
            stop_row=stop_row,
            log_dense=self.config.data.log_dense,
        )


def train(config: RunConfig, *, resume: bool = False, bits: bool = False) -> Summary:
    """Train as the configuration says, committing as it goes, then evaluate on the rows after the training rows.

    The result depends on the configuration's [data], [embedding], [model], [optimizer] and [train] only, and in its
    last bits on the device; not on budgets, policies, threads of the store, prefetching or interruptions. Sets
    torch's seed and number of threads. Ctrl-C commits and returns early.

    Args:
        resume: continue from the last commit of the store, or begin if there is none.
        bits: compute the digest that the summary's ``bits`` holds; reads every row.

    Raises:
        ValueError: the configuration does not fit the data or the store, the data is broken, or the store holds a run
            and ``resume`` is not set.
        TierstoreError: what goes wrong with a store.
    """
    torch.set_num_threads(config.train.torch_threads)
    if config.store.record:
        require_recordable(config.store.record)
    data = _Data(*open_data(config), config)
    with open_run_store(config) as store:
        if store.version and not resume:
            raise ValueError(
                f"{store.directory} holds a run already: continue it with --resume, or name another folder with --store"
            )
        require_resumable(store, config)
        warm_up(config)
        run = build_run(config, store)
        recorder = _recorder(run, config)
        with recorder or contextlib.nullcontext():
            outcome = _train_epochs(run, data, restore_run(run))
            tiers, end = store.stats(), own_bytes()
            evaluate = config.data.test_rows > 0 and not outcome.interrupted
            test = _evaluate(run, data) if evaluate else None
        return Summary(
            store=str(store.directory),
            device=str(store.device),
            version=outcome.version,
            interrupted=outcome.interrupted,
            step=outcome.position.step,
            epochs=outcome.position.epoch,
            rows=outcome.rows,
            seconds=outcome.seconds,
            samples_per_second=outcome.rows / outcome.seconds if outcome.seconds else 0.0,
            loss=outcome.loss,
            test=test,
            tiers=tiers,
            start_bytes=outcome.start_bytes,
            end_bytes=end,
            peak_rss_bytes=peak_rss_bytes(),
            bits=digest_bits(store, run.model) if bits else None,
            recorded=None if recorder is None else recorder.describe(),
        )


def _recorder(run: Run, config: RunConfig) -> Recorder | None:
    """Of what is looked up from now on, if the configuration wants it."""
    section = config.store
    return run.store.record(section.record, rate=section.record_rate) if section.record else None


def _train_epochs(run: Run, data: _Data, position: Position) -> _Outcome:
    """All epochs from ``position`` on, or as far as Ctrl-C lets them."""
    train = data.config.train
    rows_per_epoch = data.config.data.train_rows
    progress = Progress(
        run.store,
        total_rows=rows_per_epoch * train.epochs or None,
        done_rows=rows_per_epoch * position.epoch + position.row,
    )
    rows = 0
    start_bytes = own_bytes()
    commits = _Commits(run, data.config, progress, position.step)
    started = time.perf_counter()
    run.model.train()
    with contextlib.closing(progress), StopRequest() as stop:
        while position.epoch < train.epochs and not stop.requested:
            with contextlib.closing(_epoch(run, data, position)) as steps:
                for batch, loss in steps:
                    if not rows:
                        start_bytes = own_bytes()
                    rows += len(batch)
                    position = Position(position.step + 1, position.epoch, position.row + len(batch))
                    progress.step(len(batch), loss)
                    due = train.commit_every and position.step % train.commit_every == 0
                    if stop.requested:
                        break
                    if due:
                        commits.begin(position)
                    commits.tell()
                else:
                    if not position.row:
                        raise DataError(f"{data.reader.path} has no rows to train on")
                    position = Position(position.step, position.epoch + 1, 0)
        version = commits.finish(position)
    seconds = time.perf_counter() - started
    return _Outcome(position, version, rows, seconds, progress.loss, position.epoch < train.epochs, start_bytes)


def _epoch(run: Run, data: _Data, position: Position) -> Generator[tuple[Batch, Tensor], None, None]:
    """Train on the rest of the position's epoch; yields each batch after its step, with its loss."""
    batches = data.batches(position.row, data.config.data.train_rows or None)
    section = data.config.train
    with contextlib.closing(feed(run, batches, depth=section.prefetch_depth, lookahead=section.lookahead)) as ahead:
        for batch in ahead:
            yield batch, train_step(run, batch)


@torch.no_grad()
def _evaluate(run: Run, data: _Data) -> Evaluation:
    """Evaluate on the test rows, which follow the training rows."""
    section = data.config.data
    predictions = Predictions()
    run.model.eval()
    batches = data.batches(section.train_rows, section.train_rows + section.test_rows)
    train = data.config.train
    with contextlib.closing(feed(run, batches, depth=train.prefetch_depth, lookahead=train.lookahead)) as ahead:
        for batch in ahead:
            predictions.add(batch.labels, run.model(batch.dense, batch.sparse))
    return predictions.evaluate()
