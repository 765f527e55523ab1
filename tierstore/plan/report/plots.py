"""The plots of the page."""

import html
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np

from ...system.sizes import format_size
from ..curves import MissRatioCurve
from ..prediction import in_words
from ..result import Alternative, Grid, Line, Marginal, PlanResult, ShownCurve
from .figure import (
    DASHES,
    TONES,
    Plot,
    Table,
    axis,
    bars,
    byte_ticks,
    drawn,
    label,
    log_axis,
    plan_mark,
    ticks_at,
    time_ticks,
)
from .tables import NEGLIGIBLE, RULE, gains_table, load_lines, loads_table, price_table, tiers_table
from .words import count, duration, money, named, named_words, quantity, resource, sentence, share, summary_of, watts

_POINTS: Final = 160
_ROWS: Final = 12
_MAX_CURVES: Final = 40
"""In one plot; a workload may have thousands of tables."""
_BARS: Final = 12
_TICKS: Final = 6
_HEADROOM: Final = 1.2
_FAINT: Final = 0.02
"""Of a step: resources that nowhere take more are left out of the roofline's lines."""
_TIERS: Final = {"hbm": ("HBM", "--c5"), "ddr": ("DDR", "--c3")}


def plots_of(result: PlanResult) -> dict[str, list[Plot]]:
    """By heading."""
    first, *others = result.lines or (None,)
    return {
        "How often memory has the row": _curve_plots(result),
        "What a step takes": [*([_roofline(first)] if first is not None else []), _loads(result), _tiers(result)],
        "What would change it": [
            *([_gains(result)] if result.gains else []),
            *([_grid(result.grid)] if result.grid is not None else []),
            *(_line(index, line) for index, line in enumerate(others) if line is not None),
        ],
        "What else there is": [
            *([_alternatives(result)] if result.alternatives else []),
            _price(result),
        ],
    }


# Curves


def thinned(curve: MissRatioCurve, points: int) -> tuple[list[float], list[float]]:
    """Some of a curve's own sizes, spread over the logarithm, first and last among them; and their miss ratios."""
    wanted = np.geomspace(curve.sizes[0], curve.sizes[-1], points)
    chosen = np.unique(np.searchsorted(curve.sizes, wanted).clip(0, len(curve.sizes) - 1))
    return curve.sizes[chosen].astype(float).tolist(), curve.miss_ratios[chosen].tolist()


def _curve_plots(result: PlanResult) -> list[Plot]:
    """That of the plan; by table and by time where they were made."""
    setup = result.prediction.setup
    budget = setup.hosts * (setup.ddr_bytes + setup.hbm_bytes * len(setup.host.accelerators))
    size = f" ({format_size(budget)})" if sum(each.group == "pool" for each in result.curves) == 1 else ""
    kinds: dict[str, tuple[tuple[str, ...], Callable[[Sequence[ShownCurve]], str], str]] = {
        "curves": (
            ("pool", "policy"),
            partial(_title_of_plan, size),
            "Dots are the sizes of this plan. Each row counts once a batch, as the tiers count it.",
        ),
        "tables": (("table",), _title_of_tables, "Each table with a cache of its own."),
        "windows": (
            ("window",),
            _title_of_windows,
            "Parts of the trace, the first at the top of the list; the cache stays warm from one to the next.",
        ),
    }
    found = []
    for name, (groups, title, note) in kinds.items():
        own = [each for each in result.curves if each.group in groups]
        if own:
            found.append(Plot(name, title(own), note, _curves(own[:_MAX_CURVES]), _curve_table(own), name != "curves"))
    return found


def _title_of_plan(size: str, curves: Sequence[ShownCurve]) -> str:
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


