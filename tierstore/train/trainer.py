"""The training run: read, look up, step, commit, evaluate."""

import contextlib
import time
from collections.abc import Generator

import torch

from ..store.commits import PendingCommit
from ..store.recording import require_recordable
from .build import Run, build_run, open_data, open_run_store
from .checkpoint import Position, commit_run, require_resumable, restore_run
from .config import RunConfig
from .metrics import Evaluation, Predictions
from .readers import Batch, DataError, FeatureHasher, Reader
from .steps import feed, train_step
from .summary import Summary, digest_bits, own_bytes, peak_rss_bytes
from .terminal import Progress, StopRequest
from .warmup import warm_up


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
    section = config.store
    if section.record:
        require_recordable(section.record)
    reader, hasher = open_data(config)
    with open_run_store(config) as store:
        require_resumable(store, config)
        if store.version and not resume:
            raise ValueError(
                f"{store.directory} holds a run already: continue it with --resume, or name another folder with --store"
            )
        warm_up(config)
        training = _Training(config, reader, hasher, build_run(config, store))
        recorder = store.record(section.record, rate=section.record_rate) if section.record else None
        with recorder or contextlib.nullcontext():
            training.train()
            tiers, end = store.stats(), own_bytes()
            test = training.evaluate() if config.data.test_rows and training.is_whole else None
        return Summary(
            store=str(store.directory),
            device=str(store.device),
            version=store.version,
            interrupted=not training.is_whole,
            step=training.position.step,
            epochs=training.position.epoch,
            rows=training.rows,
            seconds=training.seconds,
            samples_per_second=training.rows / training.seconds if training.seconds else 0.0,
            loss=training.progress.loss,
            test=test,
            tiers=tiers,
            start_bytes=training.start_bytes,
            end_bytes=end,
            peak_rss_bytes=peak_rss_bytes(),
            bits=digest_bits(store, training.run.model) if bits else None,
            recorded=None if recorder is None else recorder.describe(),
        )


class _Training:
    """A run from where its store's last commit left it; commits are written in the background, one at a time."""

    def __init__(self, config: RunConfig, reader: Reader, hasher: FeatureHasher, run: Run) -> None:
        self.run = run
        self.position = restore_run(run)
        self.rows = 0
        self.seconds = 0.0
        self.start_bytes = own_bytes()
        rows_per_epoch = config.data.train_rows
        self.progress = Progress(
            run.store,
            total_rows=rows_per_epoch * config.train.epochs or None,
            done_rows=rows_per_epoch * self.position.epoch + self.position.row,
        )
        self._config = config
        self._reader = reader
        self._hasher = hasher
        self._pending: PendingCommit | None = None
        self._commit = (self.position.step, self.progress.loss)  # step of the last one, and the loss then

    @property
    def is_whole(self) -> bool:
        """Whether all epochs are done."""
        return self.position.epoch >= self._config.train.epochs

    def train(self) -> None:
        """All epochs, or as far as Ctrl-C lets them, and a last commit."""
        started = time.perf_counter()
        self.run.model.train()
        with contextlib.closing(self.progress), StopRequest() as stop:
            while not self.is_whole and not stop.requested:
                self._train_epoch(stop)
            self._end_commit()
            if self.position.step > self._commit[0]:
                commit_run(self.run, self._config, self.position).result()
        self.seconds = time.perf_counter() - started

    def _train_epoch(self, stop: StopRequest) -> None:
        """The rest of the position's epoch."""
        every = self._config.train.commit_every
        with contextlib.closing(self._batches(self.position.row, self._config.data.train_rows or None)) as batches:
            for batch in batches:
                loss = train_step(self.run, batch)
                if not self.rows:
                    self.start_bytes = own_bytes()
                self.rows += len(batch)
                step, epoch, row = self.position.step + 1, self.position.epoch, self.position.row + len(batch)
                self.position = Position(step, epoch, row)
                self.progress.step(len(batch), loss)
                if stop.requested:
                    return
                if every and step % every == 0:
                    self._end_commit()
                    self._pending = commit_run(self.run, self._config, self.position)
                    self._commit = (step, self.progress.loss)
                if self._pending is not None and self._pending.done():
                    self._end_commit()
        if not self.position.row:
            raise DataError(f"{self._reader.path} has no rows to train on")
        self.position = Position(self.position.step, self.position.epoch + 1, 0)

    def _end_commit(self) -> None:
        """Wait for the commit under way, and tell of it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            step, loss = self._commit
            self.progress.say(f"step {step:,}: committed version {pending.result()}, loss {loss:.4f}")

    def _batches(self, start_row: int, stop_row: int | None) -> Generator[Batch, None, None]:
        train, log_dense = self._config.train, self._config.data.log_dense
        batches = self._reader.batches(
            self._hasher, batch_size=train.batch_size, start_row=start_row, stop_row=stop_row, log_dense=log_dense
        )
        return feed(self.run, batches, depth=train.prefetch_depth, lookahead=train.lookahead)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Evaluate on the test rows, which follow the training rows."""
        data, predictions = self._config.data, Predictions()
        self.run.model.eval()
        with contextlib.closing(self._batches(data.train_rows, data.train_rows + data.test_rows)) as batches:
            for batch in batches:
                predictions.add(batch.labels, self.run.model(batch.dense, batch.sparse))
        return predictions.evaluate()
