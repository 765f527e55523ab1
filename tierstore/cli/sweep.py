"""``tierstore sweep``: one run file, trained over several values of its keys and several seeds."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..system.files import write_text
from ..system.sizes import format_count
from ..system.terminal import arg, command

if TYPE_CHECKING:
    from ..train.sweep import SweepRun

_INTERRUPTED: Final = 130


def _sweep(options: argparse.Namespace) -> int:
    from ..train.config import load
    from ..train.report import rows_of, sweep_table
    from ..train.sweep import axis_of, failure_of, measure_sharpness, prepare, run_all, runs_of, seed_axis

    for name, least in (("seeds", 1), ("jobs", 1), ("warmup_samples", 0), ("sharpness", 0)):
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(options, name)}: expected a whole number from {least}")
    axes = [*map(axis_of, options.set), seed_axis(load(options.run_file).train.seed, options.seeds)]
    runs = runs_of(
        options.run_file, options.folder, axes, rate_rule=options.rate, warmup_samples=options.warmup_samples
    )
    prepare(runs)
    failed: list[SweepRun] = []

    def told(run: "SweepRun", status: int) -> None:
        reason = f"status {status}: {failure_of(run)}" if run.result is None else ""
        if run.lacks_sharpness(options.sharpness):
            reason = measure_sharpness(run, options.sharpness)
        if reason:
            failed.append(run)
        figures = [f"{key} {value:.5g}" for row in rows_of([run]) for key, value in row.items() if type(value) is float]
        print(f"{run.folder.name}: {', '.join(filter(None, [*figures, reason]))}", flush=True)
        _write(options, runs)

    _write(options, runs)
    print(f"{format_count(len(runs), 'run')}, of which {len(rows_of(runs)):,} ended before", flush=True)
    try:
        for run in runs:
            if run.lacks_sharpness(options.sharpness):
                told(run, 0)
        run_all(runs, jobs=options.jobs, told=told)
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
        return _INTERRUPTED
    print(
        f"\n{sweep_table(runs)}\n\npage     {Path(options.folder) / 'sweep.html'}, beside it sweep.json and sweep.csv"
    )
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed; the same command tries them again")
    return 1 if failed else 0


def _write(options: argparse.Namespace, runs: "Sequence[SweepRun]") -> None:
    """What has ended, for notebooks and eyes."""
    from ..train.report import csv_of, rows_of, sweep_page

    folder = Path(options.folder)
    rows = rows_of(runs)
    write_text(folder / "sweep.json", json.dumps(rows, indent=2) + "\n", force=True)
    write_text(folder / "sweep.csv", csv_of(rows), force=True)
    write_text(folder / "sweep.html", sweep_page(f"tierstore sweep {Path(options.run_file).name}", runs), force=True)


SWEEP: Final = command(
    _sweep,
    (
        arg("run_file", metavar="FILE.toml", help="the run file"),
        arg("folder", metavar="DIR", help="folder of the sweep, with a folder for each run; made if it is not there"),
        arg(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE,...",
            help="values of a key, as train.batch_size=256,1024; of several keys, every combination",
        ),
        arg("--seeds", type=int, default=1, metavar="N", help="seeds of each, from train.seed on (default: 1)"),
        arg("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default: 1)"),
        arg(
            "--rate",
            default="none",
            choices=("none", "linear", "sqrt"),
            help="how both learning rates follow the batch, from the run file's on (default: none)",
        ),
        arg(
            "--warmup-samples",
            type=int,
            default=0,
            metavar="N",
            help="samples over which learning rates rise, whatever the batch (default: optimizer.warmup_steps)",
        ),
        arg(
            "--sharpness",
            metavar="ROWS",
            type=int,
            nargs="?",
            default=0,
            const=8192,
            help="measure how sharp the minimum is that each run ends in, on its first ROWS training rows, or 8192",
        ),
    ),
    "train a run file over values of its keys, and compare",
    "Train a run file over values of its keys and over seeds; one table, page, JSON and CSV compare them. Each "
    "run is a folder that tierstore train and serve can use. Started again, the sweep goes on.",
    """examples:
  tierstore sweep run.toml sweep --set train.batch_size=256,1024,4096 --seeds 3 --rate sqrt
  tierstore sweep run.toml sweep --set optimizer.dense=sgd,adam --set optimizer.dense_lr=0.01,0.1 --jobs 2""",
)
