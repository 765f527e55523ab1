"""Plots of where rows are found, of what bounds a step, and of what more would bring."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from ...system.sizes import format_size
from ..marginal import Marginal
from ..result import Line, PlanResult
from .figure import (
    DASHES,
    INK,
    MARK,
    TONES,
    Plot,
    Table,
    axis,
    byte_ticks,
    label,
    log_axis,
    sentence,
    ticks_at,
    time_ticks,
)
from .words import count, duration, money, quantity, resource, share

__all__ = ["gains_plot", "line_plots", "loads_plot", "roofline_plot", "tiers_plot"]

_BARS: Final = 12
_HEADROOM: Final = 1.2
_FAINT: Final = 0.02
"""Of a step: resources that nowhere take more are left out of the roofline's lines."""
_NEGLIGIBLE: Final = 1e-4
"""Of the samples a second: less than this is nothing."""
_TIERS: Final = {"hbm": ("HBM", "--c5"), "ddr": ("DDR", "--c3"), "remote": ("remote", "--c4")}


def tiers_plot(result: PlanResult) -> Plot:
    """Which share of a step's rows each tier serves."""
    tiers = result.prediction.tiers
    whole = tiers[0].lookups or 1.0
    parts = [(*_TIERS[tier.tier], tier.lookups * tier.hit_rate / whole) for tier in tiers if tier.tier in _TIERS]
    left = 1 - sum(part for _, _, part in parts)
    cached = next((tier.hit_rate for tier in tiers if tier.tier == "ssd"), 0.0)
    if any(tier.tier == "ssd" for tier in tiers):
        parts += [("page cache", "--c6", left * cached), ("SSD", "--c1", left * (1 - cached))]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [""],
            "x": [100 * part],
            "marker": {"color": tone},
            "hovertemplate": f"{name}: {100 * part:.3g} %<extra></extra>",
        }
        for name, tone, part in parts
    ]
    most = max(parts, key=lambda part: part[2])
    last = parts[-1]
    title = f"{most[0]} serves {share(most[2])} of a batch's rows"
    title += f"; {share(last[2], 2)} are read from SSD" if last[0] == "SSD" and last is not most else ""
    layout = {
        "barmode": "stack",
        "xaxis": axis("rows of a batch, %", range=[0, 100]),
        "yaxis": {"type": "category", "showticklabels": False},
        "legend": {"traceorder": "normal"},
        "height": 170,
    }
    rows = [
        (tier.tier, format_size(tier.capacity_bytes), count(tier.rows), count(tier.lookups), share(tier.hit_rate, 2))
        for tier in tiers
    ]
    table = Table(("tier", "capacity of a host", "rows", "lookups a step", "hit rate"), tuple(rows))
    note = "Each row counts once a batch. Of the ssd, the hit rate is the share whose page the system has in memory."
    return Plot("tiers", title, note, {"data": data, "layout": layout}, table)


def loads_plot(result: PlanResult) -> Plot:
    """How long a step keeps each resource busy."""
    prediction = result.prediction
    own = prediction.bottleneck
    busy = [load for load in prediction.loads if load.seconds]
    ranked = sorted(busy, key=lambda load: (load.seconds, load.resource == own))
    tones = ["--mark" if load.resource == own else "--rest" for load in ranked]
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [resource(load.resource) for load in ranked],
        "x": [1e3 * load.seconds for load in ranked],
        "marker": {"color": tones},
        "text": [duration(load.seconds) for load in ranked],
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    step = "step" if prediction.setup.workload.is_training else "query"
    title = f"Nothing takes time in a {step}"
    if ranked:
        first = ranked[-1]
        took = f"{duration(first.seconds)} of a {step} of {duration(prediction.step_s)}"
        title = f"{sentence(resource(first.resource))}: {took}"
    if len(ranked) > 1:
        title += f"; next {resource(ranked[-2].resource)} with {duration(ranked[-2].seconds)}"
    layout = {"xaxis": axis(f"milliseconds a {step}"), "yaxis": {"type": "category"}, "height": 90 + 34 * len(ranked)}
    rows = tuple(
        (resource(load.resource), duration(load.seconds), quantity(load.amount, load.unit)) for load in reversed(ranked)
    )
    note = "Each as if all else were infinitely fast. What runs side by side does not add up."
    return Plot("loads", title, note, {"data": [bar], "layout": layout}, Table(("resource", "time", "work"), rows))


def roofline_plot(line: Line) -> Plot:
    """The step's time over DDR: the roof is the resource that takes longest."""
    names = [
        name
        for name, values in line.bounds.items()
        if any(value > _FAINT * step for value, step in zip(values, line.step_s, strict=True))
    ]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": label(resource(name)),
            "x": list(line.values),
            "y": [value or None for value in line.bounds[name]],
            "line": {"color": TONES[index % len(TONES)], "dash": DASHES[1 + index % (len(DASHES) - 1)], "width": 1.6},
            "hovertemplate": "%{y:.3s}s<extra>" + label(resource(name)) + "</extra>",
        }
        for index, name in enumerate(names)
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "step",
            "x": list(line.values),
            "y": list(line.step_s),
            "line": {"color": INK, "width": 3.5},
            "hovertemplate": "%{y:.3s}s<extra>step</extra>",
        }
    )
    data.append(_mark(line, line.step_s))
    seconds = [value for name in names for value in line.bounds[name]] + list(line.step_s)
    top = max(line.step_s)
    layout = {
        "xaxis": log_axis("DDR for rows, of a host", line.values, byte_ticks),
        "yaxis": log_axis("seconds", [max(value, top / 1e4) for value in seconds], time_ticks),
        "height": 420,
    }
    table = Table(
        ("DDR for rows", "step", *map(resource, line.bounds)),
        tuple(
            (
                format_size(value),
                duration(line.step_s[index]),
                *(duration(each[index]) for each in line.bounds.values()),
            )
            for index, value in enumerate(line.values)
        ),
    )
    note = (
        "Both axes are logarithmic. A step cannot be faster than the highest of the thin lines; resources that never "
        "take a fiftieth of it are in the table only."
    )
    return Plot("roofline", _roofline_title(line), note, {"data": data, "layout": layout}, table)


