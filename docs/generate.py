"""Write the benchmark tables of the pages from the JSON in bench/results.

``python -m docs.generate`` writes docs/benchmarks.md, and in README.md and some other pages what stands between
``<!-- bench:NAME -->`` and ``<!-- /bench -->`` (its tables; with ``bench:NAME TITLE; TITLE`` those whose titles begin
so), and between ``<!-- plot:FILE what it shows -->`` and ``<!-- /plot -->`` (a plot). ``--check`` only tells whether
they are up to date.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.common import RESULTS
from bench.data import ROOT
from bench.machine import summary

from .headline import headline
from .plots import PLOTS, Plot, draw, is_current

__all__ = ["benchmarks_page", "load_results", "main", "pages", "renewed", "stale_plots"]

ORDER: Final = (
    "cold",
    "overhead",
    "tiers",
    "policies",
    "memory",
    "commit",
    "criteo",
    "towers",
    "reading",
    "precision",
    "versions",
    "serve",
    "plan",
    "dist",
    "dist_costs",
    "generalisation",
    "gpu",
)
"""Sections of docs/benchmarks.md; results of other names follow by name."""

_BLOCK: Final = re.compile(r"<!-- bench:(\w+)(?: ([^\n]+))? -->\n.*?<!-- /bench -->", re.DOTALL)
_PLOT: Final = re.compile(r"<!-- plot:(\S+) ([^\n]+) -->\n.*?<!-- /plot -->", re.DOTALL)
_RENEWED: Final = ("README.md", *(f"docs/{page}.md" for page in ("data", "gpu", "performance", "planning", "sweep")))

_HEAD: Final = """\
# Benchmarks

```sh
python -m bench.overhead --only lookup --quick --dir . --json overhead.json    # in a checkout of the project
```

This prints pooled lookups a second beside torch's, at small size.

- Each section ends with the command that measured it and the machine. A program writes `bench/results/NAME.json`, or
  what `--json PATH` says; with `--quick` only the latter. Its sizes are in the TOML file of its name in `bench/`. Most
  have parts, which `--only` measures alone.
- The physical limit and the peers are measured in the same run, in turns with tierstore. Figures are medians over the
  repetitions. A missed goal is marked **missed**.
- `python -m docs.generate` writes this page from the JSON in `bench/results`; edit neither by hand.
"""


def load_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Every result by name, in the order of the page.

    Raises:
        ValueError: a result of a quick run, which shows only that a program works.
    """
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for name, result in found.items():
        if result["quick"]:
            raise ValueError(f"{folder / name}.json is of a quick run: run python -m bench.{name} without --quick")
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    return {name: found[name] for name in names}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(table: dict[str, Any]) -> list[str]:
    columns = table["columns"]
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return [_line(columns), _line(rule), *map(_line, table["rows"])]


def _titled(table: dict[str, Any]) -> list[str]:
    return [f"{table['title'][:1].upper()}{table['title'][1:]}:", "", *_table(table), ""]


def _chosen(result: dict[str, Any], titles: str | None) -> list[dict[str, Any]]:
    """The tables whose titles begin with one of these, in that order; all without any."""
    if titles is None:
        return list(result["tables"])
    found: list[dict[str, Any]] = []
    for beginning in titles.split("; "):
        matching = [table for table in result["tables"] if table["title"].startswith(beginning)]
        if not matching:
            known = "; ".join(table["title"] for table in result["tables"])
            raise ValueError(f"no table of {result['benchmark']}.json begins with {beginning!r}: {known}")
        found += matching
    return found


def _short(result: dict[str, Any], titles: str | None) -> list[str]:
    """What a page shows: tables and where they were measured."""
    lines = [line for table in _chosen(result, titles) for line in _titled(table)]
    name = result["benchmark"]
    machine = result["machine"]
    return [
        *lines,
        f"`python -m bench.{name}` on {machine['cpu']}, {machine['cores']} cores, {machine['disk']['model']}.",
    ]


def _goal(goal: dict[str, Any]) -> str:
    return f"- {'met' if goal['met'] else '**missed**'}: {goal['name']}: {goal['value']:.4g}, wanted {goal['wanted']}"


def _section(name: str, result: dict[str, Any]) -> list[str]:
    lines = [f"## {name}", "", result["question"], ""]
    lines += [line for table in result["tables"] for line in _titled(table)]
    lines += [text for note in result["notes"] for text in (note, "")]
    if result["goals"]:
        lines += [*map(_goal, result["goals"]), ""]
    made = f"`python -m bench.{name}`, {result['date']}, commit {result['commit']}"
    return [*lines, f"{made}, {result['seconds']:.0f} s. {summary(result['machine'])}.", ""]


def benchmarks_page(results: dict[str, dict[str, Any]]) -> str:
    """The text of docs/benchmarks.md."""
    lines = [_HEAD, *map(_line, [["benchmark", "question", "goals met"], ["---", "---", "---:"]])]
    for name, result in results.items():
        met = [goal["met"] for goal in result["goals"]]
        lines.append(_line([f"[{name}](#{name})", result["question"], f"{sum(met)} of {len(met)}"]))
    lines.append("")
    for name, result in results.items():
        lines += _section(name, result)
    return "\n".join(lines).rstrip("\n") + "\n"


def _not_yet(name: str) -> list[str]:
    """What stands for the results of a benchmark without any; nothing where there is no such benchmark."""
    exists = (ROOT / "bench" / f"{name}.toml").exists()
    return [f"Not measured yet: `python -m bench {name}`."] if exists else []


def renewed(text: str, results: dict[str, dict[str, Any]]) -> str:
    """A page's text with its tables and plots renewed."""

    def tables(block: re.Match[str]) -> str:
        name, titles = block[1], block[2]
        if name == "headline":
            columns, *rows = headline(results)
            lines = _table({"columns": columns, "rows": rows})
        else:
            lines = _short(results[name], titles) if name in results else _not_yet(name)
        marker = f"bench:{name}" if titles is None else f"bench:{name} {titles}"
        return "\n".join([f"<!-- {marker} -->", *lines, "<!-- /bench -->"])

    def plot(block: re.Match[str]) -> str:
        name, shows = block[1], block[2]
        source = PLOTS[name][0]
        lines = [f"![{shows}]({name})"] if source in results else []
        return "\n".join([f"<!-- plot:{name} {shows} -->", *lines, "<!-- /plot -->"])

    return _PLOT.sub(plot, _BLOCK.sub(tables, text))


def pages() -> dict[Path, str]:
    """Each generated file and what it must hold."""
    results = load_results()
    found = {ROOT / name: renewed((ROOT / name).read_text(), results) for name in _RENEWED}
    return {ROOT / "docs" / "benchmarks.md": benchmarks_page(results), **found}


def stale_plots() -> list[tuple[Path, Plot, dict[str, Any]]]:
    """Plots that were not drawn from the figures there are: file, how it is drawn, and from what."""
    results = load_results()
    wanted = [
        (ROOT / "docs" / name, plot, results[source]["figures"])
        for name, (source, plot) in PLOTS.items()
        if source in results
    ]
    return [each for each in wanted if not is_current(each[0], each[2])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is out of date")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(pages()[path])
    for path, plot, figures in stale_plots():
        if not check:
            draw(path, plot, figures)
        stale.append(path)
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
