"""The command line: ``tierstore COMMAND``."""

import argparse
import importlib
import io
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import TierstoreError
from ..serve.command import add_arguments as add_serve_arguments
from ..serve.command import serve
from ..settings.sections import nearest
from ..system import __version__
from ..system.checks import excerpt, packages_for
from ..system.processes import launched_rank
from ..system.sizes import format_count
from ..system.terminal import Command, KeyFlags, arg, byte_bar, command, group, key_arguments, show_help
from .commands import BACKUP, COMPACT, COMPILE, DIRECTORY, EXPORT, FEED, IMPORT, PUBLISH, QUANTIZE, RESHARD

if TYPE_CHECKING:
    from ..settings.sections import Override
    from ..train import Summary
    from ..train.sweep import SweepRun

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def iso_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _depth(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{excerpt(text)} is neither a whole number nor "auto"')
    return text if text == "auto" else int(text)


_TRAIN_FLAGS: Final[KeyFlags] = {
    "--data": ("data.path", str, "PATH", "file or folder to train on"),
    "--store": ("store.path", str, "DIR", "folder of the store"),
    "--ddr": ("store.ddr", str, "SIZE", 'memory for rows, as "512MiB", "50%%" or "5%% of tables"'),
    "--hbm": ("store.hbm", str, "SIZE", "GPU memory for rows, written as --ddr is; 0: none"),
    "--device": ("store.device", str, "NAME", "where the model computes: cpu, or cuda with --hbm"),
    "--policy": ("store.policy", str, ("auto", "lru", "lfu", "tinylfu"), "which rows leave memory first"),
    "--threads": ("store.threads", int, "N", "threads of the store"),
    "--record": ("store.record", str, "FILE.npz", "record which rows are looked up, for tierstore plan"),
    "--record-rate": ("store.record_rate", float, "X", "share of the rows that is recorded"),
    "--prefetch-depth": ("train.prefetch_depth", _depth, "N", "batches fetched ahead; auto: 2 where that is faster"),
    "--until": ("data.until", iso_time, "TIME", "when a run that follows a folder ends, as 2026-12-01T18:00"),
    "--epochs": ("train.epochs", int, "N", "times through the training rows"),
    "--metrics": ("train.metrics", str, "FILE.jsonl", "write losses, tests and commits as JSON lines"),
}


_PULL: Final = "servers pull: leave it out, and start them with tierstore serve --from URL"
_GONE: Final = {("publish", flag): _PULL for flag in ("--to", "--since", "--fan-out", "--dry-run")} | {
    ("serve", "--updates"): "a replica follows its sources: give --from URL",
    ("serve", "--peers"): "a replica follows its sources: give --from URL",
    ("serve", "--max-queue-requests"): "4,096 may wait; leave it out",
    ("serve", "--body-bytes"): "it is 64 MiB; leave it out",
    ("serve", "--receive-seconds"): "it is 30; leave it out",
    ("serve", "--model-control"): "start a server with the stores that it is to have",
}
"""Flags of earlier releases, and the new way."""


def main(arguments: Sequence[str] | None = None, interrupts: Sequence[int] = ()) -> int:
    """As ``cli.main``. ``interrupts``: not empty after Ctrl-C, of which imports of C code may make another error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr is: names that a terminal cannot show are no error
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _spelled_out(list(sys.argv[1:] if arguments is None else arguments))
    unknown = _unknown(arguments, _COMMANDS)
    if unknown is not None:
        return _fail(unknown, EXIT_USAGE)
    options, others = build_parser(arguments).parse_known_args(arguments)
    if others:
        command, flags = options.parser.prog.split(" ", 1)[-1], [each.split("=")[0] for each in others]
        gone = [f"{each} is no more: {_GONE[command, each]}" for each in flags if (command, each) in _GONE]
        options.parser.error("; ".join(gone) or f"unrecognized arguments: {' '.join(others)}")  # and shows its usage
    options.words = arguments
    return _run(options.run, options, interrupts)


def _spelled_out(words: list[str]) -> list[str]:
    """``plan FILE.toml`` is short for ``plan run FILE.toml``, and ``help COMMAND`` for ``COMMAND --help``."""
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    group = _COMMANDS.get(words[0]) if len(words) > 1 else None
    if group is None or not group.of_file or words[1] in ("-h", "--help"):
        return words
    is_short = words[1].startswith("-") or Path(words[1]).suffix
    return [words[0], group.of_file, *words[1:]] if is_short else words


def _unknown(words: Sequence[str], commands: "Mapping[str, Command]", kind: str = "command") -> str | None:
    """What to say of the first word that should be a command and is none."""
    if not words or words[0].startswith("-"):
        return None
    if words[0] not in commands:
        return f"unknown {kind} {excerpt(words[0])}; {nearest(words[0], commands, all_are=f'{kind}s are')}"
    nested = commands[words[0]].commands
    return None if nested is None else _unknown(words[1:], nested(), f"{words[0]} command")


def _run(command: "Callable[[argparse.Namespace], int]", options: argparse.Namespace, interrupts: Sequence[int]) -> int:
    try:
        return command(options)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, ImportError, SystemError) if interrupts else KeyboardInterrupt):
            return _fail("interrupted; what was committed is safe, and nothing is left of a copy", EXIT_INTERRUPTED)
        if isinstance(error, BrokenPipeError):
            # The reader of our output is gone; stdout must not be flushed into the broken pipe at exit.
            sys.stderr.close()
            return EXIT_FAILED
        if options.traceback or not isinstance(error, TierstoreError | OSError | ImportError | ValueError):
            raise
        is_operation = isinstance(error, TierstoreError | OSError | ImportError)
        return _fail(str(error), EXIT_FAILED if is_operation else EXIT_USAGE)


def _fail(message: str, status: int) -> int:
    rank = launched_rank()
    print(f"tierstore: {'' if rank is None else f'rank {rank}: '}{message}", file=sys.stderr)
    return status


def build_parser(words: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser of all commands; of a group's, which load what they need, if the words begin so, or are None."""
    parser = argparse.ArgumentParser(
        prog="tierstore",
        description="Embedding tables larger than memory: train a model on them, look into them, check them.",
        epilog="tierstore help COMMAND says what a command takes.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"tierstore {__version__}")
    _add_commands(parser, _COMMANDS, words if words is None else list(words))
    return parser


def _add_commands(
    parser: argparse.ArgumentParser, commands: "Mapping[str, Command]", words: Sequence[str] | None
) -> None:
    parser.set_defaults(run=show_help, parser=parser)
    children = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, each in commands.items():
        child = children.add_parser(
            name,
            help=each.help,
            description=each.description,
            epilog=each.examples,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter if each.examples else argparse.HelpFormatter,
        )
        if each.commands is None:
            child.set_defaults(run=each.run, parser=child)
            each.add_arguments(child)
            child.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
        elif words is None or words[:1] == [name]:
            _add_commands(child, each.commands(), words and words[1:])


def _train(options: argparse.Namespace) -> int:
    if options.run_file is None and not options.keys:
        raise ValueError("give a run file: tierstore train FILE.toml; --keys prints one with all keys")
    from ..settings.sections import to_toml
    from ..train import RunConfig, train
    from ..train.config import load
    from .commands import require_outputs

    if options.keys:
        print(to_toml(RunConfig(), with_help=True), end="")
        return 0
    config = load(options.run_file, _overrides(options))
    if not launched_rank():
        options.force |= options.resume
        require_outputs({"--html": options.html, "--json": options.json}, [options.run_file], force=options.force)
    summary = train(config, resume=options.resume, bits=options.digest)
    if not launched_rank():
        _tell(summary, options)
    return EXIT_INTERRUPTED if summary.interrupted else 0


def _tell(summary: "Summary", options: argparse.Namespace) -> None:
    from ..train.trainer import command_name

    print(summary.describe())
    if options.json is not None:
        summary.write(options.json)
    if options.html is not None:
        from ..system.files import write_text
        from ..train.summary import run_page

        name = Path(options.run_file).name
        write_text(
            Path(options.html), run_page(f"tierstore train {name}", {name: summary.to_dict()}), force=options.force
        )
        print(f"page     {options.html}")
    if summary.interrupted:
        words = shlex.join([*(word for word in options.words if word != "--resume"), "--resume"])
        print(f"stopped after step {summary.step:,}; continue with: {command_name()} {words}")


def _overrides(options: argparse.Namespace) -> "list[Override]":
    """What the flags set; named flags come last and so win over ``--set``."""
    from ..settings.sections import Override
    from ..train.config import parse_override

    overrides = [parse_override(text) for text in options.set]
    for flag, (name, *_) in _TRAIN_FLAGS.items():
        value = getattr(options, name)
        if value is not None:
            section, _, key = name.partition(".")
            overrides.append(Override(section, key, value, f"{flag} {value}"))
    return overrides


def _sweep(options: argparse.Namespace) -> int:
    from ..train.config import load
    from ..train.sweep import axis_of, failure_of, prepare, rows_of, run_all, runs_of, seed_axis, sweep_table, write

    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: expected a whole number from 1")
    axes = [*map(axis_of, options.set), seed_axis(load(options.run_file).train.seed, options.seeds)]
    runs, folder, failed = runs_of(options.run_file, options.folder, axes), Path(options.folder), list[str]()
    prepare(runs)
    title = f"tierstore sweep {Path(options.run_file).name}"

    def told(run: "SweepRun", status: int) -> None:
        reason = f"status {status}: {failure_of(run)}" if run.result is None else ""
        failed.extend([reason] if reason else ())
        figures = [f"{key} {value:.5g}" for row in rows_of([run]) for key, value in row.items() if type(value) is float]
        print(f"{run.folder.name}: {', '.join(filter(None, [*figures, reason]))}", flush=True)
        write(folder, title, runs)

    write(folder, title, runs)
    print(f"{format_count(len(runs), 'run')}, of which {len(rows_of(runs)):,} ended before", flush=True)
    try:
        run_all(runs, jobs=options.jobs, told=told)
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
        return EXIT_INTERRUPTED
    print(f"\n{sweep_table(runs)}\n\npage     {folder / 'sweep.html'}, beside it sweep.json")
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed; the same command tries them again")
    return EXIT_FAILED if failed else 0


def _demo(options: argparse.Namespace) -> int:
    from ..train.demo import DEFAULT_ROWS, run_demo

    equal = run_demo(options.dir, rows=options.rows or DEFAULT_ROWS, ranks=options.ranks)
    return 0 if equal else EXIT_FAILED


def _inspect(options: argparse.Namespace) -> int:
    from ..offline.inspection import describe, to_dict

    if options.rows:
        return _look_at_rows(options)
    print(json.dumps(to_dict(options.directory), indent=1) if options.json else describe(options.directory))
    return 0


def _look_at_rows(options: argparse.Namespace) -> int:
    from ..offline.rows import diff, lines_of, rows_of

    found = diff(options.directory, options.other) if "other" in options else rows_of(options.directory)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines_of(found)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ..offline.inspection import stores_in, verify_store

    for each in stores_in(options.directory):
        print(verify_store(each))
    return 0


def _rollback(options: argparse.Namespace) -> int:
    from ..offline.inspection import roll_back_store

    print(roll_back_store(options.directory, options.version))
    return 0


def _repair(options: argparse.Namespace) -> int:
    from ..offline.salvage import salvage

    with byte_bar("repair") as show:
        report = salvage(options.directory, options.target, stale_ok=options.stale_ok, progress=show)
    print(report.describe())
    return 0 if report.is_whole else EXIT_FAILED


def _completion(options: argparse.Namespace) -> int:
    with packages_for("completion", "shtab"):
        import shtab
    print(shtab.complete(build_parser(None), options.shell))
    return 0


def _commands_of(module: str, name: str = "COMMANDS") -> "Mapping[str, Command]":
    found: Mapping[str, Command] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found


_SET_HELP: Final = "values of a key, as train.batch_size=256,1024; of several keys, every combination"
_RUN_FILE: Final = arg("run_file", metavar="FILE.toml", help="the run file")
_COMMANDS: Final = {
    "train": command(
        _train,
        (
            arg("run_file", metavar="FILE.toml", nargs="?", help="the run file"),
            *key_arguments(_TRAIN_FLAGS),
            arg("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set any key"),
            arg("--resume", help="continue from the last commit of the store, if any"),
            arg("--json", metavar="PATH", help="write what the run did and ended in to a file"),
            arg("--html", metavar="PATH", help="write a page with plots of loss, hit rate, reads and writes a step"),
            arg("--digest", help="read every row in the end, and say the digest of all rows and dense weights"),
            arg("--force", help="replace the files of --json and --html; --resume does so too"),
            arg("--keys", help="print every key with its default, and exit"),
        ),
        "train a model as a run file says",
        "Train a model as a run file says. A flag overrides the key behind it. Ctrl-C commits and says how to resume.",
        "",
    ),
    "sweep": command(
        _sweep,
        (
            _RUN_FILE,
            arg("folder", metavar="DIR", help="folder of the sweep, with a folder for each run; made if need be"),
            arg("--set", action="append", default=[], metavar="SECTION.KEY=VALUE,...", help=_SET_HELP),
            arg("--seeds", type=int, default=1, metavar="N", help="seeds of each, from train.seed on (default: 1)"),
            arg("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default: 1)"),
        ),
        "train a run file over values of its keys, and compare",
        "Train a run file over values of its keys and over seeds; one table, page and JSON compare them. Each run is a "
        "folder that tierstore train and serve can use. Started again, the sweep goes on.",
        """examples:
  tierstore sweep run.toml sweep --set train.batch_size=256,1024,4096 --seeds 3
  tierstore sweep run.toml sweep --set optimizer.dense=sgd,adam --set optimizer.dense_lr=0.01,0.1 --jobs 2""",
    ),
    "demo": command(
        _demo,
        (
            arg("--dir", default=".demo", metavar="DIR", help="where to work; emptied first (default: .demo)"),
            arg("--ranks", type=int, metavar="N", default=1, help="processes that share the tables (default: 1)"),
            arg("--rows", type=int, metavar="N", default=0, help=argparse.SUPPRESS),
        ),
        "train on tables that do not fit the budget, and compare",
        "Generate click data, train on it with a tenth of the memory its rows need, then with all of it, and compare.",
        "",
    ),
    "inspect": command(
        _inspect,
        (DIRECTORY, arg("--json", help="as JSON"), arg("--rows", help="read all rows: norms, zeros, NaN, untrained")),
        "say what a store holds",
        "Say what a store holds. Reads only what it shows; tierstore verify checks. Nothing is changed.",
        "",
    ),
    "diff": command(
        _look_at_rows,
        (
            arg("directory", metavar="A", help="folder of a store, or a version that it keeps, as shop@3"),
            arg("other", metavar="B", help="likewise"),
            arg("--json", help="as JSON"),
        ),
        "say what changed between two versions or stores",
        "Say which tables, rows and dense tensors differ between two versions of a store, or two stores.",
        "",
    ),
    "verify": command(
        _verify,
        (DIRECTORY,),
        "check every row of a store",
        "Read every stored row, check it against its checksum and the counts against the manifest. Nothing is changed.",
        "",
    ),
    "rollback": command(
        _rollback,
        (DIRECTORY, arg("version", type=int, metavar="VERSION", help="one that tierstore inspect DIR lists as kept")),
        "go back to a version that the store kept",
        "Make a kept version the current one again. Later versions are dropped. A run keeps versions with store.keep.",
        """example:
  tierstore inspect shop
  tierstore rollback shop 12""",
    ),
    "repair": command(
        _repair,
        (
            arg("directory", metavar="DIR", help="folder of the damaged store; only read"),
            arg("target", metavar="NEW_DIR", help="folder of the new store; must not exist, or be empty"),
            arg("--stale-ok", help="take rows too that may be of an earlier version, and count them"),
        ),
        "save what is sound of a damaged store",
        "Save every sound row of a damaged store's last version into a new store, and list what was lost. "
        "The exit status is 1 if anything was.",
        """example:
  tierstore repair shop shop-repaired""",
    ),
    "backup": BACKUP,
    "compact": COMPACT,
    "reshard": RESHARD,
    "shard": group(
        partial(_commands_of, "shard"),
        "plan which rank gets which tables",
        "Measure ranks, and plan which of them gets which tables.",
    ),
    "trace": group(
        partial(_commands_of, "plan", "TRACE_COMMANDS"),
        "write down, draw and describe which rows are looked up",
        "Traces: which rows are looked up, for tierstore plan, shard plan, compact and serve --warm-up.",
        of_file="record",
    ),
    "table": group(
        partial(_commands_of, "commands", "TABLE_COMMANDS"),
        "grow, rename or drop a table",
        "Change one table of a store, in place and durably, in all versions that are kept. Train on once it is done.",
    ),
    "export": EXPORT,
    "import": IMPORT,
    "quantize": QUANTIZE,
    "serve": Command(
        serve,
        add_serve_arguments,
        "answer requests for rows and predictions",
        "Serve the store's tables as lookups and, if tierstore train wrote it, its model, by the Open Inference "
        "Protocol over REST and gRPC. It follows the trainer's commits. SIGTERM ends it once requests are answered.",
        """examples:
  tierstore serve --store shop --ddr 2GiB
  tierstore serve --store shop --dtype int8 --workers 2
  tierstore serve --store replica --from http://trainer:8002
  tierstore serve serve.toml --port 9000""",
    ),
    "publish": PUBLISH,
    "feed": FEED,
    "compile": COMPILE,
    "completion": command(
        _completion,
        (arg("shell", choices=("bash", "zsh", "fish"), help="the shell"),),
        "print what completes commands in a shell",
        "Print a script that completes commands, flags and files in a shell.",
        """example, in ~/.bashrc:
  source <(tierstore completion bash)""",
    ),
    "plan": group(
        partial(_commands_of, "plan"),
        "say what machines a workload needs, before they are bought",
        "Say what machines a workload needs, before they are bought: memory, drives, hosts, speed, latency and cost.",
        """examples:
  tierstore plan --bytes 300GB --queries 20000 --p99 20ms   # short for: tierstore plan run ...
  tierstore plan COMMAND --help""",
        of_file="run",
    ),
}
