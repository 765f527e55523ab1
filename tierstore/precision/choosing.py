"""A store for serving made of a run: its types are searched, checked on other rows, written and described."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from ..offline.quantization import quantize
from ..serve.models.dense import lowered
from ..store.manifest import MANIFEST_NAME
from ..store.target import require_outside
from ..system.output import require_parent
from ..system.sizes import format_size
from ..system.terminal import columns_of
from .held_out import LAYER, ROWS, HeldOut
from .search import Choice, Found, Part, Unit, search, size_of

MAX_ROWS: Final = 32_768
"""Of the held-out rows, by default: with 26 tables of 16 columns they take 270 MB."""


class QuantizedRun(NamedTuple):
    """What was made. ``summary``: in words; ``measured``: how many choices were."""

    version: int
    units: list[Unit]
    found: Found
    summary: list[str]
    measured: int


def quantize_run(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    loss: float,
    data: str = "",
    max_rows: int = MAX_ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizedRun:
    """Make a store of a run's last commit, its tables and large layers in fewer bits, whose log loss on held-out rows
    is at most ``1 + loss`` times the run's. The same arguments give the same store.

    Args:
        target: the new folder; must not exist, or be empty. It has ``quantize.json``, too.
        data, max_rows: held-out rows, as of ``HeldOut``.
        progress: called as ``progress(done, total)`` of choices measured; the total is a guess.

    Raises:
        ValueError: ``loss`` is no bound; or as of ``HeldOut`` and ``quantize``, whose other errors these are, too.
    """
    source, new = Path(directory).absolute(), Path(target).absolute()
    if not 0 <= loss < 1 or max_rows < 2:
        raise ValueError(f"loss={loss}, max_rows={max_rows}: expected a share from 0 to below 1, and at least 2 rows")
    require_outside(new, source)
    require_parent(new)
    if new.is_file() or (new / MANIFEST_NAME).exists():
        raise FileExistsError(f"{new} is there already; choose another folder")
    held = HeldOut(source, data, max_rows)
    total = 3 + 2 * sum(len(unit.size_bytes) - 1 for unit in held.units)
    known: dict[tuple[Part, frozenset[tuple[str, str]]], float] = {}

    def measure(choice: Choice, part: Part) -> float:
        if progress is not None:
            progress(min(len(known), total), total)
        key = part, frozenset(choice.items())
        if key not in known:
            known[key] = held.measure(choice, part)
        return known[key]

    found = search(held.units, loss, measure)
    layers = {name.removeprefix(LAYER): each for name, each in found.choice.items() if name.startswith(LAYER)}

    def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return lowered({name: each for name, each in tensors.items() if name.startswith("model.")}, layers)

    dtypes: Any = {name.removeprefix(ROWS): each for name, each in found.choice.items() if name.startswith(ROWS)}
    fields: dict[str, Any] = {"asked": {"loss": loss, "rows": len(held)}, **found._asdict()}
    fields |= {"units": [each._asdict() for each in held.units], "steps": [each._asdict() for each in found.steps]}
    files = {"quantize.json": json.dumps(fields, indent=1) + "\n"}
    quantize(source, new, dtype=dtypes, version=held.version, tensors=kept, files=files)
    return QuantizedRun(held.version, held.units, found, summary_of(held.units, found, loss, len(held)), len(known))


def text_of(units: Sequence[Unit], found: Found) -> str:
    """A line for each table and layer."""
    rows = [["", "type", "before", "after", "alone changes the loss by, up or down"]]
    for unit in units:
        dtype = found.choice.get(unit.name, unit.own)
        sizes = (format_size(unit.size_bytes[each]) for each in (unit.own, dtype))
        rows.append([unit.name, dtype, *sizes, _percent(found.alone[unit.name][dtype])])
    return "\n".join(columns_of(rows, is_last_text=False))


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
    lines = [f"{', '.join(sizes)}.", f"log loss {', '.join(losses)}; the bound is {_percent(bound)}."]
    return [*lines, last] if undone else lines


def _percent(share: float) -> str:
    return f"{100 * share:+.4f} %"
