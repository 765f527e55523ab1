"""Runs of the trainer over swept keys and seeds, each a folder with a run file of its own that resumes, and means over
seeds; and how sharp the minimum is that a run ended in."""

import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..metrics import TITLES, training_loss
from ..models import box_sharpness, hessian_eigenvalues
from ..models.dlrm import logits_of
from ..nn.collection import TieredEmbeddingBagCollection
from ..report import Line, Section, Step, figure, page_of
from ..settings.sections import ConfigError, Override, to_dict, to_toml, toml_value
from ..store import open_store
from ..system.checks import excerpt
from ..system.files import make_directory, write_text
from ..system.processes import child_options
from ..system.signals import handlers_restored
from ..system.terminal import columns_of
from .build import build_model, look_here, open_data
from .checkpoint import load_model, saved_config
from .config import RunConfig, load, parse_override

SEED: Final = "train.seed"
MAX_RUNS: Final = 10_000
_MAX_NAME: Final = 120
_RUN_FILE: Final = "run.toml"
_RESULT: Final = "result.json"
_LOG: Final = "log.txt"
_POLL_SECONDS: Final = 0.05
_BATCH: Final = 2048  # samples, of which sharpness is the mean
_TRAIN: Final = "from tierstore.system.signals import end_with; end_with({}); import tierstore.__main__"
_SHARE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")  # of the machine's memory, which runs at the same time divide


class Axis(NamedTuple):
    """A swept key; of each of its values how people read it, and what sets it."""

    name: str
    choices: tuple[tuple[str, Override], ...]


class SweepRun(NamedTuple):
    """One run: its folder, what each axis is, and all its keys."""

    folder: Path
    labels: dict[str, str]
    config: RunConfig

    @property
    def result(self) -> dict[str, Any] | None:
        """What ``tierstore train --json`` wrote; None before the run has ended."""
        path = self.folder / _RESULT
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"interrupted": True}
        return None if found["interrupted"] else found


def axis_of(text: str) -> Axis:
    """Of ``section.key=value,value,...``, each value in TOML or a bare word. ConfigError for another form."""
    name, equals, values = text.partition("=")
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
        written = [value if isinstance(value, str) else toml_value(value) for value in found] or [""]
    except (ValueError, TypeError):  # no TOML, or a date
        written = [value.strip() for value in values.split(",")]
    if equals and "" in written:
        raise ConfigError(f"--set {excerpt(text)}: a value is empty; write train.batch_size=256,1024")
    choices = [(value, parse_override(f"{name}{equals}{value}")) for value in written]
    if len(set(written)) < len(written):
        raise ConfigError(f"--set {excerpt(text)}: a value stands there twice; give each once")
    return Axis(name.strip(), tuple(choices))


def seed_axis(first: int, count: int) -> Axis:
    """``count`` seeds from ``first`` on."""
    return axis_of(f"{SEED}={','.join(map(str, range(first, first + count)))}")


def runs_of(run_file: str | Path, folder: str | Path, axes: Sequence[Axis]) -> list[SweepRun]:
    """Every combination of the axes' choices, the last axis the fastest. A run's own folder in ``folder`` is named by
    what is swept. ConfigError: an axis is there twice, a key or a value is not valid, or there are more than
    ``MAX_RUNS``."""
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        way = "leave it out: --seeds N takes N seeds from the run file's on" if twice == SEED else f"give {twice}=A,B"
        raise ConfigError(f"--set {twice} stands there twice; {way}")
    count = math.prod(len(axis.choices) for axis in axes)
    if count > MAX_RUNS:
        raise ConfigError(f"these are {count:,} runs; a sweep has at most {MAX_RUNS:,}")
    runs = []
    for choices in itertools.product(*(axis.choices for axis in axes)):
        labels = {name: label for name, (label, _) in zip(names, choices, strict=True)}
        text = ",".join(f"{name}={label}" for name, label in labels.items())
        plain = re.sub(r"[^\w.,=+-]+", "_", text)[:_MAX_NAME]
        is_plain = plain == text  # else a digest keeps names apart
        own = Path(folder).absolute() / (plain if is_plain else f"{plain}-{sha256(text.encode()).hexdigest()[:8]}")
        try:
            config = load(run_file, [override for _, override in choices])
        except ConfigError as error:
            raise ConfigError(f"{own.name}: {error}") from None
        paths = {name: os.path.abspath(path) for name in ("path", "test_path") if (path := getattr(config.data, name))}
        record = config.store.record and os.path.abspath(config.store.record)
        store = replace(config.store, path=str(own / "store"), record=record)
        files = {key: str(own / key) if getattr(config.train, key) else "" for key in ("metrics", "tensorboard")}
        train: Any = replace(config.train, **files)  # type: ignore[arg-type]
        data = replace(config.data, **paths)
        runs.append(SweepRun(own, labels, replace(config, store=store, data=data, train=train)))
    return runs


