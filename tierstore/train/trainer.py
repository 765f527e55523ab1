"""The training run: read, look up, step, commit, evaluate; its progress bar, Ctrl-C as a request to stop, and the
command that starts it again."""

import contextlib
import itertools
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm

from ..dist import own_tensors
from ..errors import NonFiniteError, TierstoreError
from ..kernels.jit import JIT_ENABLED
from ..metrics import TITLES, Evaluation, Predictions, training_loss
from ..nn.prefetch import prefetch
from ..optim import HessianFree
from ..pool.stats import total
from ..store.commits import PendingCommit
from ..store.directory import kept_if_committed
from ..store.recording import require_recordable
from ..system.processes import launched_rank
from ..system.signals import handlers_restored
from ..system.sizes import format_size
from .build import Run, build_run, dense_parameters, open_data, open_run_store, open_test_data, reader_of_epoch
from .checkpoint import Position, commit_run, require_alike, require_resumable, require_same_files, restore_run
from .config import OptimizerSection, RunConfig, TrainSection
from .processes import Processes, joined
from .readers import Batch, DataError, FeatureHasher, Reader
from .records import Record, Thinned, listeners
from .summary import History, RankSummary, Summary, digest_bits, own_bytes, together

_STEPS: Final = 4
_MAX_BATCH: Final = 64
_MAX_TABLE_ROWS: Final = 2048
_FIXED_BYTES: Final = 400 * 2**10  # write staging, and a little more
_CACHED_ROWS: Final = 256  # of float32 with two values of optimizer state for each: few enough that some are evicted
_HBM_ROWS: Final = 768
"""At as many bytes a row: space for a batch, not for those of all steps, also if a row needs half as many bytes."""
_warm: set[object] = set()
_REFRESH_SECONDS: Final = 0.5
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def train(config: RunConfig, *, resume: bool = False, bits: bool = False) -> Summary:
    """Train as the configuration says, committing as it goes, then evaluate on the test rows.

    The result depends on [data], [embedding], [model], [optimizer] and [train] only, and in its last bits on the
    device. Sets torch's seed and number of threads. Ctrl-C, or SIGTERM, commits and returns early.

    Where torchrun started this process, or there is a process group already, all its ranks train together, on the CPU.
    Then the number of ranks, [ranks] and which rank owns what, where owners pool, decide the last bits too. All ranks
    return the same, but for ``store``.

    Args:
        resume: continue from the last commit of the store, or begin if there is none.
        bits: compute the digest that the summary's ``bits`` holds; reads every row.

    ValueError: the configuration does not fit the data or the store, the data is broken, or the store holds a run and
    ``resume`` is not set. TierstoreError: of a store.
    """
    torch.set_num_threads(config.train.torch_threads)
    with joined(config) as processes:
        return _train(config, processes, resume=resume, bits=bits)


