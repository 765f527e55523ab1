"""Plots of miss-ratio curves."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from ...system.sizes import format_size
from ..curves import MissRatioCurve
from ..result import PlanResult, ShownCurve
from .figure import DASHES, MARK, TONES, Plot, Table, axis, label
from .words import count, named, share

__all__ = ["curve_plots", "thinned"]

_POINTS: Final = 160
_ROWS: Final = 12
_MAX_CURVES: Final = 40
"""In one plot; a workload may have thousands of tables."""


def thinned(curve: MissRatioCurve, points: int) -> tuple[list[float], list[float]]:
    """Some of a curve's own sizes, spread over the logarithm, first and last among them; and their miss ratios."""
    wanted = np.geomspace(curve.sizes[0], curve.sizes[-1], points)
    chosen = np.unique(np.searchsorted(curve.sizes, wanted).clip(0, len(curve.sizes) - 1))
    return curve.sizes[chosen].astype(float).tolist(), curve.miss_ratios[chosen].tolist()


def curve_plots(result: PlanResult) -> list[Plot]:
    """That of the plan; by table and by time where they were made."""
    groups = {
        "curves": [each for each in result.curves if each.group in ("pool", "policy")],
        "tables": [each for each in result.curves if each.group == "table"],
        "windows": [each for each in result.curves if each.group == "window"],
    }
    setup = result.prediction.setup
    budget = setup.hosts * (setup.ddr_bytes + setup.hbm_bytes * len(setup.host.accelerators))
    size = f" ({format_size(budget)})" if sum(each.group == "pool" for each in result.curves) == 1 else ""
    titles: dict[str, Callable[[Sequence[ShownCurve]], str]] = {
        "curves": partial(_title, size),
        "tables": _title_of_tables,
        "windows": _title_of_windows,
    }
    notes = {
        "curves": "Dots are the sizes of this plan. Each row counts once a batch, as the tiers count it.",
        "tables": "Each table with a cache of its own.",
        "windows": "Parts of the trace, the first at the top of the list; the cache stays warm from one to the next.",
    }
    return [
        Plot(name, titles[name](curves), notes[name], _figure(curves[:_MAX_CURVES]), _table(curves), name != "curves")
        for name, curves in groups.items()
        if curves
    ]


def _title(size: str, curves: Sequence[ShownCurve]) -> str:
    main = curves[0]
    if main.chosen_rows is None or main.chosen_rows < 1:
        return f"How often rows are missed, by how many {main.curve.policy} keeps"
    now, doubled = (main.curve.miss_ratio(factor * main.chosen_rows) for factor in (1, 2))
    return (
        f"Memory for {count(main.chosen_rows)} rows{size} misses {share(now)} of accesses; twice as much would miss "
        f"{share(doubled)}"
    )


def _title_of_tables(curves: Sequence[ShownCurve]) -> str:
    most = max(curves, key=lambda each: each.curve.num_rows)
    tenth = most.curve.miss_ratio(most.curve.num_rows / 10)
    return (
        f"Most rows in use are of {named(most.name)}, {count(most.curve.num_rows)}; memory for a tenth of them misses "
        f"{share(tenth)} of its accesses"
    )


def _title_of_windows(curves: Sequence[ShownCurve]) -> str:
    size = next((each.chosen_rows for each in curves if each.chosen_rows), None) or curves[0].curve.num_rows / 10
    ratios = [each.curve.miss_ratio(size) for each in curves]
    return (
        f"From one part of the trace to another, {share(min(ratios))} to {share(max(ratios))} are missed at this size"
    )


def _figure(curves: Sequence[ShownCurve]) -> dict[str, Any]:
    lines, dots = [], []
    for index, each in enumerate(curves):
        sizes, ratios = thinned(each.curve, _POINTS)
        tone, dash = TONES[index % len(TONES)], DASHES[index // len(TONES) % len(DASHES)]
        name = label(each.name)
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": sizes,
                "y": [100 * ratio for ratio in ratios],
                "line": {"color": tone, "dash": dash, "width": 2.2},
                "hovertemplate": "%{x:,.4s} rows: %{y:.2f} % missed<extra>" + name + "</extra>",
            }
        )
        if each.chosen_rows is not None and each.chosen_rows >= 1 and each.group == "pool":
            dots.append(_dot(each))
    layout = {
        "xaxis": axis("rows in memory", type="log", tickformat="~s", dtick=1),
        "yaxis": axis("accesses that miss, %", range=[0, 101]),
        "showlegend": len(curves) > 1,
    }
    return {"data": lines + dots, "layout": layout}


def _dot(each: ShownCurve) -> dict[str, Any]:
    assert each.chosen_rows is not None
    miss = 100 * each.curve.miss_ratio(each.chosen_rows)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [each.chosen_rows],
        "y": [miss],
        "text": ["this plan"],
        "textposition": "top left" if each.chosen_rows**2 > each.curve.num_rows else "top right",
        "cliponaxis": False,
        "marker": {"color": MARK, "size": 12, "line": {"color": "--panel", "width": 2}},
        "showlegend": False,
        "hovertemplate": f"this plan: {count(each.chosen_rows)} rows, {miss:.2f} % missed<extra></extra>",
    }


def _table(curves: Sequence[ShownCurve]) -> Table:
    """A few sizes of each."""
    rows = [
        (named(each.name), count(size), share(ratio, 2))
        for each in curves
        for size, ratio in zip(*thinned(each.curve, _ROWS), strict=True)
    ]
    return Table(("curve", "rows in memory", "missed"), tuple(rows))
