"""What a run did and ended in: its history in bounded memory, and its figures, for people, as JSON and as a page."""

import hashlib
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import Tensor

from ..metrics import TITLES, Evaluation
from ..pool.stats import Stats
from ..report import Line, Section, Step, figure, page_of
from ..system.files import write_text
from ..system.sizes import format_count, format_size
from .build import Run, dense_state

_DIGEST_ROWS: Final = 65_536
_BITS: Final = "bits (SHA-256)"
RANGES_MAX: Final = 200  # ranges of steps that a history tells apart; even, so that all of them merge in pairs
_LOSS_STEPS: Final = 100
_OF_EACH_RANK: Final = ("hbm_hits", "hbm_unique", "ddr_hits", "ddr_unique", "bytes_read", "bytes_written")


class Point(NamedTuple):
    """Running totals after a step, since this process began to train. Neighbours differ by what the steps between
    them did."""

    step: int  # steps since the run was begun, those of earlier processes included
    samples: int
    seconds: float  # on a GPU the last steps may still be in flight
    loss_sum: float  # of the steps' mean losses
    hbm_hits: int
    hbm_unique: int  # rows asked for, as ``TierStats.unique``
    ddr_hits: int
    ddr_unique: int
    bytes_read: int  # from SSD, rows fetched ahead included
    bytes_written: int  # to SSD, rows written back and committed
    dated_commits: int = 0  # with an event time
    event_seconds: float = 0.0  # from the greatest event of each of these until it was durable


class History:
    """Totals after every step of the first 200; then of every second step, every fourth, as they come to be too
    many. It never waits for a device before it is asked. ``step``: of the run, where this process continues it."""

    def __init__(self, tiers: Callable[[], Stats], *, step: int = 0) -> None:
        self.tiers = tiers
        self.samples = 0
        self._step = step
        self._width = 1
        self._started = time.perf_counter()
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._losses: deque[Tensor] = deque(maxlen=_LOSS_STEPS)
        self.windows: list[dict[str, float]] = []  # as of ``Metrics.compute``, with first and last step; at most 200
        self._windows, self._windows_width, self._window_end = 0, 1, step
        self._before = _totals(tiers())
        self._event_delays: list[Any] = [0, 0.0]
        self._marks = [self._mark()]
        """Points, and their sums of losses, which a device may still compute."""

    @property
    def loss(self) -> float | None:
        """Mean loss of the last 100 steps, which it waits for; None before the first."""
        if not self._losses:
            return None
        losses: list[float] = torch.stack(list(self._losses)).tolist()
        return sum(losses) / len(losses)

    def step(self, samples: int, loss: Tensor) -> None:
        """Count a step; its mean loss, a scalar, is left where it is."""
        self._step += 1
        self.samples += samples
        self._losses.append(loss)
        self._loss_sum = self._loss_sum + loss
        if self._step - self._marks[-1][0].step == self._width:
            self._marks.append(self._mark())
            if len(self._marks) > RANGES_MAX:
                del self._marks[1::2]
                self._width *= 2

    def window(self, figures: Mapping[str, float]) -> None:
        """Keep the metrics of a window that ends here: of each, later of every second, fourth, ..., and of the last."""
        if self._windows % self._windows_width:
            self.windows.pop()
        elif len(self.windows) == RANGES_MAX:
            del self.windows[::2]
            self._windows_width *= 2
        self.windows.append({"first": self._window_end + 1, "step": self._step, **figures})
        self._windows, self._window_end = self._windows + 1, self._step

    def commit(self, event_time: float | None) -> None:
        """Count a commit that has become durable; the time in Unix seconds."""
        if event_time is not None:
            self._event_delays = [self._event_delays[0] + 1, self._event_delays[1] + time.time() - event_time]

    def close(self) -> None:
        """End it: what was done since the last step, as its commit, counts to the last range."""
        if self._marks[-1][0].step == self._step:
            self._marks.pop()
        self._marks.append(self._mark())

    def points(self) -> list[Point]:
        """From before the first step to the last that was counted, at most 201."""
        return [point._replace(loss_sum=float(loss_sum)) for point, loss_sum in self._marks]

    def _mark(self) -> tuple[Point, Tensor]:
        totals = (now - before for now, before in zip(_totals(self.tiers()), self._before, strict=True))
        seconds = time.perf_counter() - self._started
        return Point(self._step, self.samples, seconds, 0.0, *totals, *self._event_delays), self._loss_sum


def _totals(stats: Stats) -> list[int]:
    """In the order of ``_OF_EACH_RANK``."""
    rows = (count for tier in (stats.hbm, stats.ddr) for count in (tier.hits, tier.unique))
    return [*rows, stats.ssd.bytes_read, stats.ssd.bytes_written]


