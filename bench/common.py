"""What every benchmark shares: a configuration, repetitions, parts, a report that is printed and written as JSON."""

import argparse
import contextlib
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from tierstore.system.files import write_text

from . import machine
from .data import ROOT

RESULTS: Final = ROOT / "bench" / "results"
"""What docs are generated from: a report of each benchmark."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a benchmark is given: the keys of ``bench/NAME.toml``, those of its table ``quick`` laid over them if it is
    ``quick``; a folder where stores and data files are found again by the next run; ``parts`` to measure, none for all;
    ``earlier`` figures of the parts that are not measured again; and ``save``, which writes what was found so far."""

    config: dict[str, Any]
    quick: bool
    folder: Path
    parts: tuple[str, ...] = ()
    earlier: dict[str, Any] = field(default_factory=dict)
    save: "Callable[[Report], None]" = lambda report: None  # noqa: ARG005


@dataclass(frozen=True)
class Table:
    """One table of results, cells as they are shown."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Goal:
    """A wanted figure; of the three bounds one is given."""

    name: str
    value: float
    _: KW_ONLY
    at_least: float | None = None
    at_most: float | None = None
    exactly: float | None = None

    @property
    def wanted(self) -> str:
        bounds = {"at least": self.at_least, "at most": self.at_most, "exactly": self.exactly}
        return next(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)

    @property
    def met(self) -> bool:
        return (
            (self.at_least is None or self.value >= self.at_least)
            and (self.at_most is None or self.value <= self.at_most)
            and (self.exactly is None or self.value == self.exactly)
        )


@dataclass
class Report:
    """What a benchmark, or a part of one, found: ``notes`` say how, ``figures`` are every number behind the tables (of
    a part, what it measured), and ``question`` is what it answers if not the first line of the program's docstring."""

    tables: list[Table]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: Any = field(default_factory=dict)
    question: str = ""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of repetitions of one measurement."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "count": len(values)}