def _train(config: RunConfig, processes: Processes, *, resume: bool, bits: bool) -> Summary:
    section = config.store
    if section.record:
        require_recordable(section.record)
    require_alike(config, processes)
    reader, hasher = open_data(config, follow=True)
    test_reader = open_test_data(config, reader)
    _require_rows(config, reader, test_reader)
    with kept_if_committed(Path(section.path)), open_run_store(config, processes) as store:
        require_resumable(store, config)
        require_same_files(store, config, reader.files)
        if store.version and not resume:
            raise ValueError(
                f"{store.directory} holds a run already: continue it with --resume, or name another folder with --store"
            )
        warm_up(config)
        training = _Training(build_run(config, store, processes), reader, test_reader, hasher)
        run = training.run
        recorder = run.local.record(section.record, rate=section.record_rate) if section.record else None
        done = math.inf if training.is_whole else training.position.step
        reported = listeners(TrainSection() if processes.rank else config.train, done, resume=resume)
        with recorder or contextlib.nullcontext(), reported as training.listeners:
            try:
                training.train()
            except NonFiniteError as error:
                error.args = (training.described(error),)
                raise
            folder, begun, tiers, end = str(run.local.directory), training.start_bytes, run.local.stats(), own_bytes()
            ranks = processes.gather(RankSummary(folder, tiers, begun, end))
            history = together(processes.gather(training.history.points()))
            try:
                test = training.evaluate() if config.data.has_test and training.is_whole else None
            except DataError as error:
                raise DataError(
                    f"{error}; training is committed as version {store.version}: lower data.test_rows, and go on with "
                    "--resume"
                ) from error
        return Summary(
            store=folder,
            device=str(run.local.device),
            version=store.version,
            commit_id=run.local.commit_id(run.local.version),
            interrupted=not training.is_whole,
            step=training.position.step,
            epochs=training.position.epoch,
            ended=training.position.ended,
            rows=history[-1].samples,
            seconds=history[-1].seconds,
            samples_per_second=history[-1].samples / history[-1].seconds,
            loss=training.history.loss,
            test=test,
            tiers=total([each.tiers for each in ranks]),
            start_bytes=sum(each.start_bytes for each in ranks),
            end_bytes=sum(each.end_bytes for each in ranks),
            bits=digest_bits(run) if bits else None,
            recorded=None if recorder is None else recorder.describe(),
            ranks=tuple(ranks) if processes.size > 1 else (),
            history=history,
            windows=tuple(training.history.windows),
        )


