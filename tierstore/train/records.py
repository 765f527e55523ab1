"""What a run reports while it trains: records, for callbacks, as JSON lines, and for TensorBoard."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..system.checks import packages_for
from ..system.files import write_text
from .build import loaded
from .config import TrainSection


class Record(NamedTuple):
    """What a run has just done.

    Attributes:
        event: "step"; "metrics", of a window that ends; "test", of the test rows; "commit", once it is durable.
        step, epoch: steps since the run was begun, and whole epochs; of a commit, those that it holds.
        rows: trained on since this process began.
        figures: of a step ``loss``, the batch's mean, a scalar Tensor: ``float(loss)`` waits for the device. Of metrics
            as ``Metrics.compute`` gives, of a test as ``Evaluation.figures``. Of a commit ``version``.
    """

    event: Literal["step", "metrics", "test", "commit"]
    step: int
    epoch: int
    rows: int
    figures: Mapping[str, Any]


@contextlib.contextmanager
def listeners(section: TrainSection, step: float, *, resume: bool) -> Iterator[list[Callable[[Record], object]]]:
    """The callbacks that a run file names, and writers of its metrics, which go on after the step; infinity: after all
    there is. ConfigError: a callback is not there. ImportError: no TensorBoard. ValueError: there are metrics, and the
    run is not resumed, or the file holds something else."""
    calls: list[Callable[[Record], object]] = [loaded(name, "train.callbacks") for name in section.callbacks]
    with contextlib.ExitStack() as stack:
        if section.metrics:
            path = Path(section.metrics)
            if path.exists() and not resume:
                raise ValueError(f"train.metrics = {section.metrics!r} exists: delete it, or name another file")
            write_text(path, "".join(_lines_up_to(path, step)), force=True)
            file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
            calls.append(Thinned(lambda record: file.write(_line(record)), section.metrics_every))
        if section.tensorboard:
            with packages_for("train.tensorboard", "tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            if not resume and any(Path(section.tensorboard).glob("events.out.tfevents*")):
                raise ValueError(f"train.tensorboard = {section.tensorboard!r} has events: name another folder")
            purged = int(step) + 1 if resume and step < math.inf else None
            board = stack.enter_context(SummaryWriter(section.tensorboard, purge_step=purged))

            def draw(record: Record) -> None:
                for name, value in record.figures.items():
                    board.add_scalar(f"{record.event}/{name}", value, record.step)

            calls.append(Thinned(draw, section.metrics_every))
        yield calls


def _lines_up_to(path: Path, step: float) -> Iterator[str]:
    """A file's records of up to that step, without a last line that was cut short. ValueError: a line is no record."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n") and line.startswith("{"):
            return
        try:
            is_before = json.loads(line)["step"] <= step
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{path}, line {number}, is no record of a run; name another file in --metrics") from None
        if is_before:
            yield line


def _line(record: Record) -> str:
    figures = {name: value if math.isfinite(value) else None for name, value in record.figures.items()}
    return json.dumps({"event": record.event, "step": record.step, "epoch": record.epoch, **figures}) + "\n"


class Thinned:
    """Writes one record for each ``every`` steps, with their mean loss and samples/s; other records as they are."""

    def __init__(self, write: Callable[[Record], object], every: int) -> None:
        self._write, self._every = write, every
        self._steps: list[Record] = []  # that are not written yet
        self._rows, self._begun = 0, time.perf_counter()

    def __call__(self, record: Record) -> None:
        if record.event != "step":
            self._write(record)
            return
        self._steps.append(record)
        if record.step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._steps:
            last, now = self._steps[-1], time.perf_counter()
            loss = sum(float(each.figures["loss"]) for each in self._steps) / len(self._steps)
            speed = (last.rows - self._rows) / (now - self._begun)
            self._write(last._replace(figures={"loss": loss, "samples_per_second": speed}))
            self._steps, self._rows, self._begun = [], last.rows, now
