"""What runs did and ended in, side by side: their figures and plots over steps; of a sweep, means over seeds."""

import csv
import io
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..report import Line, Section, Step, figure, page_of
from ..system.terminal import columns_of
from .summary import figures_of
from .sweep import SEED, SweepRun

Run = dict[str, Any]
"""``Summary.to_dict()``, or what was read from its JSON."""


class _Rate(NamedTuple):
    """A plot of one running total of a history by another."""

    title: str
    unit: str
    total: str
    by: str
    times: float
    low: float | None = 0


_RATES: Final = (
    _Rate("Loss, mean of the steps", "log loss", "loss_sum", "step", 1, None),
    _Rate("Hit rate of the HBM tier", "%", "hbm_hits", "hbm_unique", 100),
    _Rate("Hit rate of the DDR tier", "%", "ddr_hits", "ddr_unique", 100),
    _Rate("Read from SSD: rows not in memory, fetched ahead", "KiB a step", "bytes_read", "step", 2**-10),
    _Rate("Written to SSD: rows evicted, and commits", "KiB a step", "bytes_written", "step", 2**-10),
)
_TONES: Final = ("c1", "c2", "c3", "c4", "c5", "c6")


def table_of(runs: Mapping[str, Run]) -> list[list[str]]:
    """The runs' figures side by side, below their names."""
    figures = [figures_of(run) for run in runs.values()]
    labels = dict.fromkeys(label for each in figures for label in each)
    return [["", *runs], *([label, *(each.get(label, "") for each in figures)] for label in labels)]


def run_page(title: str, runs: Mapping[str, Run], *, notes: Sequence[str] = ()) -> str:
    """The page, some 100 KB, of one or two runs by their names; ``notes`` stand below the title."""
    described = [
        f"{name}: {run['step'] - run['history'][0]['step']:,} steps, to step {run['step']:,}, model on {run['device']}"
        f"{', interrupted' if run['interrupted'] else ''}."
        for name, run in runs.items()
    ]
    plots: list[Section] = []
    for rate in _RATES:
        lines = []
        for tone, (name, run) in zip(_TONES, runs.items(), strict=False):
            steps = []
            for a, b in itertools.pairwise(run["history"]):
                by = b[rate.by] - a[rate.by]
                if by and None not in (a[rate.total], b[rate.total]):
                    steps.append(Step(a["step"] + 1, b["step"], rate.times * (b[rate.total] - a[rate.total]) / by))
            lines.append(Line(name, tone, steps))
        plots += figure(rate.title, lines, unit=rate.unit, low=rate.low)
    return page_of(title, [Section("Answer", [*notes, *described]), *plots, Section("Figures", table=table_of(runs))])


class Measure(NamedTuple):
    """A figure of a run's result; ``of`` gives None where it has none."""

    name: str
    unit: str
    form: str
    of: Callable[[Run], float | None]


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


class Spread(NamedTuple):
    """A measure of runs that differ in their seeds alone; ``deviation``: standard, 0 of one run."""

    mean: float
    deviation: float
    low: float
    high: float


class Group(NamedTuple):
    """Runs that differ in nothing but their seeds: what is swept, how many have ended, each measure that they have."""

    labels: dict[str, str]
    ended: int
    measured: dict[str, Spread]


def groups_of(runs: Sequence[SweepRun]) -> list[Group]:
    """In the runs' order."""
    found: dict[tuple[tuple[str, str], ...], list[Run | None]] = {}
    for run in runs:
        key = tuple((name, label) for name, label in run.labels.items() if name != SEED)
        found.setdefault(key, []).append(run.result)
    groups = []
    for key, results in found.items():
        ended, measured = [result for result in results if result is not None], {}
        for each in MEASURES:
            if values := [value for value in map(each.of, ended) if value is not None]:
                deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                measured[each.name] = Spread(statistics.fmean(values), deviation, min(values), max(values))
        groups.append(Group(dict(key), len(ended), measured))
    return groups


def _compared(groups: Sequence[Group]) -> tuple[list[Measure], list[list[str]]]:
    """The measures that some group has; and of each group its labels, runs and means, with deviations."""
    measures = [each for each in MEASURES if any(each.name in group.measured for group in groups)]
    rows = []
    for group in groups:
        rows.append([*group.labels.values(), str(group.ended)])
        for measure in measures:
            found = group.measured.get(measure.name)
            spread = f" ± {found.deviation:{measure.form}}" if found and found.deviation else ""
            rows[-1].append(f"{found.mean:{measure.form}}{spread}" if found else "")
    return measures, rows


def sweep_table(runs: Sequence[SweepRun]) -> str:
    """For a terminal: a line for each combination of what is swept, means over seeds with standard deviations."""
    groups = groups_of(runs)
    measures, rows = _compared(groups)
    head = [*groups[0].labels, "runs", *(measure.name for measure in measures)]
    return "\n".join(columns_of([head, *rows], is_last_text=False))


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


def sweep_page(title: str, runs: Sequence[SweepRun]) -> str:
    """The page: plots over the first swept key, a line for each combination of the others, with a band from the least
    to the most of any seed; and the table."""
    groups = groups_of(runs)
    measures, rows = _compared(groups)
    ended = sum(group.ended for group in groups)
    notes = [f"{ended:,} of {len(runs):,} runs have ended. Figures are means over seeds, ± their standard deviation."]
    over = next(iter(groups[0].labels), "")
    places = list(dict.fromkeys(next(iter(each.labels.values()), "") for each in groups))
    plots: list[Section] = []
    for measure in measures:
        steps: dict[str, list[Step]] = {}
        for group in () if measure.name in _NOT_PLOTTED else groups:
            if (found := group.measured.get(measure.name)) is not None:
                first, *others = group.labels.values() or ("",)
                place = 1 + places.index(first)
                steps.setdefault(", ".join(others), []).append(Step(place, place, found.mean, (found.low, found.high)))
        lines = [
            Line(name, tone, own) for tone, (name, own) in zip(itertools.cycle(_TONES), steps.items(), strict=False)
        ]
        plots += figure(measure.name, lines, unit=measure.unit, over=over, labels=places)
    table = [[*groups[0].labels, "runs", *(each.name for each in measures)], *rows]
    return page_of(title, [Section("Answer", notes), *plots, Section("Figures", table=table)])
