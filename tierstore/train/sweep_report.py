"""What the runs of a sweep came to, over seeds: a table, rows for notebooks, and a page with a plot of each measure."""

import csv
import io
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ..system.terminal import columns_of
from .page import Line, Step, figure, filled
from .sweep import SEED, SweepRun

_TONES: Final = ("c1", "c2", "c3", "c4", "c5", "c6")


class Measure(NamedTuple):
    """A figure of a run's result; ``of`` gives None where it has none."""

    name: str
    unit: str
    form: str
    of: Callable[[dict[str, Any]], float | None]


MEASURES: Final = (
    Measure("AUC", "AUC", ".4f", lambda result: (result["test"] or {}).get("auc")),
    Measure("log loss", "log loss", ".4f", lambda result: (result["test"] or {}).get("log_loss")),
    Measure("training loss", "log loss", ".4f", lambda result: result["loss"]),
    Measure("steps", "steps", ",.0f", lambda result: result["step"]),
    Measure("seconds", "s", ",.1f", lambda result: result["seconds"]),
    Measure("samples/s", "samples/s", ",.0f", lambda result: result["samples_per_second"]),
    Measure("sharpness 1e-3", "%", ".4g", lambda result: result["sharpness"].get("whole_1e3_percent")),
    Measure("sharpness 5e-4", "%", ".4g", lambda result: result["sharpness"].get("whole_5e4_percent")),
    Measure("sharpness in 100 dims", "%", ".4g", lambda result: result["sharpness"].get("subspace_1e3_percent")),
    Measure("largest eigenvalue", "eigenvalue", ".4g", lambda result: result["sharpness"].get("largest_eigenvalue")),
)
_NOT_PLOTTED: Final = ("training loss", "steps", "seconds")


class Point(NamedTuple):
    """A measure of runs that differ in their seeds alone: mean, standard deviation (0 of one run), least, most."""

    mean: float
    deviation: float
    low: float
    high: float


class Group(NamedTuple):
    """Runs that differ in nothing but their seeds: what is swept, how many have ended, each measure that they have."""

    labels: dict[str, str]
    ended: int
    points: dict[str, Point]


def groups_of(runs: Sequence[SweepRun]) -> list[Group]:
    """In the runs' order."""
    found: dict[tuple[tuple[str, str], ...], list[dict[str, Any] | None]] = {}
    for run in runs:
        key = tuple((name, label) for name, label in run.labels.items() if name != SEED)
        found.setdefault(key, []).append(run.result)
    groups = []
    for key, results in found.items():
        ended = [result for result in results if result is not None]
        values = {each.name: [value for value in map(each.of, ended) if value is not None] for each in MEASURES}
        points = {name: _point(own) for name, own in values.items() if own}
        groups.append(Group(dict(key), len(ended), points))
    return groups


def _point(values: Sequence[float]) -> Point:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Point(statistics.fmean(values), deviation, min(values), max(values))


def _cells(group: Group, measures: Sequence[Measure]) -> list[str]:
    """Means, with standard deviations where runs differ."""
    cells = []
    for measure in measures:
        point = group.points.get(measure.name)
        spread = f" ± {point.deviation:{measure.form}}" if point and point.deviation else ""
        cells.append(f"{point.mean:{measure.form}}{spread}" if point else "")
    return cells


def _measured(groups: Sequence[Group]) -> list[Measure]:
    return [each for each in MEASURES if any(each.name in group.points for group in groups)]


def table_of(runs: Sequence[SweepRun]) -> str:
    """For a terminal: a line for each combination of what is swept, means over seeds with standard deviations."""
    groups = groups_of(runs)
    measures = _measured(groups)
    head = [*groups[0].labels, "runs", *(measure.name for measure in measures)]
    lines = [[*group.labels.values(), str(group.ended), *_cells(group, measures)] for group in groups]
    return "\n".join(columns_of([head, *lines], is_last_text=False))


def rows_of(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """JSON-able, of each run that has ended: what is swept, its folder, its measures."""
    return [
        {**run.labels, "folder": run.folder.name, **{measure.name: measure.of(result) for measure in MEASURES}}
        for run in runs
        if (result := run.result) is not None
    ]


def csv_of(rows: Sequence[dict[str, Any]]) -> str:
    """``rows_of`` some runs, below a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else ())
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page_of(title: str, runs: Sequence[SweepRun]) -> str:
    """One file that needs no network: the table, and plots over the first swept key, a line for each combination of the
    others, with a band from the least to the most of any seed."""
    groups = groups_of(runs)
    measures = _measured(groups)
    rows = [[", ".join(group.labels.values()), str(group.ended), *_cells(group, measures)] for group in groups]
    ended = sum(group.ended for group in groups)
    notes = [f"{ended:,} of {len(runs):,} runs have ended. Figures are means over seeds, ± their standard deviation."]
    plots = [part for each in measures if each.name not in _NOT_PLOTTED for part in _plot(groups, each)]
    return filled(title, notes, [["", "runs", *(each.name for each in measures)], *rows], plots)


def _plot(groups: Sequence[Group], measure: Measure) -> list[str]:
    over = next(iter(groups[0].labels), "")
    places = list(dict.fromkeys(next(iter(each.labels.values()), "") for each in groups))
    steps: dict[str, list[Step]] = {}
    for group in groups:
        if (point := group.points.get(measure.name)) is not None:
            first, *others = group.labels.values() or ("",)
            place = 1 + places.index(first)
            steps.setdefault(", ".join(others), []).append(Step(place, place, point.mean, (point.low, point.high)))
    lines = [Line(name, tone, own) for tone, (name, own) in zip(itertools.cycle(_TONES), steps.items(), strict=False)]
    return figure(measure.name, lines, unit=measure.unit, over=over, labels=places)