def prepare(runs: Sequence[SweepRun]) -> None:
    """Give each run its folder and run file. ConfigError, and nothing is written, if one was begun with other keys."""
    for run in runs:
        path = run.folder / _RUN_FILE
        before = to_dict(load(path)) if path.exists() else {}
        for section, keys in to_dict(run.config).items() if before else ():
            for key, value in keys.items():
                if before[section][key] != value:
                    raise ConfigError(
                        f"{run.folder} was begun with {section}.{key} = {excerpt(before[section][key])}, now "
                        f"{excerpt(value)}; name another folder for this sweep, or delete that run's"
                    )
    for run in runs:
        make_directory(run.folder)
        write_text(run.folder / _RUN_FILE, to_toml(run.config), force=True)


def run_all(runs: Sequence[SweepRun], *, jobs: int = 1, told: Callable[[SweepRun, int], None]) -> None:
    """Train those that have not ended, ``jobs`` at a time, each in a process of its own that resumes.

    Args:
        told: is called with each run that ends, and its exit status.

    Raises:
        KeyboardInterrupt: by Ctrl-C or SIGTERM, once all that ran have committed.
    """
    waiting = iter([run for run in runs if run.result is None])
    running: dict[subprocess.Popen[bytes], SweepRun] = {}
    with handlers_restored(signal.SIGTERM):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while True:
                for run in itertools.islice(waiting, jobs - len(running)):
                    running[_begin(run, jobs)] = run
                if not running:
                    return
                for process in [each for each in running if each.poll() is not None]:
                    told(running.pop(process), process.returncode)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                process.wait()
            raise


def _begin(run: SweepRun, jobs: int) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C reaches it by ``run_all`` alone, once. It ends with this process, however."""
    arguments = ["train", str(run.folder / _RUN_FILE), "--resume", "--json", str(run.folder / _RESULT)]
    share = _SHARE.fullmatch(str(run.config.store.ddr))
    if share is not None:
        arguments += ["--ddr", f"{float(share[1]) / jobs}%"]
    own = str(max(1, (os.cpu_count() or 1) // jobs))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", own)} if jobs > 1 else {}
    look_here()  # a model's class may be there
    with (run.folder / _LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _TRAIN.format(os.getpid()), *arguments],
            stdout=log, stderr=log, start_new_session=True, **child_options(**threads),
        )  # fmt: skip


def failure_of(run: SweepRun) -> str:
    """The last line that the run wrote, and where the others are."""
    lines = (run.folder / _LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    return f"{next((line for line in reversed(lines) if line.strip()), 'it said nothing')} ({run.folder / _LOG})"


class Measure(NamedTuple):
    """A figure of a run's result; ``of`` gives None where it has none."""

    name: str
    unit: str
    form: str
    of: Callable[[dict[str, Any]], float | None]