def _require_rows(config: RunConfig, reader: Reader, test_reader: Reader) -> None:
    """DataError if the readers know that there are too few rows to train on and test with."""
    train_rows, test_rows, there = config.data.train_rows, config.data.test_rows, reader.num_rows
    if test_reader is not reader:
        if test_reader.num_rows is not None and test_reader.num_rows < max(test_rows, 1):
            raise DataError(f"{test_reader.path} has {test_reader.num_rows:,} rows, and data.test_rows = {test_rows:,}")
        test_rows = 0
    if there is not None and there < train_rows + test_rows:
        raise DataError(
            f"{reader.path} has {there:,} rows; data.train_rows + data.test_rows = {train_rows:,} + {test_rows:,} are "
            "more: lower one of the two"
        )


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Gives whether SIGINT or SIGTERM came; a second one ends the process as usual. Only the main thread sees them."""
    is_requested, own = False, contextlib.ExitStack()

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested:
            own.close()
            signal.raise_signal(number)
        is_requested = True
        # A plain write: a handler may run in the middle of any other output.
        sys.stderr.write("\nstopping after this step ... (again: stop now, losing what is not committed)\n")

    with own:
        if threading.current_thread() is threading.main_thread():
            own.enter_context(handlers_restored(*_SIGNALS))
            for number in _SIGNALS:
                signal.signal(number, on_signal)
        yield lambda: is_requested


class _Training:
    """A run from where its store's last commit left it; commits are written in the background, one at a time."""

    def __init__(self, run: Run, reader: Reader, test_reader: Reader, hasher: FeatureHasher) -> None:
        self.run, self._config, self._hasher = run, run.config, hasher
        self._reader, self._test_reader = reader, test_reader
        self.position = restore_run(run)
        self.start_bytes = own_bytes()
        self.history = History(run.local.stats, step=self.position.step)
        rows = run.config.data.train_rows or reader.num_rows or 0  # of an epoch
        total, done = rows * run.config.train.epochs or None, rows * self.position.epoch + self.position.row
        look: dict[str, Any] = {"unit": " samples", "unit_scale": True, "leave": False}
        self._bar: Any = tqdm(total=total, initial=done, disable=None if run.processes.rank == 0 else True, **look)
        self._next_refresh = 0.0
        self.listeners: list[Callable[[Record], object]] = []
        self._stopped, self._tested_at = False, time.monotonic()
        self._at_end, self._committed_at = False, time.monotonic()  # of a folder that was followed
        self._tested: tuple[int, Evaluation] | None = None  # the step after which, and the result
        self._pending: PendingCommit | None = None
        self._commit = (self.position, self.history.loss)  # where the last one stands, and the loss then

    @property
    def is_whole(self) -> bool:
        return self._at_end or max(self.position.epoch, self.position.ended) >= self._config.train.epochs

    def train(self) -> None:
        """All epochs, or as far as Ctrl-C lets them, and a last commit."""
        self.run.model.train()
        with self._bar, stop_requests() as stop:
            self._go_on()
            while not self.is_whole and not self._stopped:
                self._train_epoch(stop)
            if self.is_whole and self.history.samples and self.run.metrics.rows:
                self._measure()
            if self._config.train.keep_best and self.is_whole:
                self._show_best()
            self._end_commit()
            if self.position != self._commit[0]:
                self._begin_commit()
                self._end_commit(is_said=False)
        self.history.close()

    def _show(self, rows: int) -> None:
        """Loss, hit rates and bytes from SSD, on a terminal's stderr."""
        now = time.monotonic()
        if not rows:
            self._bar.set_postfix_str("waiting for files")
        elif not self._bar.disable and now >= self._next_refresh:
            self._next_refresh, stats = now + _REFRESH_SECONDS, self.history.tiers()
            hbm = f"HBM hits {100 * stats.hbm.hit_rate:.1f} %, " if stats.hbm.capacity_rows else ""
            self._bar.set_postfix_str(
                f"loss {self.history.loss:.4f}, {hbm}DDR hits {100 * stats.ddr.hit_rate:.1f} %, "
                f"from SSD {format_size(stats.ssd.bytes_read)}",
                refresh=False,
            )
        self._bar.update(rows)

    def _say(self, text: str) -> None:
        """Write a line above the bar."""
        if self.run.processes.rank == 0:
            self._bar.write(text, file=sys.stderr)

    def described(self, error: NonFiniteError) -> str:
        """It, with the run's step and, once the commit in flight has ended, the version to go on from."""
        self._end_commit(is_said=False)
        step, version = self.position.step + bool(error.found), self.run.store.version
        way = f"go on from version {version} with --resume" if version else "begin again"
        return f"step {step:,}: {error}. Find the cause, as data or a high learning rate, and {way}"

    def _go_on(self) -> None:
        """Count tests again after an early end, and take a test that the last process had no time for or failed in."""
        section, step = self._config.train, self.position.step
        if self.is_whole or not step:
            return
        if self.position.ended:
            self.position = replace(self.position, tests_since=0, ended=0)
        every = section.test_every_steps
        if (section.test_each_epoch and not self.position.row) or (every and step % every == 0):
            self._test(f"step {step:,}")

    def _show_best(self) -> None:
        """Go back to the version that tested best, the last one included."""
        self._test(f"step {self.position.step:,}")
        self._end_commit()
        version = self.position.best_version
        if self.position.tests_since and version in self.run.local.versions:
            self.run.store.rollback(version)
            position = restore_run(self.run)
            self.position = replace(position, best_version=0, ended=self._config.train.epochs)
            self._say(f"version {version} tested best, at step {self.position.step:,}")

    def _train_epoch(self, stop: Callable[[], bool]) -> None:
        section, every = self._config.train, self._config.train.commit_every
        stop_row = self._config.data.train_rows or None
        reader = reader_of_epoch(self._config, self._reader, self.position.epoch, self.position.reader)
        with contextlib.closing(self._batches(reader, self.position.row, stop_row)) as batches:
            for batch in batches:
                if not batch.total_rows:
                    self._wait(batch, stop)
                    if self._stopped:
                        return
                    continue
                set_rates(self.run, self._config.optimizer, self.position.step)
                if self._config.model.class_:  # which may draw: what, the step and the rank decide
                    torch.manual_seed((section.seed << 44 ^ self.position.step << 12 ^ self.run.processes.rank) % 2**63)
                loss, self._stopped = train_step(self.run, batch, stop)
                if not self.history.samples:
                    self.start_bytes = own_bytes()
                self.history.step(batch.total_rows, loss)
                step, row = self.position.step + 1, self.position.row + batch.total_rows
                newest = max(filter(None, (self.position.event_time, batch.event_time)), default=None)
                self.position = replace(self.position, step=step, row=row, reader=batch.position, event_time=newest)
                self._show(batch.total_rows)
                self._report("step", self.position, loss=loss)
                if self.run.metrics.is_full:
                    self._measure()
                if self._stopped:
                    return
                seconds, tests_every = 60 * section.test_every_minutes, section.test_every_steps
                is_due = seconds and time.monotonic() - self._tested_at >= seconds
                if is_due or (tests_every and step % tests_every == 0):
                    self._test(f"step {step:,}")
                    if self.is_whole:
                        return
                elif (every and step % every == 0) or self._is_commit_due():
                    self._begin_commit()
                if self._pending is not None and self._pending.done():
                    self._end_commit()
        if not self.position.row:
            raise DataError(f"{self._reader.path} has no rows to train on")
        if self._config.data.follow:
            self._at_end = True
            return
        self._bar.total = self._bar.total or self.position.row * section.epochs  # which only the end of an epoch shows
        self.position = replace(self.position, epoch=self.position.epoch + 1, row=0)
        if section.test_each_epoch:
            self._test(f"epoch {self.position.epoch:,}")

    def _measure(self) -> None:
        """Report the metrics of the window so far."""
        figures = self.run.metrics.compute(self.run.processes.gather)
        self.history.window(figures)
        self._report("metrics", self.position, **figures)

    def _wait(self, batch: Batch, stop: Callable[[], bool]) -> None:
        """Do what is due while a folder has nothing new."""
        self._show(0)
        self.position = replace(self.position, reader=batch.position)
        self._end_commit()
        if self._is_commit_due():
            self._begin_commit()
        self._stopped = stop()

    def _is_commit_due(self) -> bool:
        """By time: once there are new steps, and no commit is in flight."""
        seconds, is_idle = self._config.train.commit_seconds, self._pending is None or self._pending.done()
        is_due = 0 < seconds <= time.monotonic() - self._committed_at
        return is_due and is_idle and self.position.step > self._commit[0].step

    def _test(self, when: str) -> None:
        """Test unless that was done, and commit before it and with what came out, which may end the run."""
        section = self._config.train
        if not self._config.data.has_test or self.position.tested == self.position.step:
            return
        self._end_commit()
        if self.position != self._commit[0]:
            self._begin_commit()  # before what the test data may be
        rows, auc, loss, figures = self.evaluate()
        by, best = section.best_by, figures[section.best_by]
        if math.isnan(best):
            raise DataError(
                f"test rows have no {TITLES[by]}: labels are alike, or groups missing; test others, or go by log_loss"
            )
        self._tested_at = time.monotonic()
        self.run.model.train()
        self._say(f"{when}: tested {rows:,} rows, AUC {auc:.4f}, log loss {loss:.4f}")
        self.position = self.position.after({"calibration": abs(best - 1), "auc": -best, "gauc": -best}.get(by, best))
        if section.patience and self.position.tests_since >= section.patience:
            self._say(f"ended: none of the last {section.patience:,} tests was the best")
            self.position = replace(self.position, ended=section.epochs)
        self._begin_commit()

    def _begin_commit(self) -> None:
        """End the one in flight, and begin another."""
        self._end_commit()
        for call in self.listeners:
            if isinstance(call, Thinned):
                call.flush()
        best, local, keep = self.position.best_version, self.run.local, self._config.store.keep
        if self._config.train.keep_best:  # that one stays, besides the last ones
            local.dropped, local.keep = self.position.dropped(local.versions, keep), keep + (best in local.versions)
        self._committed_at = time.monotonic()
        self._pending = commit_run(self.run, self.position, self._reader.files)
        if self.position.best is not None:
            self.position = replace(self.position, best_version=best or self._pending.version)
        self._commit = (self.position, self.history.loss)

    def _end_commit(self, *, is_said: bool = True) -> None:
        """Wait for the commit in flight, and report it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            (position, loss), version = self._commit, pending.result()
            self.history.commit(position.event_time)
            if is_said:
                of_loss = "" if loss is None else f", loss {loss:.4f}"
                self._say(f"step {position.step:,}: committed version {version}{of_loss}")
            self._report("commit", position, version=version)

    def _report(self, event: Literal["step", "metrics", "test", "commit"], position: Position, **figures: Any) -> None:
        record = Record(event, position.step, position.epoch, self.history.samples, figures)
        for call in self.listeners:
            call(record)

    def _batches(self, reader: Reader, start_row: int, stop_row: int | None) -> Generator[Batch, None, None]:
        train, processes = self._config.train, self.run.processes
        batches = reader.batches(
            self._hasher,
            batch_size=train.batch_size,
            start_row=start_row,
            stop_row=stop_row,
            log_dense=self._config.data.log_dense,
            part=processes.rank,
            parts=processes.size,
        )
        return feed(self.run, batches, depth=train.prefetch_depth)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Evaluate on the test rows, of all processes, and report it; the result is kept until the next step."""
        if self._tested is not None and self._tested[0] == self.position.step:
            return self._tested[1]
        data, predictions = self._config.data, Predictions()
        first = 0 if data.test_path else data.train_rows
        self.run.model.eval()
        batches = self._batches(self._test_reader, first, first + data.test_rows if data.test_rows else None)
        with contextlib.closing(batches):
            for batch in batches:
                logits = self.run.model(batch.dense, batch.sparse).cpu()
                predictions.add(batch.labels.cpu(), logits, batch.weights, *batch.keys)
        found = Predictions.merged(self.run.processes.gather(predictions)).evaluate(self.run.measures)
        self._tested = self.position.step, found
        if self.position.tested != self.position.step:  # else it was reported
            self._report("test", self.position, **found.figures)
        return found


