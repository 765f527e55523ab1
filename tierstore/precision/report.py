"""What a search chose and what it costs: text, JSON, and a page with the loss over the bytes saved."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..system.sizes import format_size
from ..system.terminal import columns_of
from ..train.page import Line, Step, figure, filled
from .held_out import ROWS
from .search import Found, Unit, size_of


def text_of(units: Sequence[Unit], found: Found) -> str:
    """A line for each table and layer."""
    rows = [["", "type", "before", "after", "alone changes the loss by, up or down"]]
    for unit in units:
        dtype = found.choice.get(unit.name, unit.own)
        sizes = (format_size(unit.size_bytes[each]) for each in (unit.own, dtype))
        rows.append([unit.name, dtype, *sizes, _percent(found.alone[unit.name][dtype])])
    return "\n".join(columns_of(rows, is_last_text=False))


def json_of(asked: Mapping[str, Any], units: Sequence[Unit], found: Found) -> str:
    """Everything that was asked and measured; the same for the same search."""
    told = {"asked": asked, "units": [each._asdict() for each in units], **found._asdict()}
    return json.dumps(told | {"steps": [each._asdict() for each in found.steps]}, indent=1) + "\n"


def summary_of(units: Sequence[Unit], found: Found, bound: float, num_rows: int) -> list[str]:
    """Bytes of rows and of dense weights, losses, and what was undone."""
    rows = [unit for unit in units if unit.name.startswith(ROWS)]
    parts = {"rows": rows, "dense weights": [unit for unit in units if unit not in rows]}
    sizes = [f"{name} {' to '.join(format_size(size_of(own, each)) for each in ({}, found.choice))}"
             for name, own in parts.items()]  # fmt: skip
    on = {"search": f"{num_rows - num_rows // 2:,} rows searched on", "check": f"{num_rows // 2:,} others"}
    losses = [f"{_percent(found.added[each])} of {found.first[each]:.6f} on {on[each]}" for each in found.first]
    undone = sum(each.became == "undone" for each in found.steps)
    last = f"The last {undone} steps broke the bound on the others, and were undone."
    told = [f"{', '.join(sizes)}.", f"log loss {', '.join(losses)}; the bound is {_percent(bound)}."]
    return [*told, last] if undone else told


def page_of(units: Sequence[Unit], found: Found, bound: float, summary: Sequence[str]) -> str:
    """The loss over the bytes saved, and all steps in their order."""
    whole, done, saved = size_of(units, {}), 0, []
    for each in found.steps:
        now = (whole - each.size_bytes) // 1024
        if each.became != "refused" and now > done:
            saved.append(Step(done + 1, now, 100 * each.added))
            done = now
    limit = [Step(1, done, 100 * bound)] if saved else []
    lines = [Line("rows searched on", "c1", saved), Line("bound", "c2 dashed", limit)]
    plots = figure("Log loss added over bytes saved", lines, unit="% of the log loss", over="saved kibibyte")
    steps = [
        [f"{i}. {each.unit}: {each.dtype}", format_size(each.size_bytes), _percent(each.added), each.became]
        for i, each in enumerate(found.steps, 1)
    ]
    return filled("tierstore quantize", summary, [["", "bytes then", "log loss added", ""], *steps], plots)


def _percent(share: float) -> str:
    return f"{100 * share:+.4f} %"