def together(ranks: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """The history of ranks that trained the same steps together: tiers of all, time of the first."""
    return tuple(
        each[0]._replace(**{name: sum(getattr(point, name) for point in each) for name in _OF_EACH_RANK})
        for each in zip(*ranks, strict=True)
    )


class RankSummary(NamedTuple):
    """What one process used; fields as in ``Summary``."""

    store: str
    tiers: Stats
    start_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run of the trainer; over ranks of all together, but for ``store`` and where ``ranks`` tells them apart."""

    store: str  # of this process
    device: str  # where the model computed
    version: int
    commit_id: str  # of the last commit, as its number is
    interrupted: bool  # whether Ctrl-C ended it early
    step: int  # steps since the run was begun, in earlier processes too
    epochs: int  # whole times through the training rows, likewise
    rows: int  # rows trained on since this process began
    seconds: float  # time it took to train on them, commits included; evaluation and compiling kernels not
    samples_per_second: float
    loss: float | None  # mean of the last 100 steps
    test: Evaluation | None
    tiers: Stats  # when training ended
    start_bytes: int
    """The process's own memory after its first step: Python, torch, compiled kernels, the rows of a few batches."""
    end_bytes: int
    """The process's own memory when training ended, without mapped pages of files, which the system takes back."""
    bits: str | None  # digest of all rows of all tables and the dense weights: equal digests, equal bits
    ended: int = 0  # epochs that it was to have, if it ended early or at its best version
    recorded: str | None = None  # what the run recorded of its lookups, and where
    ranks: tuple[RankSummary, ...] = ()  # of each rank, in order; none of one process
    history: tuple[Point, ...] = ()
    """Totals over the steps of this process, the last as the fields above say them; over ranks of all together."""
    windows: tuple[dict[str, float], ...] = ()  # as of ``History``

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; an AUC that is not defined and losses that are not finite are null."""
        fields = asdict(self) | _finite({"loss": self.loss}) | {"tiers": _tiers_to_dict(self.tiers)}
        fields["test"] = self.test and _finite({"rows": self.test.rows, **self.test.figures})
        fields["windows"] = list(map(_finite, self.windows))
        fields["ranks"] = [{**each._asdict(), "tiers": _tiers_to_dict(each.tiers)} for each in self.ranks]
        fields["history"] = [_finite(each._asdict()) for each in self.history]
        return fields

    def write(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all; errors as of ``partial_file``."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", force=True)

    def describe(self) -> str:
        """A line for each figure, for people."""
        ranks = f"{len(self.ranks)}, whose figures are added up; --json has those of each" if self.ranks else None
        others = {"ranks": ranks, "recorded": self.recorded, _BITS: self.bits}
        lines = {**figures_of(self.to_dict()), "store": f"{self.store}, version {self.version}", **others}
        return "\n".join(f"{label:34}{text}" for label, text in lines.items() if text is not None)


def figures_of(run: dict[str, Any]) -> dict[str, str]:
    """Labels and texts of what ``Summary.to_dict()`` holds, or its JSON; figures that a run has not are left out."""
    hbm, ddr, ssd = run["tiers"].values()
    test, rows, epochs = run["test"] or {}, run["rows"], run["epochs"]
    trained = f"{rows:,} rows in {run['seconds']:.1f} s"
    if not rows and not run["interrupted"]:
        more = max(epochs, run.get("ended", 0)) + 1
        complete = f"complete after {format_count(epochs, 'epoch')}; --epochs {more} goes on"
        trained = f"nothing: {complete if more > 1 else 'no file came'}"
    figures = {"trained": trained, "samples/s": f"{run['samples_per_second']:,.0f}" if rows else ""}
    losses = {"training loss": run["loss"]}
    last: dict[str, Any] = next(reversed(run["windows"]), {})
    for name, value in (last | {f"test_{name}": value for name, value in test.items()}).items():
        kind, _, metric = name.partition("_")
        metric, *of = metric.split("/", 1)
        losses |= {" of ".join([f"{kind} {TITLES[metric]}", *of]): value} if metric in TITLES else {}
    figures |= {name: "" if value is None else f"{value:.6f}" for name, value in losses.items()}
    if rows and hbm["capacity_rows"]:
        figures["HBM tier: rows, index"] = format_size(hbm["bytes"])
        figures["hit rate of the HBM tier"] = f"{100 * hbm['hit_rate']:.1f} %"
    if rows:
        figures |= {
            "DDR tier: rows, index, staging": format_size(ddr["bytes"]),
            "whole process, tier included": format_size(run["end_bytes"]),
            "  grown since its first step": format_size(max(0, run["end_bytes"] - run["start_bytes"])),
            "hit rate of the DDR tier": f"{100 * ddr['hit_rate']:.1f} %",
            "read from SSD": format_size(ssd["bytes_read"]),
            "written to SSD": format_size(ssd["bytes_written"]),
        }
    return {label: text for label, text in (figures | {_BITS: (run["bits"] or "")[:16]}).items() if text}


class _Rate(NamedTuple):
    """A plot of one running total of a history by another."""

    title: str
    unit: str
    total: str
    by: str
    times: float
    low: float | None = 0


_RATES: Final = (
    _Rate("Loss, mean of the steps", "log loss", "loss_sum", "step", 1, None),
    _Rate("Hit rate of the HBM tier", "%", "hbm_hits", "hbm_unique", 100),
    _Rate("Hit rate of the DDR tier", "%", "ddr_hits", "ddr_unique", 100),
    _Rate("Read from SSD: rows not in memory, fetched ahead", "KiB a step", "bytes_read", "step", 2**-10),
    _Rate("From the newest event to its commit", "s", "event_seconds", "dated_commits", 1),
    _Rate("Written to SSD: rows evicted, and commits", "KiB a step", "bytes_written", "step", 2**-10),
)


def table_of(runs: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """The runs' figures side by side, below their names."""
    figures = [figures_of(run) for run in runs.values()]
    labels = dict.fromkeys(label for each in figures for label in each)
    return [["", *runs], *([label, *(each.get(label, "") for each in figures)] for label in labels)]


def run_page(title: str, runs: Mapping[str, dict[str, Any]], *, notes: Sequence[str] = ()) -> str:
    """The page, some 100 KB, of one or two runs by their names; ``notes`` stand below the title."""
    described = [
        f"{name}: {run['step'] - run['history'][0]['step']:,} steps, to step {run['step']:,}, model on {run['device']}"
        f"{', interrupted' if run['interrupted'] else ''}."
        for name, run in runs.items()
    ]
    plots: list[Section] = []
    for rate in _RATES:
        drawn = [list(_steps_of(run["history"], rate)) for run in runs.values()]
        plots += figure(rate.title, [*map(Line, runs, ("c1", "c2"), drawn)], unit=rate.unit, low=rate.low)
    for heading, unit, key in (("NE", "NE", "window_ne"), ("Calibration", "mean p over mean y", "window_calibration")):
        every = [[each for each in run["windows"] if each.get(key) is not None] for run in runs.values()]
        drawn = [[Step(each["first"], each["step"], each[key]) for each in own] for own in every]
        plots += figure(f"{heading} of each window", [*map(Line, runs, ("c1", "c2"), drawn)], unit=unit)
    return page_of(title, [Section("Answer", [*notes, *described]), *plots, Section("Figures", table=table_of(runs))])


def _steps_of(history: Sequence[Mapping[str, Any]], rate: _Rate) -> Iterator[Step]:
    for a, b in itertools.pairwise(history):
        by = b[rate.by] - a[rate.by]
        if by and None not in (a[rate.total], b[rate.total]):
            yield Step(a["step"] + 1, b["step"], rate.times * (b[rate.total] - a[rate.total]) / by)


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """With None for what is not finite."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}


def _tiers_to_dict(tiers: Stats) -> dict[str, Any]:
    return {name: {**tier._asdict(), "hit_rate": tier.hit_rate} for name, tier in tiers.tiers.items()}


def digest_bits(run: Run) -> str:
    """SHA-256 over all rows of all tables and the dense weights, in hexadecimal; the same wherever these are.
    Collective."""
    digest = hashlib.sha256()
    for name in sorted(run.store.tables):
        table = run.store.tables[name]
        digest.update(f"{name} {table.config.num_embeddings} {table.config.embedding_dim}\n".encode())
        count, parts = table.config.num_embeddings, None  # all ids that have rows, ascending
        if table.config.ids is not None:
            ids = torch.cat(run.processes.gather(torch.cat([*table.local.written()])))
            parts = torch.split(ids.sort().values, _DIGEST_ROWS)
        begins = range(0, count, _DIGEST_ROWS)
        for part in parts or (torch.arange(begin, min(begin + _DIGEST_ROWS, count)) for begin in begins):
            digest.update(_bytes(run.processes.read(run.store, name, part)))
    for name, parameter in sorted(dense_state(run.model).items()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(_bytes(parameter.detach()))
    return run.processes.gather(digest.hexdigest())[0]


def _bytes(tensor: Tensor) -> memoryview:
    """Its values in order, from any device."""
    return tensor.cpu().flatten().view(torch.uint8).numpy().data


def own_bytes() -> int:
    """Memory of this process now, without mapped pages of files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)