MEASURES: Final = (
    *(Measure(name, name, ".4f", lambda run, key=key: (run["test"] or {}).get(key)) for key, name in TITLES.items()),  # type: ignore[misc]
    Measure("training loss", "log loss", ".4f", lambda result: result["loss"]),
    Measure("steps", "steps", ",.0f", lambda result: result["step"]),
    Measure("seconds", "s", ",.1f", lambda result: result["seconds"]),
    Measure("samples/s", "samples/s", ",.0f", lambda result: result["samples_per_second"]),
)
_TONES: Final = ("c1", "c2", "c3", "c4", "c5", "c6")
_NOT_PLOTTED: Final = ("training loss", "steps", "seconds")


class Spread(NamedTuple):
    """A measure of runs that differ in their seeds alone; ``deviation``: standard, 0 of one run."""

    mean: float
    deviation: float
    low: float
    high: float


class Group(NamedTuple):
    """Runs that differ in nothing but their seeds: what is swept, how many have ended, each measure that they have."""

    labels: dict[str, str]
    ended: int
    measured: dict[str, Spread]


def groups_of(runs: Sequence[SweepRun]) -> list[Group]:
    """In the runs' order."""
    found: dict[tuple[tuple[str, str], ...], list[dict[str, Any] | None]] = {}
    for run in runs:
        key = tuple((name, label) for name, label in run.labels.items() if name != SEED)
        found.setdefault(key, []).append(run.result)
    groups = []
    for key, results in found.items():
        ended, measured = [result for result in results if result is not None], {}
        for each in MEASURES:
            if values := [value for value in map(each.of, ended) if value is not None]:
                deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                measured[each.name] = Spread(statistics.fmean(values), deviation, min(values), max(values))
        groups.append(Group(dict(key), len(ended), measured))
    return groups


def _compared(groups: Sequence[Group]) -> tuple[list[Measure], list[list[str]]]:
    """The measures that some group has; and below a head of each group its labels, runs and means, with deviations."""
    measures = [each for each in MEASURES if any(each.name in group.measured for group in groups)]
    rows = [[*groups[0].labels, "runs", *(measure.name for measure in measures)]]
    for group in groups:
        rows.append([*group.labels.values(), str(group.ended)])
        for measure in measures:
            found = group.measured.get(measure.name)
            spread = f" ± {found.deviation:{measure.form}}" if found and found.deviation else ""
            rows[-1].append(f"{found.mean:{measure.form}}{spread}" if found else "")
    return measures, rows


def _best(groups: Sequence[Group], table: Sequence[Sequence[str]]) -> str:
    """The combination of the lowest loss, of test rows if there are any; "" without a swept key or a loss."""
    for name in ("log loss", "training loss"):
        losses = {place: group.measured[name].mean for place, group in enumerate(groups) if name in group.measured}
        if losses and groups[0].labels:
            place = min(losses, key=losses.__getitem__)
            setting = ", ".join(f"{key} = {value}" for key, value in groups[place].labels.items())
            return f"Lowest {name}: {table[1 + place][table[0].index(name)]}, with {setting}"
    return ""


def sweep_table(runs: Sequence[SweepRun]) -> str:
    """For a terminal: a line for each combination of what is swept, means over seeds with standard deviations."""
    return "\n".join(columns_of(_compared(groups_of(runs))[1], is_last_text=False))