def warm_up(config: RunConfig) -> None:
    """Take a run's first steps twice in a temporary store of so small a budget that rows are evicted and fetched again;
    once a process for each kind of run. Changes torch's random state. Errors are left for the run to meet."""
    store, data = config.store, config.data
    kind = (
        *(store.policy, store.device, store.has_hbm, data.format, data.path),
        *(config.embedding, config.optimizer, config.model),
    )
    if not JIT_ENABLED or kind in _warm:
        return
    _warm.add(kind)
    with (
        contextlib.suppress(OSError, ValueError, TierstoreError),
        tempfile.TemporaryDirectory(prefix="tierstore-warm-up-", ignore_cleanup_errors=True) as folder,
    ):
        row_bytes = 12 * config.embedding.dim + 64
        hbm = _HBM_ROWS * row_bytes if store.has_hbm else 0
        sizes = tuple(min(size, _MAX_TABLE_ROWS) for size in config.table_sizes)
        _take_steps(
            replace(
                config,
                store=replace(store, path=folder, ddr=_FIXED_BYTES + _CACHED_ROWS * row_bytes, hbm=hbm, record=""),
                embedding=replace(config.embedding, num_embeddings=sizes),
                train=replace(config.train, batch_size=min(config.train.batch_size, _MAX_BATCH)),
            )
        )