def measure(
    actions: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each action, repetition by repetition, without those of the ``warm_up``. Actions take turns, so that
    each has the same share of whatever else the machine does meanwhile."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(warm_up + repetitions):
        for name, action in actions.items():
            start = clock()
            action()
            seconds[name].append(clock() - start)
    return {name: each[warm_up:] for name, each in seconds.items()}


def per_second(count: int, seconds: Sequence[float]) -> dict[str, float]:
    """The spread of rates, ``count`` things being done in each of the times."""
    return spread([count / value for value in seconds])


def median_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each number of several measurements, the median."""
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


@contextlib.contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """The path, where nothing is; what is made there within the block is removed at its end."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def plain(value: Any) -> Any:
    """The value as JSON has it: named tuples and dataclasses as objects, names as text."""
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def aligned(table: Table) -> str:
    """The table with its columns lined up, first column to the left."""
    cells = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<", *">" * (len(widths) - 1)]
    formats = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    lines = ["  ".join(formats).format(*row) for row in cells]
    return "\n".join([table.title, lines[0], "-" * len(lines[0]), *lines[1:]])


def load_config(path: Path, quick: bool) -> dict[str, Any]:
    config = tomllib.loads(path.read_text())
    small = config.pop("quick", {})
    return _overlaid(config, small, path) if quick else config


def _overlaid(config: dict[str, Any], small: dict[str, Any], path: Path) -> dict[str, Any]:
    """Tables within are overlaid, too; an empty one takes any key."""
    if unknown := set(small) - set(config):
        raise ValueError(f"{path}: [quick] sets {sorted(unknown)}, which the file itself does not")
    parts = {
        name: _overlaid(config[name], each, path)
        for name, each in small.items()
        if config[name] and isinstance(each, dict)
    }
    return config | small | parts


def _commit() -> str:
    """The code that ran: a short hash, with "-dirty" where tierstore or bench differ from it; "" outside git."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    # Results of this and earlier programs are no code.
    is_clean = not git("diff", "--quiet", "HEAD", "--", "tierstore", "bench", ":!bench/results").returncode
    return head if is_clean or not head else f"{head}-dirty"


def _as_json(name: str, run: Run, report: Report, described: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "benchmark": name,
        "question": report.question,
        "quick": run.quick,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "seconds": round(seconds, 1),
        "machine": described,
        "config": run.config,
        "goals": [asdict(goal) | {"wanted": goal.wanted, "met": goal.met} for goal in report.goals],
        "tables": plain(report.tables),
        "notes": report.notes,
        "figures": plain(report.figures),
    }


def _print(report: Report, described: dict[str, Any], quick: bool) -> None:
    print(f"\n{report.question}")
    for table in report.tables:
        print(f"\n{aligned(table)}")
    for note in report.notes:
        print(f"\n{note}")
    for goal in report.goals:
        print(f"\n{'met' if goal.met else 'MISSED'}: {goal.name}: {goal.value:.4g}, wanted {goal.wanted}", end="")
    print(f"\n\nOn: {machine.summary(described)}")
    if quick:
        print("A quick run: small sizes, not results.")


def _earlier(path: Path | None, quick: bool) -> dict[str, Any]:
    """Figures of an earlier report of the same kind; none if there is none."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found["figures"] if found["quick"] == quick else {}


def _parts_of(text: str, known: Sequence[str], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    chosen = tuple(filter(None, text.split(",")))
    if unknown := set(chosen) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return chosen


def program(
    name: str,
    run: Callable[[Run], Report],
    arguments: Sequence[str] | None = None,
    *,
    about: str = "",
    parts: Sequence[str] = (),
) -> int:
    """The command line of ``python -m bench.NAME``; returns the exit status. ``about`` is the text of ``--help``, the
    question that it answers first, and ``parts`` can be measured one by one, into one file."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"[bench/results/{name}.json; none if quick]")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--config", type=Path, default=ROOT / "bench" / f"{name}.toml", metavar="PATH")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".bench", metavar="DIR", help="where stores are built and kept [.bench]"
    )
    if parts:
        parser.add_argument("--only", default="", metavar="PARTS", help=f"some of {','.join(parts)}; the rest stays")
    given = parser.parse_args(arguments)
    target: Path | None = given.json or (None if given.quick else RESULTS / f"{name}.json")
    given.dir.mkdir(parents=True, exist_ok=True)
    described: dict[str, Any] = machine.describe(given.dir)
    begun = time.perf_counter()

    def save(report: Report) -> None:
        report.question = report.question or about.partition("\n")[0]
        if target:
            found = _as_json(name, request, report, described, time.perf_counter() - begun)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, json.dumps(found, indent=1) + "\n", force=True)

    request = Run(
        config=load_config(given.config, given.quick),
        quick=given.quick,
        folder=given.dir,
        parts=_parts_of(given.only, parts, parser) if parts else (),
        earlier=_earlier(target, given.quick) if parts else {},
        save=save,
    )
    report = run(request)
    if given.quick:
        report.goals.clear()
    save(report)
    _print(report, described, given.quick)
    if target:
        print(f"Written: {target}")
    return 0


def start(name: str) -> None:
    """Run ``bench.NAME`` and end: its ``run``, or else its ``PARTS``. It is imported by its name, so that processes of
    its own find what they are to run."""
    module = importlib.import_module(f"bench.{name}")
    parts = getattr(module, "PARTS", {})
    run = getattr(module, "run", partial(run_parts, parts=parts))
    sys.exit(program(name, run, about=module.__doc__ or "", parts=tuple(parts)))


class Part(NamedTuple):
    """``measure`` is given the figures of other parts, too, by their names; ``tell`` its own as JSON has them."""

    measure: Callable[[Run, dict[str, Any]], dict[str, Any]]
    tell: Callable[[dict[str, Any]], Report]


def run_parts(request: Run, parts: Mapping[str, Part]) -> Report:
    """Measure the parts that are asked for; the figures of the others stay as they are in the report's file, which is
    written after each part, so that one that fails costs none before it."""
    asked = request.parts or tuple(parts)
    figures: dict[str, Any] = {name: found for name, found in request.earlier.items() if name not in asked}
    for name in asked:
        print(f"--- {name}", flush=True)
        begun = time.perf_counter()
        found = parts[name].measure(request, figures)
        figures[name] = plain(found) | {"measured_seconds": round(time.perf_counter() - begun, 1)}
        request.save(_told(parts, figures))
    return _told(parts, figures)


def _told(parts: Mapping[str, Part], measured: Mapping[str, Any]) -> Report:
    figures = {name: measured[name] for name in parts if name in measured}
    told = [parts[name].tell(found) for name, found in figures.items()]
    kinds = ("tables", "goals", "notes")
    tables, goals, notes = ([each for part in told for each in getattr(part, kind)] for kind in kinds)
    return Report(tables, goals, notes, figures)