def _curves(curves: Sequence[ShownCurve]) -> dict[str, Any]:
    lines, dots = [], []
    for index, each in enumerate(curves):
        sizes, ratios = thinned(each.curve, _POINTS)
        name, dash = label(each.name), DASHES[index // len(TONES) % len(DASHES)]
        hover = "%{x:,.4s} rows: %{y:.2f} % missed<extra>" + name + "</extra>"
        style = {"color": TONES[index % len(TONES)], "dash": dash, "width": 2.2}
        lines.append(drawn(sizes, [100 * ratio for ratio in ratios], hover, name=name, line=style))
        rows = each.chosen_rows
        if rows is not None and rows >= 1 and each.group == "pool":
            dots.append(plan_mark(rows, 100 * each.curve.miss_ratio(rows), is_left=rows**2 > each.curve.num_rows))
    layout = {
        "xaxis": axis("rows in memory", type="log", tickformat="~s", dtick=1),
        "yaxis": axis("accesses that miss, %", range=[0, 101]),
        "showlegend": len(curves) > 1,
    }
    return {"data": lines + dots, "layout": layout}


def _curve_table(curves: Sequence[ShownCurve]) -> Table:
    """A few sizes of each."""
    rows = [
        (named(each.name), count(size), share(ratio, 2))
        for each in curves
        for size, ratio in zip(*thinned(each.curve, _ROWS), strict=True)
    ]
    return Table(("curve", "rows in memory", "missed"), rows)


# A step


def _tiers(result: PlanResult) -> Plot:
    """Which share of a step's rows each tier serves."""
    tiers = result.prediction.tiers
    whole = tiers[0].lookups or 1.0
    parts = [(*_TIERS[tier.tier], tier.lookups * tier.hit_rate / whole) for tier in tiers if tier.tier in _TIERS]
    left = 1 - sum(part for _, _, part in parts)
    cached = next((tier.hit_rate for tier in tiers if tier.tier == "ssd"), 0.0)
    if any(tier.tier == "ssd" for tier in tiers):
        parts += [("page cache", "--c6", left * cached), ("SSD", "--c1", left * (1 - cached))]
    data = [bars("", [""], [100 * part], [f"{100 * part:.3g} %"], tone)["data"][0] for _, tone, part in parts]
    data = [bar | {"name": name, "hovertemplate": f"{name}: %{{text}}", "textposition": "none"}
            for bar, (name, _, _) in zip(data, parts, strict=True)]  # fmt: skip
    most, last = max(parts, key=lambda part: part[2]), parts[-1]
    title = f"{most[0]} serves {share(most[2])} of a batch's rows"
    title += f"; {share(last[2], 2)} are read from SSD" if last[0] == "SSD" and last is not most else ""
    layout = {
        "barmode": "stack",
        "xaxis": axis("rows of a batch, %", range=[0, 100]),
        "yaxis": {"type": "category", "showticklabels": False},
        "legend": {"traceorder": "normal"},
        "height": 170,
    }
    note = "Each row counts once a batch."
    return Plot("tiers", title, note, {"data": data, "layout": layout}, tiers_table(result))


def _loads(result: PlanResult) -> Plot:
    """How long a step takes each resource, one bar a lane."""
    lines = load_lines(result)
    step = "step" if result.prediction.setup.workload.is_training else "query"
    lanes = [line for line in lines if not line.is_part]
    title = f"Nothing takes time in a {step}"
    if lanes:
        own = next(line for line in lines if line.is_bottleneck)
        title = f"{sentence(own.text)}: {duration(own.seconds)} of a {step} of {duration(result.prediction.step_s)}"
    names: list[str] = []
    data = []
    for index, line in enumerate(lines):
        has_parts = index + 1 < len(lines) and lines[index + 1].is_part and not line.is_part
        names = names if line.is_part else [*names, line.text]
        if not has_parts:
            tone = "--mark" if line.is_bottleneck else "--rest"
            bar = bars("", [names[-1]], [1e3 * line.seconds], [duration(line.seconds)], tone)["data"][0]
            bar["marker"]["line"] = {"color": "--panel", "width": 1}
            data.append(bar | {"name": line.text, "hovertemplate": f"{line.text}: %{{text}}", "textposition": "none"})
    layout = {
        "barmode": "stack",
        "xaxis": axis(f"milliseconds a {step}"),
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names[::-1]},
        "showlegend": False,
        "height": 90 + 34 * max(1, len(names)),
    }
    note = f"{RULE} It is red."
    return Plot("loads", title, note, {"data": data, "layout": layout}, loads_table(result))


