"""Plots of what was chosen among: memory by drives, setups by price, parts of the price, places of tables."""

import html
import math
from typing import Any

from ...system.sizes import format_size
from ..result import Alternative, Grid, Placed, PlanResult
from .figure import MARK, TONES, Plot, Table, axis, label
from .sentences import summary_of
from .words import count, duration, money, named, named_words, resource, share, watts

__all__ = ["alternatives_plot", "grid_plot", "placements_plot", "price_plot"]


def grid_plot(grid: Grid) -> Plot:
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
    mark = {
        "type": "scatter",
        "mode": "markers",
        "x": [columns[column]],
        "y": [rows[row]],
        "marker": {"symbol": "circle-open", "size": 18, "color": "#d55e00", "line": {"width": 4}},
        "showlegend": False,
        "hovertemplate": "this plan<extra></extra>",
    }
    layout = {
        "xaxis": axis("DDR for rows, of a host", type="category"),
        "yaxis": axis("reads/s of its drives", type="category"),
        "height": 380,
    }
    table = Table(
        ("reads/s", *columns),
        tuple((name, *map(count, values)) for name, values in zip(rows, grid.samples_per_s, strict=True)),
    )
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


def alternatives_plot(result: PlanResult) -> Plot:
    """Setups by price and speed."""
    chosen = result.prediction
    known = [(each, each.prediction) for each in result.alternatives if each.prediction is not None]
    data: list[dict[str, Any]] = []
    for reaches, name, symbol, tone in ((True, "reach it", "circle", TONES[0]), (False, "fail", "x", TONES[4])):
        points = [(each, found) for each, found in known if bool(each.reason) != reaches]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [found.price.usd for _, found in points],
                "y": [found.samples_per_s for _, found in points],
                "text": [html.escape(summary_of(each.setup)) for each, found in points],
                "marker": {"symbol": symbol, "color": tone, "size": 9},
                "hovertemplate": "%{text}<br>$%{x:,.0f}, %{y:,.4s} samples/s<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": [chosen.price.usd],
            "y": [chosen.samples_per_s],
            "text": ["this plan"],
            "textposition": "top center",
            "showlegend": False,
            "marker": {"color": MARK, "size": 14, "symbol": "star"},
            "hovertemplate": "this plan<extra></extra>",
        }
    )
    layout = {
        "xaxis": axis("US dollars to buy", type="log", tickformat="~s"),
        "yaxis": axis("samples/s", type="log", tickformat="~s"),
        "height": 360,
    }
    rows = tuple(map(_alternative_row, result.alternatives))
    first = (
        summary_of(chosen.setup),
        f"{count(chosen.samples_per_s)}/s",
        money(chosen.price.usd),
        resource(chosen.bottleneck),
        "this plan",
    )
    title = f"The best of {result.num_setups:,} setups, beside the next ones and the nearest of those that fail"
    table = Table(("setup", "samples", "USD", "bound by", "verdict"), (first, *rows))
    return Plot(
        "setups",
        title,
        "Prices are of all hosts; each setup has the fewest hosts that do.",
        {"data": data, "layout": layout},
        table,
        is_open=True,
    )


def _alternative_row(each: Alternative) -> tuple[str, ...]:
    found = each.prediction
    known = ("-", "-", "-")
    if found is not None:
        known = (f"{count(found.samples_per_s)}/s", money(found.price.usd), resource(found.bottleneck))
    return summary_of(each.setup), *known, named_words(each.reason) or "reaches it"


def price_plot(result: PlanResult) -> Plot:
    """What the money goes for."""
    parts = sorted((part for part in result.price_parts if part.usd or part.watts), key=lambda part: part.usd)
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [label(part.name) for part in parts],
        "x": [part.usd for part in parts],
        "text": [money(part.usd) for part in parts],
        "marker": {"color": TONES[2]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    price = result.prediction.price
    rows = [(named(part.name), f"{part.number:,}", money(part.usd), watts(part.watts)) for part in reversed(parts)]
    rows.append(("all", "", money(price.usd), watts(price.watts)))
    title = f"{money(price.usd)} to buy, {money(price.usd_a_month)} a month with power"
    if parts and price.usd:
        title += f"; {share(parts[-1].usd / price.usd, 0)} of the price is {parts[-1].name}"
    pricing = result.asked.pricing
    note = (
        f"Over {pricing.years:g} years, {pricing.hours_a_day:g} hours a day at {watts(price.watts)}, a kWh at "
        f"${pricing.usd_per_kwh:g}, power of the building {pricing.pue:g} times that of the machines."
    )
    layout = {
        "xaxis": axis("US dollars", tickformat="~s"),
        "yaxis": {"type": "category"},
        "height": 90 + 34 * len(parts),
    }
    return Plot(
        "price", title, note, {"data": [bar], "layout": layout}, Table(("part", "count", "USD", "power"), tuple(rows))
    )


def placements_plot(result: PlanResult) -> Plot:
    """Step time by where tables lie."""
    ranked = sorted(result.placements, key=lambda each: -each.step_s)
    fitting = [each for each in ranked if not each.note]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [label(each.strategy) for each in fitting],
        "x": [1e3 * each.step_s for each in fitting],
        "text": [f"{duration(each.step_s)}, {resource(each.bottleneck)}" for each in fitting],
        "marker": {"color": TONES[0]},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    rows = tuple(map(_placed_row, reversed(ranked)))
    layout = {
        "xaxis": axis("milliseconds a step"),
        "yaxis": {"type": "category"},
        "height": 90 + 34 * max(1, len(fitting)),
    }
    title = "No place holds the tables" if not fitting else f"With tables by {fitting[-1].strategy} a step is fastest"
    missing = len(ranked) - len(fitting)
    title += f"; {missing} of {len(ranked)} strategies do not fit" if missing and fitting else ""
    table = Table(("strategy", "step", "bound by", "fits"), rows)
    return Plot("placements", title, "Each with all tables placed so.", {"data": [bar], "layout": layout}, table)


def _placed_row(each: Placed) -> tuple[str, ...]:
    if each.note:
        return each.strategy, "-", "-", named_words(each.note)
    return each.strategy, duration(each.step_s), resource(each.bottleneck), "fits"
