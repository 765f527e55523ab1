"""What a plot of the page is made of: plotly's figure as plain data, and the table behind it.

Colours are names of the page's variables (``--c1``), which the page puts in, so that a plot follows light and dark.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from ...system.sizes import format_size
from .words import duration, named, quantity

TONES: Final = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7")
"""Told apart by people who do not see all colours (M. Okabe, K. Ito, Color Universal Design, 2008)."""
DASHES: Final = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MAX_TICKS: Final = 6
Figure = dict[str, Any]
Ticks = Callable[[float, float], tuple[list[float], list[str]]]


class Table(NamedTuple):
    """Text, as people read it; not escaped yet."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


class Plot(NamedTuple):
    """Attributes:
    name: for the page's own use, a word.
    title: a sentence that says what to see.
    note: how to read it.
    figure: ``data`` and ``layout``, JSON-able.
    folded: shown on demand.
    is_open: the table is shown without being asked for.
    """

    name: str
    title: str
    note: str
    figure: Figure
    table: Table
    folded: bool = False
    is_open: bool = False


def label(text: str) -> str:
    """A name from a file, in a plot: plotly takes tags for markup."""
    return html.escape(named(text))


def drawn(x: Iterable[Any], y: Iterable[Any], hover: str, *, mode: str = "lines", **more: Any) -> Figure:
    """Values as a line or dots; ``hover``: plotly's template of what pointing at one tells."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "hovertemplate": hover} | more


def plan_mark(x: float, y: float, *, is_left: bool = False) -> Figure:
    """Where the plan is."""
    return drawn(
        [x], [y], "this plan<extra></extra>", mode="markers+text", text=["this plan"], cliponaxis=False,
        textposition="top left" if is_left else "top center", showlegend=False,
        marker={"color": "--mark", "size": 12, "line": {"color": "--panel", "width": 2}},
    )  # fmt: skip


def bars(title: str, names: Sequence[str], values: Iterable[float], texts: Iterable[str], tones: Any) -> Figure:
    """A bar to the right for each name, the last at the top; ``title``: of the values' axis."""
    bar: Figure = {"type": "bar", "orientation": "h", "y": list(names), "x": list(values), "text": list(texts)}
    bar |= {"marker": {"color": tones}, "hovertemplate": "%{y}: %{text}<extra></extra>"}
    layout = {"xaxis": axis(title), "yaxis": {"type": "category"}, "height": 90 + 34 * max(1, len(names))}
    return {"data": [bar], "layout": layout}


def axis(title: str, **more: Any) -> Figure:
    return {"title": {"text": title}} | more


def log_axis(title: str, values: Sequence[float], ticks: Ticks | None = None) -> Figure:
    """A logarithmic axis around the values; ``ticks`` gives places and texts."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    if not positive:
        return axis(title, type="log")
    low, high = min(positive), max(positive)
    pad = max(0.04 * math.log10(high / low), 0.05)
    found = axis(title, type="log", range=[math.log10(low) - pad, math.log10(high) + pad])
    if ticks is not None:
        found["tickvals"], found["ticktext"] = ticks(low / 10**pad, high * 10**pad)
    return found


def byte_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """At powers of two."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / _MAX_TICKS))
    places = [2.0**power for power in range(first, last + 1, step)]
    return places, [format_size(place).replace(".0 ", " ") for place in places]


def time_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """At powers of ten, with 2 and 5 between where there is room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= _MAX_TICKS // 3 else (1,)
    places = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    kept = [place for place in places if low <= place <= high] or [low, high]
    return kept, [duration(place) for place in kept]


def ticks_at(values: Sequence[float], unit: str) -> Figure:
    """An axis's ticks at some of the values, the middle one among them."""
    step = max(1, math.ceil(len(values) / _MAX_TICKS))
    shown = values[len(values) // 2 % step :: step]
    return {"tickvals": list(shown), "ticktext": [quantity(value, unit if unit == "bytes" else "") for value in shown]}