def _roofline(line: Line) -> Plot:
    """The step's time over DDR: the roof is the resource that takes longest."""
    names = [
        name
        for name, values in line.bounds.items()
        if any(value > _FAINT * step for value, step in zip(values, line.step_s, strict=True))
    ]
    hover = "%{y:.3s}s<extra>"
    data = [
        drawn(
            line.values, [value or None for value in line.bounds[name]], f"{hover}{label(in_words(name))}</extra>",
            name=label(in_words(name)),
            line={"color": TONES[index % len(TONES)], "dash": DASHES[1 + index % (len(DASHES) - 1)], "width": 1.6},
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    style = {"color": "--ink", "width": 3.5}
    data += [drawn(line.values, line.step_s, f"{hover}step</extra>", name="step", line=style), _mark(line, line.step_s)]
    seconds = [value for name in names for value in line.bounds[name]] + list(line.step_s)
    layout = {
        "xaxis": log_axis("DDR for rows, of a host", line.values, byte_ticks),
        "yaxis": log_axis("seconds", [max(value, max(line.step_s) / 1e4) for value in seconds], time_ticks),
        "height": 420,
    }
    columns = zip(line.values, line.step_s, *line.bounds.values(), strict=True)
    rows = [(format_size(value), *map(duration, each)) for value, *each in columns]
    table = Table(("DDR for rows", "step", *map(in_words, line.bounds)), rows)
    note = (
        "Both axes are logarithmic. A step takes as long as the highest of the thin lines; those that never take "
        "a fiftieth of it are in the table only."
    )
    return Plot("roofline", _roofline_title(line), note, {"data": data, "layout": layout}, table)


def _roofline_title(line: Line) -> str:
    """Which resource bounds the step, from which size on."""
    highest = [max(line.bounds, key=lambda name: line.bounds[name][index]) for index in range(len(line.values))]
    runs = [(name, next(iter(group))[0]) for name, group in groupby(enumerate(highest), key=lambda pair: pair[1])]
    first, *later = runs
    if not later:
        return f"Bound by {in_words(first[0])}, whatever the memory"
    turns = "; ".join(f"from {format_size(line.values[index])} on by {in_words(name)}" for name, index in later[:3])
    return f"With little memory bound by {in_words(first[0])}; {turns}"


def _mark(line: Line, heights: Sequence[float]) -> dict[str, Any]:
    nearest = min(range(len(line.values)), key=lambda index: abs(line.values[index] - line.chosen))
    return plan_mark(line.values[nearest], heights[nearest])


# Changes


def _line(index: int, line: Line) -> Plot:
    """Samples a second over one quantity."""
    hover = "%{x:,.4s}: %{y:,.4s} samples/s<extra></extra>"
    curve = drawn(
        line.values, line.samples_per_s, hover, mode="lines+markers", line={"color": TONES[0], "width": 2.2},
        marker={"size": 5},
    )  # fmt: skip
    low, high = min(line.samples_per_s), max(line.samples_per_s)
    quantity_of_axis = f"{line.quantity}, {line.unit}" if line.unit and line.unit != "bytes" else line.quantity
    xaxis = log_axis(quantity_of_axis, line.values) if min(line.values) > 0 else axis(quantity_of_axis)
    layout = {
        "xaxis": xaxis | ticks_at(line.values, line.unit),
        "yaxis": axis("samples/s", range=[0, _HEADROOM * high], tickformat="~s"),
        "showlegend": False,
        "height": 300,
    }
    title = f"{line.quantity}: from {count(low)} to {count(high)} samples/s"
    if high - low <= NEGLIGIBLE * high:
        title = f"{line.quantity}: no difference to {count(high)} samples/s"
    rows = [
        (quantity(value, line.unit), duration(step), count(samples))
        for value, step, samples in zip(line.values, line.step_s, line.samples_per_s, strict=True)
    ]
    figure = {"data": [curve, _mark(line, line.samples_per_s)], "layout": layout}
    table = Table((line.quantity, "step", "samples/s"), rows)
    return Plot(f"line{index}", sentence(title), "All else stays as it is.", figure, table)


def _gains(result: PlanResult) -> Plot:
    """What a little more of each resource brings, the most first."""
    whole = result.prediction.samples_per_s
    best: dict[str, float] = {}
    for gain in result.gains:
        best[gain.resource] = max(gain.samples_per_s, best.get(gain.resource, gain.samples_per_s))
    useful = [name for name in best if best[name] > NEGLIGIBLE * whole] or list(best)
    names = sorted(useful, key=lambda name: best[name])[-_BARS:]
    data = []
    for index, change in enumerate(dict.fromkeys(gain.change for gain in result.gains if gain.resource in names)):
        found = {gain.resource: gain.samples_per_s for gain in result.gains if gain.change == change}
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": change,
                "y": [label(resource(name)) for name in names],
                "x": [100 * found[name] / whole if name in found else None for name in names],
                "marker": {"color": TONES[index % len(TONES)], "pattern": {"shape": "" if index % 2 == 0 else "/"}},
                "hovertemplate": "%{y} " + change + ": %{x:+.3g} % samples/s<extra></extra>",
            }
        )
    layout = {
        "barmode": "group",
        "xaxis": axis("more samples/s, %", rangemode="tozero"),
        "yaxis": {"type": "category"},
        "showlegend": len(data) > 1,
        "height": 90 + (24 + 10 * len(data)) * len(names),
    }
    ranked = sorted(result.gains, key=lambda gain: -gain.samples_per_s)
    note = "One resource grows, all else stays: where several bound the step together, one alone brings little."
    figure = {"data": data, "layout": layout}
    return Plot("gains", _gains_title(best, ranked[0], whole), note, figure, gains_table(result, ranked))


