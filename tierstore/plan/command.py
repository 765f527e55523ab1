"""``tierstore plan``: its commands. What a command needs is imported when it is asked for something."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..system.terminal import Command, group, progress_bar

if TYPE_CHECKING:
    from .result import PlanResult

__all__ = ["COMMANDS"]


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan_file", metavar="FILE.toml", nargs="?", help="the plan file")
    parser.add_argument("--html", metavar="OUT.html", help="write the report, one page that needs no network")
    parser.add_argument("--json", metavar="OUT.json", help="write all figures of the answer")
    parser.add_argument("--force", action="store_true", help="replace these files if they exist")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set any key, as setup.ddr=64GiB"
    )
    parser.add_argument("--keys", action="store_true", help="print every key with its default, and exit")


def _run(options: argparse.Namespace) -> int:
    from .plan_file import PlanFile, load, parse_override, to_toml

    if options.keys:
        print(to_toml(PlanFile(), with_help=True), end="")
        return 0
    if options.plan_file is None:
        raise ValueError("give a plan file: tierstore plan run FILE.toml; --keys prints one with all keys")
    asked = load(options.plan_file, [parse_override(text) for text in options.set])
    _require_writable(options)
    from .planning import plan

    with progress_bar("plan", bar_format="{desc}: {bar} {n_fmt}/{total_fmt}") as show:
        result = plan(asked, progress=lambda stage, done, total: show(done, total, f"plan: {stage}"))
    _tell(result, options)
    return 0


def _require_writable(options: argparse.Namespace) -> None:
    """What would prevent the files, told before minutes of work."""
    from ..system.output import require_new

    paths = [Path(path) for path in (options.html, options.json) if path]
    for path in paths:
        require_new(path, force=options.force)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"--html and --json are both {options.json}; give each a name of its own")
    if options.html:
        from .report import plotly_source

        plotly_source()


def _tell(result: "PlanResult", options: argparse.Namespace) -> None:
    import sys

    from ..system.output import write_text
    from .json_file import write_json
    from .report import describe, page_of

    print(describe(result, colours=sys.stdout.isatty()))
    if options.html:
        write_text(Path(options.html), page_of(result), force=options.force)
        print(f"\nthe report: {options.html}")
    if options.json:
        write_json(result.to_dict(), options.json, force=options.force)


def _add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    from .curves.command import add_curve_arguments

    add_curve_arguments(parser)


def _curve(options: argparse.Namespace) -> int:
    from .curves.command import run_curve

    return run_curve(options)


def _add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    from .measure.command import add_measure_arguments

    add_measure_arguments(parser)


def _measure(options: argparse.Namespace) -> int:
    from .measure.command import run_measure

    return run_measure(options)


def _add_place_arguments(parser: argparse.ArgumentParser) -> None:
    from .placement.command import add_place_arguments

    add_place_arguments(parser)


def _place(options: argparse.Namespace) -> int:
    from .placement.command import run_place

    return run_place(options)


def _add_parts_arguments(parser: argparse.ArgumentParser) -> None:
    from .parts.command import add_parts_arguments

    add_parts_arguments(parser)


def _parts(options: argparse.Namespace) -> int:
    from .parts.command import run_parts

    return run_parts(options)


def _add_presets_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this one as a workload file, to be changed")


def _presets(options: argparse.Namespace) -> int:
    from .describing import describe_workload, workload_toml
    from .presets import PRESETS, preset

    if options.name is not None:
        print(workload_toml(preset(options.name)), end="")
        return 0
    for workload in PRESETS.values():
        print(describe_workload(workload))
    return 0


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help="a preset, or a workload file in TOML")
    parser.add_argument("out", metavar="OUT", help="file to write; it appears when it is complete")
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="samples to draw")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other ids (default: 0)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="of the tables' rows (default: 1)")
    _add_written(parser)


def _add_written(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", metavar="NAME", help="npz, npy or oracleGeneral (default: as OUT ends)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def _generate(options: argparse.Namespace) -> int:
    from ..trace import write_trace
    from .accesses import accesses_of
    from .presets import load_workload, scaled
    from .traces import generate, write_accesses

    if options.samples < 1:
        raise ValueError(f"--samples {options.samples}: expected 1 or more")
    workload = load_workload(options.workload)
    if options.scale != 1:
        workload = scaled(workload, options.scale)
    trace = generate(workload, samples=options.samples, seed=options.seed)
    if options.out.endswith(".npz") and options.format in (None, "npz"):
        write_trace(trace, options.out, force=options.force)
    else:
        write_accesses(accesses_of(trace), options.out, format=options.format, force=options.force)
    print(
        f"{options.out}: {trace.num_lookups:,} lookups of {len(trace.tables)} tables in {trace.num_samples:,} samples"
    )
    return 0


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="the trace to read")
    parser.add_argument("out", metavar="OUT", help="file to write; it appears when it is complete")
    _add_read(parser)
    _add_written(parser)


def _add_read(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source_format", metavar="NAME", help="its format (default: as IN ends)")
    parser.add_argument("--batch-accesses", type=int, metavar="N", help="accesses a batch, where IN has no batches")


def _convert(options: argparse.Namespace) -> int:
    from .traces import read_accesses, write_accesses

    accesses = read_accesses(options.source, format=options.source_format, batch_accesses=options.batch_accesses)
    write_accesses(accesses, options.out, format=options.format, force=options.force)
    print(f"{options.out}: {len(accesses.keys):,} accesses in {accesses.num_batches:,} batches")
    return 0


def _add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="IN", help="the trace to read")
    _add_read(parser)
    parser.add_argument("--json", metavar="PATH", help="write it to a file")
    parser.add_argument("--force", action="store_true", help="replace that file if it exists")


def _describe(options: argparse.Namespace) -> int:
    from .json_file import write_json
    from .traces import describe, read_accesses

    summary = describe(
        read_accesses(options.source, format=options.source_format, batch_accesses=options.batch_accesses)
    )
    print(summary.text())
    if options.json:
        write_json(summary.to_dict(), options.json, force=options.force)
    return 0


def _part(
    run: Callable[[argparse.Namespace], int],
    add_arguments: Callable[[argparse.ArgumentParser], None],
    help_text: str,
    *description: str,
) -> Command:
    """``description``: sentences, and examples after them."""
    *sentences, examples = description
    return Command(run, add_arguments, help_text, " ".join(sentences), examples)


_TRACE_COMMANDS: Final[Mapping[str, Command]] = {
    "generate": _part(
        _generate,
        _add_generate_arguments,
        "draw a trace of a workload",
        "Draw ids as the workload's tables say: Zipf's law of their exponents, ids a sample.",
        """example:
  tierstore plan trace generate rmc1 rmc1.npz --samples 100000 --scale 0.01""",
    ),
    "convert": _part(
        _convert,
        _add_convert_arguments,
        "write a trace in another format",
        "Read a trace in one format and write it in another, as for simulators of caches.",
        """example:
  tierstore plan trace convert run.npz run.oracleGeneral""",
    ),
    "describe": _part(
        _describe,
        _add_describe_arguments,
        "say what is in a trace",
        "Count accesses and rows by table, and how often rows are used again.",
        """example:
  tierstore plan trace describe run.npz""",
    ),
}

COMMANDS: Final[Mapping[str, Command]] = {
    "run": _part(
        _run,
        _add_run_arguments,
        "answer a plan file",
        "Predict the setup of a plan file, or find the cheapest that reaches its target, and say what supports that.",
        """examples:
  tierstore plan run --keys > plan.toml
  tierstore plan run plan.toml --html plan.html --json plan.json
  tierstore plan run plan.toml --set setup.ddr=64GiB --set setup.hosts=2""",
    ),
    "curve": _part(
        _curve,
        _add_curve_arguments,
        "say how often memory of any size misses",
        "Miss-ratio curves of a trace, exactly or from a sample of its rows.",
        """examples:
  tierstore plan curve run.npz
  tierstore plan curve run.npz --policy lru,lfu,opt --by-table""",
    ),
    "measure": _part(
        _measure,
        _add_measure_arguments,
        "measure this machine",
        "Measure this machine's memory, drive and cores, and tierstore's own work on it, in about a minute.",
        """example:
  tierstore plan measure --dir . --json host.json""",
    ),
    "place": _part(
        _place,
        _add_place_arguments,
        "compare places for a workload's tables",
        "Compare strategies: tables in the memory of GPUs, of the host, of other hosts, or in tiers over SSD.",
        """example:
  tierstore plan place rmc2 --host node-8xh100""",
    ),
    "parts": _part(
        _parts,
        _add_parts_arguments,
        "list the parts and hosts that plans know",
        "List processors, memory, GPUs, drives, links and hosts, each figure with its source.",
        "",
    ),
    "presets": _part(
        _presets,
        _add_presets_arguments,
        "list the workloads that plans know",
        "List published models by name, or print one as a workload file.",
        """examples:
  tierstore plan presets
  tierstore plan presets rmc1 > mine.toml""",
    ),
    "trace": group(lambda: _TRACE_COMMANDS, "make, convert and describe traces", "Make, convert and describe traces."),
}
