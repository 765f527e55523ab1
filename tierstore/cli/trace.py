"""``tierstore trace``: which rows are looked up, written down from a run's data, drawn by a law, described."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ..system.terminal import Command, arg, command
from .commands import require_outputs

if TYPE_CHECKING:
    from ..trace import Trace

_OUT: Final = arg("out", metavar="OUT.npz", help="file to write; it appears when it is complete")
_FORCE: Final = arg("--force", help="replace OUT.npz if it exists")


def _write(trace: "Trace", options: argparse.Namespace) -> int:
    from ..trace import write_trace

    write_trace(trace, options.out, force=options.force)
    print(
        f"{options.out}: {trace.num_lookups:,} lookups of {len(trace.tables)} tables in {trace.num_samples:,} samples"
    )
    return 0


def _record(options: argparse.Namespace) -> int:
    from ..settings.sections import Override
    from ..train.build import trace_run
    from ..train.config import load

    data = [] if options.data is None else [Override("data", "path", options.data, f"--data {options.data}")]
    return _write(trace_run(load(options.run_file, data), rows=options.rows), options)


def _generate(options: argparse.Namespace) -> int:
    from ..plan.traces import generate
    from ..plan.workload import load_workload, scaled

    if options.samples < 1:
        raise ValueError(f"--samples {options.samples}: expected 1 or more")
    require_outputs({"OUT.npz": options.out}, [options.workload], force=options.force)
    workload = scaled(load_workload(options.workload), options.scale)
    return _write(generate(workload, samples=options.samples, seed=options.seed), options)


def _describe(options: argparse.Namespace) -> int:
    from ..plan.traces import describe
    from ..trace import read_trace

    print(describe(read_trace(options.source)))
    return 0


COMMANDS: Final[Mapping[str, Command]] = {
    "record": command(
        _record,
        (
            arg("run_file", metavar="FILE.toml", help="the run file"),
            _OUT,
            arg("--data", metavar="PATH", help="file or folder to read (data.path)"),
            arg("--rows", type=int, metavar="N", help="of the data, from the start (default: data.train_rows)"),
            _FORCE,
        ),
        "write down which rows a run looks up",
        "Read the training rows of a run file and write which rows of which table they look up. Nothing is trained.",
        """examples:
  tierstore trace record shop.toml shop.npz
  tierstore compact shop shop-packed --trace shop.npz""",
    ),
    "generate": command(
        _generate,
        (
            arg("workload", metavar="WORKLOAD", help="a preset, or a workload file in TOML"),
            _OUT,
            arg("--samples", type=int, required=True, metavar="N", help="samples to draw"),
            arg("--seed", type=int, default=0, metavar="N", help="another seed, other ids (default: 0)"),
            arg("--scale", type=float, default=1.0, metavar="X", help="of the tables' rows (default: 1)"),
            _FORCE,
        ),
        "draw a trace of a workload",
        "Draw ids as the workload's tables say: Zipf's law of their exponents, ids a sample.",
        "example:\n  tierstore trace generate rmc1 rmc1.npz --samples 100000 --scale 0.01",
    ),
    "describe": command(
        _describe,
        (arg("source", metavar="TRACE.npz", help="the trace to read"),),
        "say what is in a trace",
        "Count lookups and rows by table, and how often rows are used again.",
        "example:\n  tierstore trace describe shop.npz",
    ),
}