def _gains_title(best: dict[str, float], first: Marginal, whole: float) -> str:
    if first.samples_per_s <= NEGLIGIBLE * whole:
        return "No single resource brings more alone"
    useless = [name for name, gain in best.items() if gain <= NEGLIGIBLE * whole]
    nothing = f"; more {' or '.join(map(resource, useless[:3]))} brings nothing" if useless else ""
    more = share(first.samples_per_s / whole)
    return f"{first.change} of {resource(first.resource)} brings {more} more samples/s{nothing}"


def _grid(grid: Grid) -> Plot:
    """Samples a second over DDR and reads of the drives."""
    columns = [format_size(value) for value in grid.ddr_bytes]
    rows = [f"{count(value)}/s" for value in grid.reads_per_s]
    column, row = (
        min(range(len(values)), key=lambda index: abs(math.log(max(values[index], 1) / max(chosen, 1))))
        for values, chosen in ((grid.ddr_bytes, grid.chosen_ddr_bytes), (grid.reads_per_s, grid.chosen_reads_per_s))
    )
    heat = {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": [list(values) for values in grid.samples_per_s],
        "colorscale": "Cividis",
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"title": {"text": "samples/s", "side": "right"}, "thickness": 12, "tickformat": "~s"},
        "hovertemplate": "DDR %{x}, reads %{y}: %{z:,.4s} samples/s<extra></extra>",
    }
    ring = {"symbol": "circle-open", "size": 18, "color": "#d55e00", "line": {"width": 4}}
    hover = "this plan<extra></extra>"
    mark = drawn([columns[column]], [rows[row]], hover, mode="markers", marker=ring, showlegend=False)
    layout = {
        "xaxis": axis("DDR for rows, of a host", type="category", tickvals=columns[column % 2 :: 2], tickangle=0),
        "yaxis": axis("reads/s of its drives", type="category"),
        "height": 380,
    }
    cells = [(name, *map(count, values)) for name, values in zip(rows, grid.samples_per_s, strict=True)]
    table = Table(("reads/s", *columns), cells)
    note = "Samples/s of all hosts, bright is fast; the ring is this plan."
    return Plot("grid", _grid_title(grid, column, row), note, {"data": [heat, mark], "layout": layout}, table)