def rows_of(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """JSON-able, of each run that has ended: what is swept, its folder, its measures."""
    return [
        {**run.labels, "folder": run.folder.name, **{measure.name: measure.of(result) for measure in MEASURES}}
        for run in runs
        if (result := run.result) is not None
    ]


def sweep_page(title: str, runs: Sequence[SweepRun]) -> str:
    """The page: plots over the first swept key, a line for each combination of the others, with a band from the least
    to the most of any seed; and the table."""
    groups = groups_of(runs)
    measures, table = _compared(groups)
    ended = sum(group.ended for group in groups)
    notes = [f"{ended:,} of {len(runs):,} runs have ended. Figures are means over seeds, ± their standard deviation."]
    if best := _best(groups, table):
        notes.insert(0, best)
    over = next(iter(groups[0].labels), "")
    places = list(dict.fromkeys(next(iter(each.labels.values()), "") for each in groups))
    plots: list[Section] = []
    for measure in measures:
        steps: dict[str, list[Step]] = {}
        for group in () if measure.name in _NOT_PLOTTED else groups:
            if (found := group.measured.get(measure.name)) is not None:
                first, *others = group.labels.values() or ("",)
                place = 1 + places.index(first)
                steps.setdefault(", ".join(others), []).append(Step(place, place, found.mean, (found.low, found.high)))
        lines = [
            Line(name, tone, own) for tone, (name, own) in zip(itertools.cycle(_TONES), steps.items(), strict=False)
        ]
        plots += figure(measure.name, lines, unit=measure.unit, over=over, labels=places)
    return page_of(title, [Section("Answer", notes), *plots, Section("Figures", table=table)])


def write(folder: Path, title: str, runs: Sequence[SweepRun]) -> None:
    """What has ended, for notebooks and eyes: ``sweep.json`` and ``sweep.html``."""
    write_text(folder / "sweep.json", json.dumps(rows_of(runs), indent=2) + "\n", force=True)
    write_text(folder / "sweep.html", sweep_page(title, runs), force=True)


class Sharpness(NamedTuple):
    """Of the mean loss over ``rows`` training rows, at the dense weights of a store's ``version``: ``box_sharpness``
    by epsilon, of all weights or in a random subspace of 100 dimensions; and the largest eigenvalue of the Hessian."""

    version: int
    rows: int
    whole_1e3_percent: float
    whole_5e4_percent: float
    subspace_1e3_percent: float
    largest_eigenvalue: float


def sharpness_of(folder: str | Path, *, rows: int = 8192) -> Sharpness:
    """Of a DLRM's last commit, on its first ``rows`` training rows, at most ``data.train_rows`` (Keskar et al., "On
    large-batch training for deep learning: generalization gap and sharp minima", ICLR 2017). Rows of tables are
    constants; NaN where the loss is no number. The store is only read. Memory: some 1,000 bytes for each dense weight.

    Raises:
        ValueError: ``folder`` is no store of ``tierstore train``, or its data are not there or have fewer rows.
        StoreNotFoundError, DamagedError.
    """
    with torch.no_grad(), torch.random.fork_rng([]), open_store(folder, mode="r", ddr="256MiB") as store:
        config, version = saved_config(store.extra, str(folder)), store.version
        if config is None or rows < 1:
            raise ValueError(f"{folder}, rows={rows}: give the store of a DLRM of tierstore train, and 1 row or more")
        embeddings = TieredEmbeddingBagCollection(store, tables=list(config.data.sparse_columns))
        model = build_model(config, embeddings).eval()
        load_model(model, store.tensors())
        (reader, hasher), stop = open_data(config), min(rows, config.data.train_rows or rows)
        batches = reader.batches(hasher, batch_size=_BATCH, stop_row=stop, log_dense=config.data.log_dense)
        parts = [(batch, embeddings(batch.sparse).values()) for batch in batches]

    def losses() -> Iterator[Tensor]:
        for batch, pooled in parts:
            logits = logits_of(model, batch.dense, pooled)
            mean = training_loss(logits, batch.labels, batch.weights, config.data.label_weights)
            yield mean * (len(batch) / stop)

    if not math.isfinite(sum(float(loss.detach()) for loss in losses())):
        return Sharpness._make([version, stop, *[math.nan] * 4])
    weights, boxes = list(model.dense_parameters().values()), ((1e-3, None), (5e-4, None), (1e-3, 100))
    percents = [box_sharpness(losses, weights, epsilon=epsilon, dims=dims) for epsilon, dims in boxes]
    largest = hessian_eigenvalues(losses, weights, iterations=50, tolerance=1e-3).largest
    return Sharpness._make([version, stop, *percents, largest])
