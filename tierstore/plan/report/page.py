"""A plan as one page of HTML that asks nothing of a network: plotly and all figures are in it.

What comes from files is escaped where it enters: in text here, in plots by ``figure.label``.
"""

import html
import json
import math
import re
from pathlib import Path
from typing import Any, Final

from ..plan_file import to_toml
from ..result import PlanResult, finite
from .choice_plots import alternatives_plot, grid_plot, placements_plot, price_plot
from .curve_plots import curve_plots
from .figure import Plot, Table, sentence
from .load_plots import gains_plot, line_plots, loads_plot, roofline_plot, tiers_plot
from .sentences import asked, summary_of, targets, within
from .words import count, duration, money, named, resource, share, significant, watts

__all__ = ["page_of", "plotly_source", "plots_of"]

_TEMPLATE: Final = Path(__file__).with_name("page.html")
_SLOT: Final = re.compile(r"<!-- slot (\w+) -->")


def page_of(result: PlanResult) -> str:
    """The page, in UTF-8 some 5 MB.

    Raises:
        ImportError: plotly is not installed.
    """
    sections = plots_of(result)
    plots = [plot for group in sections.values() for plot in group]
    name = named(result.prediction.setup.workload.name)
    parts = {
        "title": html.escape(f"{name}: a plan"),
        "asked": _asked(result),
        "answer": _answer(result),
        "warnings": _warnings(result),
        "plots": "\n".join(_section(title, group) for title, group in sections.items() if group),
        "ends": _ends(result),
        "data": _script_data({plot.name: plot.figure for plot in plots}),
        "plotly": plotly_source(),
    }
    return _SLOT.sub(lambda found: parts[found[1]], _TEMPLATE.read_text(encoding="utf-8"))


def plots_of(result: PlanResult) -> dict[str, list[Plot]]:
    """By heading."""
    first, *others = result.lines or (None,)
    return {
        "How often memory has the row": curve_plots(result),
        "What a step takes": [
            *([roofline_plot(first)] if first is not None else []),
            loads_plot(result),
            tiers_plot(result),
        ],
        "What would change it": [
            *([gains_plot(result)] if result.gains else []),
            *([grid_plot(result.grid)] if result.grid is not None else []),
            *line_plots([line for line in others if line is not None]),
        ],
        "What else there is": [
            *([alternatives_plot(result)] if result.alternatives else []),
            *([placements_plot(result)] if result.placements else []),
            price_plot(result),
        ],
    }


def plotly_source() -> str:
    """Its JavaScript, whole.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"{error}; a page needs one more package: pip install 'tierstore[plan]'") from None
    return str(get_plotlyjs())


def _script_data(figures: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in. What is unbounded is left out of plots."""
    text = json.dumps(finite(figures), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asked(result: PlanResult) -> str:
    wanted = targets(result)
    target = f"<p><b>Target:</b> {html.escape(wanted)}</p>" if wanted else ""
    return f"<p>{html.escape(asked(result))}.</p>{target}"


def _answer(result: PlanResult) -> str:
    """The setup as a sentence, and its figures as tiles."""
    prediction = result.prediction
    latency = prediction.latency
    step = "step" if prediction.setup.workload.is_training else "query"
    tiles = [(f"{count(prediction.samples_per_s)}", "samples/s"), (duration(prediction.step_s), f"a {step}, alone")]
    if latency is not None:
        tiles = [
            (count(latency.queries_per_s), "queries/s"),
            (duration(latency.p99_s), f"99 % of queries; half {duration(latency.p50_s)}"),
        ]
    tiers = [tier for tier in prediction.tiers if tier.tier in ("hbm", "ddr")]
    missed = math.prod(1 - tier.hit_rate for tier in tiers)
    tiles += [
        (share(1 - missed, 2), "of a batch's rows in memory"),
        (sentence(resource(prediction.bottleneck)), "is the bottleneck"),
        (money(prediction.price.usd), "to buy"),
        (money(prediction.price.usd_a_month), "a month with power"),
        (watts(prediction.price.watts), "in use"),
    ]
    if prediction.drive_writes_a_day:
        tiles.append((significant(prediction.drive_writes_a_day), "writes of a whole drive a day"))
    shown = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>' for value, text in tiles
    )
    verb = "Recommended" if result.searched else "As given"
    first = f"{verb}: {summary_of(prediction.setup)}; {within(result)}."
    return f'<p class="big">{html.escape(first)}</p><div class="tiles">{shown}</div>'


def _warnings(result: PlanResult) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in result.warnings)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _section(title: str, plots: list[Plot]) -> str:
    return f'<h2>{html.escape(title)}</h2><div class="plots">{"".join(map(_panel, plots))}</div>'


def _panel(plot: Plot) -> str:
    name, title = html.escape(plot.name), html.escape(plot.title)
    height = int(plot.figure["layout"].get("height", 380))
    drawing = (
        f'<div class="plot" data-plot="{name}" role="img" aria-label="{title}" style="height:{height}px"></div>'
        f'<p class="note">{html.escape(plot.note)}</p>'
    )
    table = (
        f"<details{' open' if plot.is_open else ''}><summary>Figures as a table</summary>{_table(plot.table)}</details>"
    )
    if plot.folded:
        body = f'<details class="folded"><summary><h3>{title}</h3></summary>{drawing}{table}</details>'
    else:
        body = f"<h3>{title}</h3>{drawing}{table}"
    wide = " wide" if plot.is_open else ""
    return f'<section class="panel{wide}" id="{name}">{body}</section>'


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in table.columns)
    rows = "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(row: tuple[str, ...]) -> str:
    first, *others = map(html.escape, row)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others)


def _ends(result: PlanResult) -> str:
    """Where figures come from, what is left out, and the file that asked."""
    lists = {"Figures come from": result.assumptions, "Not modelled": result.prediction.not_modelled}
    shown = "".join(_list(title, texts) for title, texts in lists.items() if texts)
    file = html.escape(to_toml(result.asked))
    return (
        f'<div class="plots two">{shown}</div>'
        f'<details class="file"><summary>The plan file, with all defaults</summary><pre>{file}</pre></details>'
    )


def _list(title: str, texts: tuple[str, ...]) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f'<section class="panel"><h3>{title}</h3><ul>{items}</ul></section>'