def _grid_title(grid: Grid, column: int, row: int) -> str:
    """Which of the two to double."""
    here = grid.samples_per_s[row][column]
    memory = grid.samples_per_s[row][min(column + 1, len(grid.ddr_bytes) - 1)]
    drives = grid.samples_per_s[min(row + 1, len(grid.reads_per_s) - 1)][column]
    if max(memory, drives) <= here * 1.001:
        return "Neither the next size of memory nor faster drives would speed it up"
    better, other = ("memory", "drives") if memory >= drives else ("drives", "memory")
    gain, less = max(memory, drives) / here - 1, min(memory, drives) / here - 1
    return f"The next step of {better} brings {share(gain)} more samples/s, that of {other} {share(less)}"


# Choices


def _alternatives(result: PlanResult) -> Plot:
    """Setups by price and speed."""
    chosen = result.prediction
    known = [(each, each.prediction) for each in result.alternatives if each.prediction is not None]
    hover = "%{text}<br>$%{x:,.0f}, %{y:,.4s} samples/s<extra></extra>"
    data = []
    for reaches, name, symbol, tone in ((True, "reach it", "circle", TONES[0]), (False, "fail", "x", TONES[4])):
        points = [(each, found) for each, found in known if bool(each.reason) != reaches]
        data.append(
            drawn(
                [found.price.usd for _, found in points], [found.samples_per_s for _, found in points], hover,
                mode="markers", name=name, text=[html.escape(summary_of(each.setup)) for each, _ in points],
                marker={"symbol": symbol, "color": tone, "size": 9},
            )
        )  # fmt: skip
    data.append(plan_mark(chosen.price.usd, chosen.samples_per_s))
    layout = {
        "xaxis": axis("US dollars to buy", type="log", tickformat="~s", nticks=_TICKS),
        "yaxis": axis("samples/s", type="log", tickformat="~s", dtick="D2"),
        "height": 360,
    }
    title = f"The best of {result.num_setups:,} setups, beside the next ones and the nearest of those that fail"
    own = Alternative(chosen.setup, chosen, "this plan")
    rows = [_alternative_row(each) for each in (own, *result.alternatives)]
    table = Table(("setup", "samples", "USD", "bound by", "verdict"), rows)
    note = "Prices are of all hosts; each setup has the fewest hosts that do."
    return Plot("setups", title, note, {"data": data, "layout": layout}, table, is_open=True)


def _alternative_row(each: Alternative) -> tuple[str, ...]:
    found = each.prediction
    known = ("-", "-", "-")
    if found is not None:
        known = (f"{count(found.samples_per_s)}/s", money(found.price.usd), in_words(found.bottleneck))
    return summary_of(each.setup), *known, named_words(each.reason) or "reaches it"


def _price(result: PlanResult) -> Plot:
    """What the money goes for."""
    parts = sorted((part for part in result.price_parts if part.usd or part.watts), key=lambda part: part.usd)
    price, pricing = result.prediction.price, result.asked.pricing
    title = f"{money(price.usd)} to buy, {money(price.usd_a_month)} a month with power"
    if parts and price.usd:
        title += f"; {share(parts[-1].usd / price.usd, 0)} of the price is {parts[-1].name}"
    note = (
        f"Over {pricing.years:g} years, {pricing.hours_a_day:g} hours a day at {watts(price.watts)}, a kWh at "
        f"${pricing.usd_per_kwh:g}, power of the building {pricing.pue:g} times that of the machines."
    )
    usd = [part.usd for part in parts]
    figure = bars("US dollars", [label(part.name) for part in parts], usd, map(money, usd), TONES[2])
    return Plot("price", title, note, figure, price_table(result))
