"""``tierstore plan``: its commands. What a command needs is imported when it is asked for something."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..system.terminal import Command, progress_bar
from ..system.terminal import arg as _arg
from ..system.terminal import command as _part
from .commands import require_outputs

if TYPE_CHECKING:
    from ..plan.curves import MissRatioCurve
    from ..plan.traces import Accesses


def _run(options: argparse.Namespace) -> int:
    if options.plan_file is None and not options.keys:
        raise ValueError("give a plan file: tierstore plan run FILE.toml; --keys prints one with all keys")
    import sys

    from ..plan.planning import PlanFile, load, parse_override
    from ..settings.sections import to_toml

    if options.keys:
        print(to_toml(PlanFile(), with_help=True), end="")
        return 0
    asked = load(options.plan_file, [parse_override(text) for text in options.set])
    read = [options.plan_file, asked.workload.file, asked.trace.path, asked.host.file, *asked.host.others]
    require_outputs({"--html": options.html, "--json": options.json}, read, force=options.force)
    from ..plan.planning import plan, write_json
    from ..plan.report import describe, plan_page
    from ..system.files import write_text

    result = plan(asked)
    print(describe(result, colours=sys.stdout.isatty()))
    if options.html:
        write_text(Path(options.html), plan_page(result), force=options.force)
        print(f"\nthe report: {options.html}")
    if options.json:
        write_json(result.to_dict(), Path(options.json), force=options.force)
    return 0


def _curve(options: argparse.Namespace) -> int:
    from ..cache.ddr import resolve_policy
    from ..plan.curves import by_table, curve, describe_curves
    from ..plan.planning import write_json
    from ..plan.traces import once_a_batch, read_accesses

    require_outputs({"--json": options.json}, [options.trace], force=options.force)
    policies = dict.fromkeys(resolve_policy(name.strip()) for name in options.policy.split(","))
    accesses = read_accesses(options.trace)
    accesses = once_a_batch(accesses) if options.once_a_batch else accesses
    sizes = None if options.sizes is None else _sizes(options.sizes, accesses)
    found: dict[str, dict[str, MissRatioCurve]] = {}
    named: dict[str, MissRatioCurve] = {}
    for policy in policies:
        asked: dict[str, Any] = {"sizes": sizes, "prefetch_depth": options.prefetch_depth}
        of = by_table(accesses, policy, **asked) if options.by_table else {"all": curve(accesses, policy, **asked)}
        found[policy] = of
        named |= {f"{policy} {table}" if options.by_table else policy: each for table, each in of.items()}
    what = "distinct rows of batches" if options.once_a_batch else "lookups"
    sampled = f", a sample of {accesses.sampling_rate:.3g} of the rows" if accesses.sampling_rate < 1 else ""
    print(f"{options.trace}: {len(accesses.keys):,} {what} of {len(accesses.tables)} tables{sampled}\n")
    print(describe_curves(named, sizes))
    for warning in dict.fromkeys(each.warning for each in named.values() if each.warning):
        print(f"\n! {warning}")
    if options.json is not None:
        write_json(found, Path(options.json), force=options.force, indent=None)
        print(f"\nWritten: {options.json}")
    return 0


def _sizes(text: str, accesses: "Accesses") -> list[int]:
    from ..layout import MAX_ROWS
    from ..plan.traces import numbered

    num_rows = numbered(accesses.keys).num_rows / accesses.sampling_rate if "%" in text else 0.0
    found = []
    for part in map(str.strip, text.split(",")):
        number = part.removesuffix("%")
        try:
            size = int(number) if number == part else max(1, round(float(number) / 100 * num_rows))
        except (ValueError, OverflowError):
            size = 0
        if not 1 <= size < MAX_ROWS or number.startswith("-"):
            raise ValueError(f"--sizes {part}: write rows, or a share of the distinct rows, as 1000,20000,5%")
        found.append(size)
    return sorted(set(found))


def _measure(options: argparse.Namespace) -> int:
    from ..plan.host import require_writable, write_host
    from ..plan.measure import describe, measure

    path = Path(options.out)
    require_writable(path, force=options.force)  # better now than in a minute
    with progress_bar("measuring", bar_format="{desc} {bar} {percentage:.0f}%") as show:
        found = measure(
            options.dir,
            seconds=options.seconds,
            progress=lambda step, share: show(round(100 * share), 100, f"measuring {step}"),
        )
    write_host(found, path, force=options.force)
    print(describe(found))
    print(f"\nSaved as {path}. Fill in what it could not know: watts, prices, the network, drive writes a day.")
    return 0


def _hosts(options: argparse.Namespace) -> int:
    from ..plan.host import describe_hosts, host_text, load_host

    print(describe_hosts() if options.name is None else host_text(load_host(options.name)))
    return 0


def _presets(options: argparse.Namespace) -> int:
    from ..plan.presets import PRESETS, describe_workload, preset, workload_toml

    if options.name is not None:
        print(workload_toml(preset(options.name)), end="")
        return 0
    for workload in PRESETS.values():
        print(describe_workload(workload))
    return 0


COMMANDS: Final[Mapping[str, Command]] = {
    "run": _part(
        _run,
        (
            _arg("plan_file", metavar="FILE.toml", nargs="?", help="the plan file"),
            _arg("--html", metavar="OUT.html", help="write the report, one page that needs no network"),
            _arg("--json", metavar="OUT.json", help="write all figures of the answer"),
            _arg("--force", help="replace these files if they exist"),
            _arg(
                "--set",
                action="append",
                default=[],
                metavar="SECTION.KEY=VALUE",
                help="set any key, as setup.ddr=64GiB",
            ),
            _arg("--keys", help="print every key with its default, and exit"),
        ),
        "answer a plan file",
        "Predict the setup of a plan file, or find the cheapest that reaches its target, and say what supports that.",
        "examples:\n"
        "  tierstore plan run --keys > plan.toml\n"
        "  tierstore plan run plan.toml --html plan.html --json plan.json\n"
        "  tierstore plan run plan.toml --set setup.ddr=64GiB --set setup.hosts=2",
    ),
    "curve": _part(
        _curve,
        (
            _arg("trace", metavar="TRACE", help="a trace, of tierstore trace or a recording"),
            _arg(
                "--policy",
                default="lru",
                metavar="NAMES",
                help="some of auto, lru, lfu, tinylfu, with commas between (default: lru)",
            ),
            _arg("--sizes", metavar="ROWS", help="sizes of caches, with commas between, as 1000,20000,5%%"),
            _arg("--once-a-batch", help="count a row once a batch, as the tiers of a store do"),
            _arg(
                "--prefetch-depth",
                type=int,
                default=0,
                metavar="N",
                help="batches fetched ahead, whose rows lfu and tinylfu cannot evict (default: 0)",
            ),
            _arg("--by-table", help="a cache for each table, not one for all"),
            _arg("--json", metavar="PATH", help="also write the curves to a file"),
            _arg("--force", help="replace that file if it exists"),
        ),
        "say how often memory of any size misses",
        "Miss-ratio curves of a trace, recorded whole or by a sample of its rows.",
        "examples:\n  tierstore plan curve run.npz\n  tierstore plan curve run.npz --policy lru,lfu --by-table",
    ),
    "measure": _part(
        _measure,
        (
            _arg("--dir", default=".", metavar="DIR", help="a folder on the SSD to be measured (default: .)"),
            _arg("--out", default="host.json", metavar="PATH", help="where the host goes (default: host.json)"),
            _arg("--seconds", type=float, default=50.0, metavar="N", help="time to spend, about (default: 50)"),
            _arg("--force", help="replace PATH if it exists"),
        ),
        "measure this machine",
        "Measure this machine's memory, drive and cores, and tierstore's own work on it, in about a minute.",
        "example:\n  tierstore plan measure --dir . --out host.json",
    ),
    "hosts": _part(
        _hosts,
        (_arg("name", metavar="NAME", nargs="?", help="print this one as a host file, to be changed"),),
        "list the example hosts that plans know",
        "List the example hosts with their parts, price and power, or print one as a host file.",
        "examples:\n  tierstore plan hosts\n  tierstore plan hosts node-1xh100 > mine.json",
    ),
    "presets": _part(
        _presets,
        (_arg("name", metavar="NAME", nargs="?", help="print this one as a workload file, to be changed"),),
        "list the workloads that plans know",
        "List published models by name, or print one as a workload file.",
        "examples:\n  tierstore plan presets\n  tierstore plan presets rmc1 > mine.toml",
    ),
}