def _take_steps(config: RunConfig) -> None:
    (reader, hasher), size, limit = open_data(config, follow=True), config.train.batch_size, config.data.train_rows
    stop_row = min(limit, _STEPS * size) if limit else None
    with open_run_store(config) as store:
        run = build_run(config, store)
        for epoch in range(2):
            batches = reader.batches(hasher, batch_size=size, stop_row=stop_row)
            with contextlib.closing(feed(run, batches, depth=config.train.prefetch_depth)) as ahead:
                for batch in itertools.islice(itertools.takewhile(len, ahead), _STEPS):
                    train_step(run, batch)
            commit_run(run, Position(epoch=epoch + 1)).result()


def train_step(run: Run, batch: Batch, wants_stop: Callable[[], bool] = lambda: False) -> tuple[Tensor, bool]:
    """One step; rows are updated inside backward. Returns the mean loss of the batch of all processes, a scalar, and
    whether one of them wants to stop. On a GPU the step may still be in flight."""
    share = len(batch) * run.processes.size / batch.total_rows
    if isinstance(run.optimizer, HessianFree):
        loss = _hessian_free_step(run, run.optimizer, batch, share)
        return run.processes.average([], loss, wants_stop())
    logits = run.model(batch.dense, batch.sparse)
    run.metrics.update(batch.labels, logits, batch.weights, *batch.keys, total_rows=batch.total_rows)
    loss = _loss(run, logits, batch) * share
    run.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    dense, own = dense_parameters(run.model), own_tensors(run.model)
    shared = [each for name, each in dense.items() if name not in own and each.requires_grad]
    for each in shared if run.processes.size > 1 else ():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad  # another rank may have one
    gradients = [each.grad for each in shared if each.grad is not None]
    agreed = run.processes.average(gradients, loss.detach(), wants_stop())
    if clip_norm := run.config.optimizer.dense_clip_norm:
        norm = get_total_norm(gradients)
        if of_towers := [dense[name].grad for name in own if name in dense]:
            norms = run.processes.gather([0.0 if each is None else float(each.norm()) for each in of_towers])
            norm = torch.tensor([norm, *map(max, *norms)]).norm()  # each host has the gradients of its own tower
        clip_grads_with_norm_(dense.values(), clip_norm, norm)
    run.optimizer.step()
    return agreed


