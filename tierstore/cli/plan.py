"""``tierstore plan``; and ``tierstore trace``: which rows are looked up, written down from a run's data, drawn by a
law, described. What a command needs is imported when it is asked for something.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..system.terminal import Command, KeyFlags, arg, command, key_arguments, progress_bar
from .commands import require_outputs

if TYPE_CHECKING:
    from ..trace import Trace

_OUT: Final = arg("out", metavar="OUT.npz", help="file to write; it appears when it is complete")
_FORCE: Final = arg("--force", help="replace OUT.npz if it exists")


def milliseconds(text: str) -> float:
    return float(text.removesuffix("ms"))


_FLAGS: Final[KeyFlags] = {
    "--bytes": ("workload.bytes", str, "SIZE", "all rows as float32, as 300GB"),
    "--rows": ("workload.rows", int, "N", "all rows, in place of --bytes"),
    "--dim": ("workload.embedding_dim", int, "N", "columns of them"),
    "--queries": ("target.queries_per_s", float, "N", "queries a second to be served"),
    "--p99": ("target.p99_ms", milliseconds, "TIME", "within which 99 of 100 queries are to be answered, as 20ms"),
    "--samples": ("target.samples_per_s", float, "N", "samples a second to be trained"),
}


def _run(options: argparse.Namespace) -> int:
    from ..plan.planning import PlanFile, load, parse_override
    from ..settings.sections import Override, to_toml

    if options.keys:
        print(to_toml(PlanFile(), with_help=True), end="")
        return 0
    given = [(flag, *key.split("."), getattr(options, key)) for flag, (key, *_) in _FLAGS.items()]
    flags = [Override(section, key, value, flag) for flag, section, key, value in given if value is not None]
    asked = load(options.plan_file, [*flags, *map(parse_override, options.set)])
    files = asked.workload.file, asked.trace.path, asked.setup.rank_costs, asked.host.file, *asked.host.others
    read = [options.plan_file or "", *files]
    require_outputs({"--html": options.html, "--json": options.json}, read, force=options.force)
    from ..plan.planning import plan, write_json
    from ..plan.report import describe, plan_page
    from ..system.files import write_text

    with progress_bar("hosts looked at") as show:
        result = plan(asked, progress=show)
    print(describe(result, details=options.details or asked.is_fixed))
    if options.html:
        write_text(Path(options.html), plan_page(result), force=options.force)
        print(f"\nthe report: {options.html}")
    if options.json:
        write_json(result.to_dict(), Path(options.json), force=options.force)
    return 1 if result.missed else 0


def _curve(options: argparse.Namespace) -> int:
    from ..cache.ddr import resolve_policy
    from ..plan.curves import curve, describe_curves
    from ..plan.planning import write_json
    from ..plan.traces import once_a_batch, read_accesses

    require_outputs({"--json": options.json}, [options.trace], force=options.force)
    policies = dict.fromkeys(resolve_policy(name.strip()) for name in options.policy.split(","))
    accesses = once_a_batch(read_accesses(options.trace))
    found = {policy: curve(accesses, policy, prefetch_depth=options.prefetch_depth) for policy in policies}
    sampled = f", a sample of {accesses.sampling_rate:.3g} of the rows" if accesses.sampling_rate < 1 else ""
    what = f"{len(accesses.keys):,} distinct rows of batches"
    print(f"{options.trace}: {what} of {len(accesses.tables)} tables{sampled}\n\n{describe_curves(found)}")
    for warning in dict.fromkeys(each.warning for each in found.values() if each.warning):
        print(f"\n! {warning}")
    if options.json is not None:
        write_json(found, Path(options.json), force=options.force, indent=None)
        print(f"\nWritten: {options.json}")
    return 0


def _measure(options: argparse.Namespace) -> int:
    from ..plan.host import host_text, require_writable, write_host
    from ..plan.measure import measure

    path = Path(options.out)
    require_writable(path, force=options.force)  # better now than in a minute
    with progress_bar("measuring", bar_format="{desc} {bar} {percentage:.0f}%") as show:
        found = measure(
            options.dir,
            seconds=options.seconds,
            progress=lambda step, share: show(round(100 * share), 100, f"measuring {step}"),
        )
    write_host(found, path, force=options.force)
    print(host_text(found))
    print(f"\nSaved as {path}. Fill in what it could not know: watts, prices, the network, drive writes a day.")
    return 0


def _hosts(options: argparse.Namespace) -> int:
    from ..plan.host import describe_hosts, host_text, load_host

    print(describe_hosts() if options.name is None else host_text(load_host(options.name)))
    return 0


def _presets(options: argparse.Namespace) -> int:
    from ..plan.workload import describe_workload, load_workload, presets, workload_toml

    if options.name is not None:
        print(workload_toml(load_workload(options.name)), end="")
        return 0
    print(*map(describe_workload, map(load_workload, presets())), sep="\n")
    return 0


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
    "run": command(
        _run,
        (
            arg("plan_file", metavar="FILE.toml", nargs="?", help="the plan file"),
            *key_arguments(_FLAGS),
            arg("--details", help="also print what the answer is made of, as --html and --json have it"),
            arg("--html", metavar="OUT.html", help="write the report, one page that needs no network"),
            arg("--json", metavar="OUT.json", help="write all figures of the answer"),
            arg("--force", help="replace these files if they exist"),
            arg(
                "--set",
                action="append",
                default=[],
                metavar="SECTION.KEY=VALUE",
                help="set any key, as setup.ddr=64GiB",
            ),
            arg("--keys", help="print every key with its default, and exit"),
        ),
        "say what to buy, or what a setup would do",
        "Find the cheapest setup of each host that reaches a target, or predict the setup of a plan file. Exit status "
        "1: nothing reaches it.",
        "examples:\n"
        "  tierstore plan --bytes 300GB --queries 20000 --p99 20ms\n"
        "  tierstore plan --rows 1000000000 --dim 64 --samples 100000\n"
        "  tierstore plan run --keys > plan.toml\n"
        "  tierstore plan run plan.toml --html plan.html --json plan.json\n"
        "  tierstore plan run plan.toml --set setup.ddr=64GiB --set setup.hosts=2",
    ),
    "curve": command(
        _curve,
        (
            arg("trace", metavar="TRACE", help="a trace, of tierstore trace or a recording"),
            arg(
                "--policy",
                default="lru",
                metavar="NAMES",
                help="some of auto, lru, lfu, tinylfu, with commas between (default: lru)",
            ),
            arg(
                "--prefetch-depth",
                type=int,
                default=0,
                metavar="N",
                help="batches fetched ahead, whose rows lfu and tinylfu cannot evict (default: 0)",
            ),
            arg("--json", metavar="PATH", help="also write the curves to a file"),
            arg("--force", help="replace that file if it exists"),
        ),
        "say how often memory of any size misses",
        "Miss-ratio curves of a trace, recorded whole or by a sample of its rows. A row counts once a batch.",
        "examples:\n  tierstore plan curve run.npz\n  tierstore plan curve run.npz --policy lru,tinylfu",
    ),
    "measure": command(
        _measure,
        (
            arg("--dir", default=".", metavar="DIR", help="a folder on the SSD to be measured (default: .)"),
            arg("--out", default="host.json", metavar="PATH", help="where the host goes (default: host.json)"),
            arg("--seconds", type=float, default=50.0, metavar="N", help="time to spend, about (default: 50)"),
            arg("--force", help="replace PATH if it exists"),
        ),
        "measure this machine",
        "Measure this machine's memory, drive and cores, and tierstore's own work on it, in about a minute.",
        "example:\n  tierstore plan measure --dir . --out host.json",
    ),
    "hosts": command(
        _hosts,
        (arg("name", metavar="NAME", nargs="?", help="print this one as a host file, to be changed"),),
        "list the example hosts that plans know",
        "List the example hosts with price and power, or print one, with all its figures, as a host file.",
        "examples:\n  tierstore plan hosts\n  tierstore plan hosts node-1xh100 > mine.json",
    ),
    "presets": command(
        _presets,
        (arg("name", metavar="NAME", nargs="?", help="print this one as a workload file, to be changed"),),
        "list the workloads that plans know",
        "List published models by name, or print one as a workload file.",
        "examples:\n  tierstore plan presets\n  tierstore plan presets rmc1 > mine.toml",
    ),
}
TRACE_COMMANDS: Final[Mapping[str, Command]] = {
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
