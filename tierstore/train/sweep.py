"""Runs of the trainer over swept keys and seeds. Each is a folder with a run file of its own, and resumes."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ..settings.sections import ConfigError, Override, to_dict, to_toml
from ..system.excerpt import excerpt
from ..system.output import write_text
from ..system.signals import handlers_restored
from .config import RunConfig, load, parse_override

RateRule = Literal["none", "linear", "sqrt"]
"""How learning rates follow the batch: not, by its size (Goyal et al. 2017), by its root (Krizhevsky 2014)."""
SEED: Final = "train.seed"
MAX_RUNS: Final = 10_000
_MAX_NAME: Final = 120
_RUN_FILE: Final = "run.toml"
_RESULT: Final = "result.json"
_LOG: Final = "log.txt"
_PATHS: Final = ("path", "test_path")
_POLL_SECONDS: Final = 0.05
_SHARE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
"""Of the machine's memory, which runs at the same time divide."""


class Axis(NamedTuple):
    """A swept key, and its values, by how people read them."""

    name: str
    choices: dict[str, Override]


class SweepRun(NamedTuple):
    """One run: its folder, what each axis is, and all its keys."""

    folder: Path
    labels: dict[str, str]
    config: RunConfig

    @property
    def result(self) -> dict[str, Any] | None:
        """What ``tierstore train --json`` wrote; None before the run has ended."""
        path = self.folder / _RESULT
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return None if found is None or found["interrupted"] else found


def axis_of(text: str) -> Axis:
    """Of ``section.key=value,value,...``, each value in TOML or a bare word. ConfigError for another form."""
    name, equals, values = text.partition("=")
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
        written = [value if isinstance(value, str) else json.dumps(value) for value in found] or [""]
    except (ValueError, TypeError):  # no TOML, or a date
        written = [value.strip() for value in values.split(",")]
    if equals and "" in written:
        raise ConfigError(f"--set {excerpt(text)}: a value is empty; write train.batch_size=256,1024")
    choices = {value: parse_override(f"{name}{equals}{value}") for value in written}
    if len(choices) < len(written):
        raise ConfigError(f"--set {excerpt(text)}: a value stands there twice; give each once")
    return Axis(name.strip(), choices)


def seed_axis(first: int, count: int) -> Axis:
    """``count`` seeds from ``first`` on."""
    return axis_of(f"{SEED}={','.join(map(str, range(first, first + count)))}")


def runs_of(
    run_file: str | Path,
    folder: str | Path,
    axes: Sequence[Axis],
    *,
    rate_rule: RateRule = "none",
    warmup_samples: int = 0,
) -> list[SweepRun]:
    """Every combination of the axes' choices, the last axis the fastest.

    Args:
        folder: of the sweep; a run's own folder in it is named by what is swept.
        rate_rule: both learning rates are multiplied by the batch over the run file's, or by the root of that.
        warmup_samples: samples of whichever batch that are warm-up; 0: as the keys say.

    Raises:
        ConfigError: an axis is there twice, a key or a value is not valid, or there are more than ``MAX_RUNS``.
    """
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        way = "leave it out: --seeds N takes N seeds from the run file's on" if twice == SEED else f"give {twice}=A,B"
        raise ConfigError(f"--set {twice} stands there twice; {way}")
    count = math.prod(len(axis.choices) for axis in axes)
    if count > MAX_RUNS:
        raise ConfigError(f"these are {count:,} runs; a sweep has at most {MAX_RUNS:,}")
    base, runs = load(run_file).train.batch_size, []
    for choices in itertools.product(*(axis.choices.items() for axis in axes)):
        labels = {name: label for name, (label, _) in zip(names, choices, strict=True)}
        own = Path(folder).absolute() / _file_name(",".join(f"{name}={label}" for name, label in labels.items()))
        try:
            config = load(run_file, [override for _, override in choices])
        except ConfigError as error:
            raise ConfigError(f"{own.name}: {error}") from None
        runs.append(SweepRun(own, labels, _adapted(config, base, own, rate_rule, warmup_samples)))
    return runs


def _adapted(config: RunConfig, base: int, folder: Path, rule: RateRule, warmup_samples: int) -> RunConfig:
    times = config.train.batch_size / base
    factor = {"none": 1.0, "linear": times, "sqrt": times**0.5}[rule]
    optimizer = replace(
        config.optimizer,
        sparse_lr=config.optimizer.sparse_lr * factor,
        dense_lr=config.optimizer.dense_lr * factor,
        warmup_steps=math.ceil(warmup_samples / config.train.batch_size) or config.optimizer.warmup_steps,
    )
    paths = {name: os.path.abspath(path) for name in _PATHS if (path := getattr(config.data, name))}
    store, data = replace(config.store, path=str(folder / "store")), replace(config.data, **paths)
    return replace(config, store=store, data=data, optimizer=optimizer)


def _file_name(text: str) -> str:
    """The text where it is a plain file name; else its plain characters and a digest."""
    plain = re.sub(r"[^\w.,=+-]+", "_", text)[:_MAX_NAME]
    return plain if plain == text else f"{plain}-{sha256(text.encode()).hexdigest()[:8]}"


def prepare(runs: Sequence[SweepRun]) -> None:
    """Give each run its folder and run file. ConfigError, and nothing is written, if one was begun with other keys."""
    for run in runs:
        path = run.folder / _RUN_FILE
        if path.exists():
            _require_same(path, to_dict(load(path)), to_dict(run.config))
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / _RUN_FILE, to_toml(run.config), force=True)


def _require_same(path: Path, before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    for section, keys in now.items():
        for key, value in keys.items():
            if before[section][key] != value:
                raise ConfigError(
                    f"{path.parent} was begun with {section}.{key} = {excerpt(before[section][key])}, now "
                    f"{excerpt(value)}; name another folder for this sweep, or delete that run's"
                )


def run_all(runs: Sequence[SweepRun], *, jobs: int = 1, ended: Callable[[SweepRun, int], None]) -> None:
    """Train those that have not ended, ``jobs`` at a time, each in a process of its own that resumes. ``ended`` is
    called with each run that does, and its exit status. KeyboardInterrupt: by Ctrl-C or SIGTERM, once all running
    ones have committed."""
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
                    ended(running.pop(process), process.returncode)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            for process in running:
                process.send_signal(signal.SIGINT)
            for process in running:
                process.wait()
            raise


def _begin(run: SweepRun, jobs: int) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C reaches it by ``run_all`` alone, once."""
    arguments = ["train", str(run.folder / _RUN_FILE), "--resume", "--json", str(run.folder / _RESULT)]
    share = _SHARE.fullmatch(str(run.config.store.ddr))
    if share is not None:
        arguments += ["--ddr", f"{float(share[1]) / jobs}%"]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
    with (run.folder / _LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tierstore", *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=threads | os.environ,
        )  # fmt: skip


def failure_of(run: SweepRun) -> str:
    """The last line that the run wrote, and where the others are."""
    lines = (run.folder / _LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    return f"{next((line for line in reversed(lines) if line.strip()), 'it said nothing')} ({run.folder / _LOG})"