def _roofline_title(line: Line) -> str:
    """Which resource bounds the step, from which size on."""
    highest = [max(line.bounds, key=lambda name: line.bounds[name][index]) for index in range(len(line.values))]
    runs = [(name, next(iter(group))[0]) for name, group in groupby(enumerate(highest), key=lambda pair: pair[1])]
    first, *later = runs
    if not later:
        return f"Bound by {resource(first[0])}, whatever the memory"
    turns = "; ".join(f"from {format_size(line.values[index])} on by {resource(name)}" for name, index in later[:3])
    return f"With little memory bound by {resource(first[0])}; {turns}"


def _mark(line: Line, heights: Sequence[float]) -> dict[str, Any]:
    nearest = min(range(len(line.values)), key=lambda index: abs(line.values[index] - line.chosen))
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [line.values[nearest]],
        "y": [heights[nearest]],
        "text": ["this plan"],
        "textposition": "top center",
        "cliponaxis": False,
        "showlegend": False,
        "marker": {"color": MARK, "size": 12, "line": {"color": "--panel", "width": 2}},
        "hovertemplate": "this plan<extra></extra>",
    }


def line_plots(lines: Sequence[Line]) -> list[Plot]:
    """Samples a second over one quantity after another."""
    return [_line_plot(index, line) for index, line in enumerate(lines)]


def _line_plot(index: int, line: Line) -> Plot:
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(line.values),
        "y": list(line.samples_per_s),
        "line": {"color": TONES[0], "width": 2.2},
        "marker": {"size": 5},
        "hovertemplate": "%{x:,.4s}: %{y:,.4s} samples/s<extra></extra>",
    }
    low, high = min(line.samples_per_s), max(line.samples_per_s)
    title_of_axis = f"{line.quantity}, {line.unit}" if line.unit and line.unit != "bytes" else line.quantity
    is_scale = min(line.values) > 0
    xaxis = (log_axis(title_of_axis, line.values) if is_scale else axis(title_of_axis)) | ticks_at(
        line.values, line.unit
    )
    layout = {
        "xaxis": xaxis,
        "showlegend": False,
        "yaxis": axis("samples/s", range=[0, _HEADROOM * high], tickformat="~s"),
        "height": 300,
    }
    subject = line.quantity
    title = f"{subject}: from {count(low)} to {count(high)} samples/s"
    if high - low <= _NEGLIGIBLE * high:
        title = f"{subject}: no difference to {count(high)} samples/s"
    rows = tuple(
        (quantity(value, line.unit), duration(step), count(samples))
        for value, step, samples in zip(line.values, line.step_s, line.samples_per_s, strict=True)
    )
    figure = {"data": [curve, _mark(line, line.samples_per_s)], "layout": layout}
    table = Table((line.quantity, "step", "samples/s"), rows)
    return Plot(f"line{index}", sentence(title), "All else stays as it is.", figure, table)


def gains_plot(result: PlanResult) -> Plot:
    """What a little more of each resource brings, the most first."""
    whole = result.prediction.samples_per_s
    best = {name: max(gain.samples_per_s for gain in result.gains if gain.resource == name) for name in _names(result)}
    useful = [name for name in best if best[name] > _NEGLIGIBLE * whole] or list(best)
    names = sorted(useful, key=lambda name: best[name])[-_BARS:]
    changes = list(dict.fromkeys(gain.change for gain in result.gains))
    data = []
    for index, change in enumerate(changes):
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
        "showlegend": len(changes) > 1,
        "height": 90 + (24 + 10 * len(changes)) * len(names),
    }
    ranked = sorted(result.gains, key=lambda gain: -gain.samples_per_s)
    rows = tuple(_gain_row(gain, whole) for gain in ranked)
    table = Table(("resource", "change", "more samples/s", "of now", "USD"), rows)
    note = "One resource grows, all else stays: where several bound the step together, one alone brings little."
    return Plot("gains", _gains_title(result, ranked), note, {"data": data, "layout": layout}, table)


def _names(result: PlanResult) -> list[str]:
    return list(dict.fromkeys(gain.resource for gain in result.gains))


def _gain_row(gain: Marginal, whole: float) -> tuple[str, ...]:
    usd = "-" if gain.usd is None else money(gain.usd)
    return resource(gain.resource), gain.change, count(gain.samples_per_s), share(gain.samples_per_s / whole, 2), usd


def _gains_title(result: PlanResult, ranked: Sequence[Marginal]) -> str:
    whole = result.prediction.samples_per_s
    first = ranked[0]
    if first.samples_per_s <= _NEGLIGIBLE * whole:
        return "No single resource brings more alone"
    useless = [
        name
        for name in _names(result)
        if all(gain.samples_per_s <= _NEGLIGIBLE * whole for gain in ranked if gain.resource == name)
    ]
    nothing = f"; more {' or '.join(map(resource, useless[:3]))} brings nothing" if useless else ""
    more = share(first.samples_per_s / whole)
    return f"{first.change} of {resource(first.resource)} brings {more} more samples/s{nothing}"
