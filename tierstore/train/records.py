"""What a run says of itself while it trains: records, for callbacks, as JSON lines, and for TensorBoard."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..system.files import write_text
from .build import loaded
from .config import TrainSection


class Record(NamedTuple):
    """What a run has just done.

    Attributes:
        event: "step"; "test", of the test rows; "commit", once it is durable.
        step, epoch: steps since the run was begun, and whole epochs; of a commit, those that it holds.
        rows: trained on since this process began.
        figures: of a step ``loss``, the batch's mean, a scalar Tensor: ``float(loss)`` waits for the device. Of a test
            ``auc``, ``log_loss``, and of several labels each ``auc/NAME``, ``log_loss/NAME``. Of a commit ``version``.
    """

    event: Literal["step", "test", "commit"]
    step: int
    epoch: int
    rows: int
    figures: Mapping[str, Any]


@contextlib.contextmanager
def listeners(section: TrainSection, step: int, *, resume: bool) -> Iterator[list[Callable[[Record], object]]]:
    """The callbacks that a run file names, and writers of its metrics, which go on after the step. ConfigError: a
    callback is not there. ImportError: no TensorBoard. ValueError: the file exists, and the run is not resumed."""
    calls: list[Callable[[Record], object]] = [loaded(name, "train.callbacks") for name in section.callbacks]
    with contextlib.ExitStack() as stack:
        if section.metrics:
            path = Path(section.metrics)
            if path.exists() and not resume:
                raise ValueError(f"train.metrics = {section.metrics!r} exists: delete it, or name another file")
            write_text(path, "".join(_lines_up_to(path, step)), force=True)
            file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
            calls.append(_thinned(lambda record: file.write(_line(record)), section.metrics_every))
        if section.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("train.tensorboard needs TensorBoard; install it: pip install tensorboard") from error
            board = stack.enter_context(SummaryWriter(section.tensorboard, purge_step=step + 1 if step else None))

            def draw(record: Record) -> None:
                for name, value in record.figures.items():
                    board.add_scalar(f"{record.event}/{name}", value, record.step)

            calls.append(_thinned(draw, section.metrics_every))
        yield calls


def _lines_up_to(path: Path, step: int) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        with contextlib.suppress(ValueError):  # the last one, cut short
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                yield line


def _line(record: Record) -> str:
    figures = {name: value if math.isfinite(value) else None for name, value in record.figures.items()}
    return json.dumps({"event": record.event, "step": record.step, "epoch": record.epoch, **figures}) + "\n"


def _thinned(write: Callable[[Record], object], every: int) -> Callable[[Record], object]:
    """Of steps one record for so many, with their mean loss and samples/s; others as they are."""
    losses: list[Any] = []
    rows, begun = 0, time.perf_counter()

    def call(record: Record) -> None:
        nonlocal rows, begun
        if record.event != "step":
            write(record)
            return
        losses.append(record.figures["loss"])
        if record.step % every == 0:
            now = time.perf_counter()
            loss, speed = sum(map(float, losses)) / len(losses), (record.rows - rows) / (now - begun)
            write(record._replace(figures={"loss": loss, "samples_per_second": speed}))
            rows, begun = record.rows, now
            losses.clear()

    return call