def _hessian_free_step(run: Run, optimizer: HessianFree, batch: Batch, share: float) -> Tensor:
    """Rows are looked up once: the optimizer evaluates the dense part alone."""
    pooled = run.model.embeddings(batch.sparse).values()
    part, first = slice(math.ceil(len(batch) * run.config.optimizer.curvature_share)), iter([batch])

    def evaluated(pooled: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = run.model.dense_part(batch.dense[rows], pooled[rows])
        for own in first:  # not of the weights that the line search tries
            run.metrics.update(own.labels, logits, own.weights, *own.keys, total_rows=own.total_rows)
        return _loss(run, logits, batch, rows) * share, logits

    loss: Tensor = optimizer.step(lambda: evaluated(pooled, slice(None)), lambda: evaluated(pooled.detach(), part))
    return loss


def set_rates(run: Run, section: OptimizerSection, step: int) -> None:
    """Set the learning rates of the step that follows so many, if they change at all."""
    if section.warmup_steps or section.decay != "none":
        share = section.rate_at(step)
        for table in run.embeddings.tables:
            table.learning_rate = table.config.optimizer.lr * share
        for group in run.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def _loss(run: Run, logits: Tensor, batch: Batch, rows: slice = slice(None)) -> Tensor:
    weights = None if batch.weights is None else batch.weights[rows]
    return training_loss(logits, batch.labels[rows], weights, run.config.data.label_weights)


def feed(run: Run, batches: Iterator[Batch], *, depth: int | Literal["auto"]) -> Generator[Batch, None, None]:
    """The batches, on the store's device but for their ids: up to ``depth`` prefetched. Closing it releases what was
    prefetched and not used."""
    device = run.local.device
    ahead = prefetch(batches, run.embeddings, depth=depth, features=lambda batch: batch.sparse)
    with contextlib.closing(ahead):
        for batch in ahead:
            held: Any = {"dense": batch.dense, "labels": batch.labels, "weights": batch.weights}
            moved = {key: each.to(device, non_blocking=True) for key, each in held.items() if each is not None}
            yield replace(batch, **moved)


def command_name(ranks: int = 1) -> str:
    """What runs this program again, quoted for a shell: ``tierstore`` if that is on PATH, else this process's Python;
    torchrun where that started it, or for several ranks."""
    relative = os.path.relpath(sys.executable)
    is_shorter = os.sep in relative and len(relative) < len(sys.executable)
    python = shlex.quote(relative if is_shorter else sys.executable)
    if ranks > 1 or launched_rank() is not None:
        size = os.environ.get("WORLD_SIZE", f"{ranks}")
        local = os.environ.get("LOCAL_WORLD_SIZE", size)
        launcher = "torchrun" if shutil.which("torchrun") else f"{python} -m torch.distributed.run"
        return f"{launcher} {f'--nproc-per-node {size}' if local == size else '...'} -m tierstore"
    return "tierstore" if shutil.which("tierstore") else f"{python} -m tierstore"
