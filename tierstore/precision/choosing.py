"""A store for serving made of a run: searched, checked, written. Measured points are lines of a file ``NEW.points``
beside the new folder until that is whole, so a killed search goes on."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from ..offline.quantization import quantize
from ..serve.models.dense import lowered
from ..store.files import require_outside
from ..store.manifest import MANIFEST_NAME
from ..system.durable import output_locked
from ..system.output import output_errors, require_parent
from .held_out import LAYER, ROWS, HeldOut
from .report import json_of, page_of, summary_of
from .search import Choice, Found, Part, Unit, search

MAX_ROWS: Final = 32_768
"""Of the held-out rows, by default: with 26 tables of 16 columns they take 270 MB."""


class QuantizedRun(NamedTuple):
    """What was made. ``summary``: in words; ``measured``: points that no earlier search had measured."""

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
    is at most ``1 + loss`` times the run's. The same arguments give the same store, also after a kill.

    Args:
        target: the new folder; must not exist, or be empty. It has ``quantize.json`` and ``quantize.html``, too.
        data, max_rows: held-out rows, as of ``HeldOut``.
        progress: called as ``progress(done, total)`` of points; the total is a guess.

    Raises:
        ValueError: ``loss`` is no bound; an earlier search for this target had other arguments, rows or another commit:
            names which; or as of ``HeldOut`` and ``quantize``, whose other errors these are, too.
    """
    source, new = Path(directory).absolute(), Path(target).absolute()
    if not 0 <= loss < 1 or max_rows < 2:
        raise ValueError(f"loss={loss}, max_rows={max_rows}: expected a share from 0 to below 1, and at least 2 rows")
    require_outside(new, source)
    require_parent(new)
    if new.is_file() or (new / MANIFEST_NAME).exists():
        raise FileExistsError(f"{new} is there already; choose another folder")
    held = HeldOut(source, data, max_rows)
    asked, path = {**held.digests, "loss": loss, "rows": len(held)}, new.with_name(new.name + ".points")
    total = 3 + 2 * sum(len(unit.size_bytes) - 1 for unit in held.units)
    with _kept_points(path, asked) as points:
        begun = len(points.known)

        def measure(choice: Choice, part: Part) -> float:
            if progress is not None:
                progress(min(len(points.known), total), total)
            key = json.dumps([part, choice], sort_keys=True)
            if key not in points.known:
                points.known[key] = held.measure(choice, part)
                os.write(points.descriptor, f"{json.dumps([key, points.known[key]])}\n".encode())
            return points.known[key]

        found = search(held.units, loss, measure)
        layers = {name.removeprefix(LAYER): each for name, each in found.choice.items() if name.startswith(LAYER)}

        def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return lowered({name: each for name, each in tensors.items() if name.startswith("model.")}, layers)

        dtypes: Any = {name.removeprefix(ROWS): each for name, each in found.choice.items() if name.startswith(ROWS)}
        summary = summary_of(held.units, found, loss, len(held))
        files = {
            "quantize.json": json_of(asked, held.units, found),
            "quantize.html": page_of(held.units, found, loss, summary),
        }
        quantize(source, new, dtype=dtypes, version=held.version, tensors=kept, files=files)
        path.unlink()
    return QuantizedRun(held.version, held.units, found, summary, len(points.known) - begun)


class _Points(NamedTuple):
    """``known``: log losses of points, which are lines of the file; more are appended to it."""

    descriptor: int
    known: dict[str, float]


@contextlib.contextmanager
def _kept_points(path: Path, asked: dict[str, Any]) -> Iterator[_Points]:
    with output_errors(path), output_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as descriptor:
        whole = path.read_bytes().rpartition(b"\n")[0]  # without a line that a kill cut off
        begun, *points = [json.loads(line) for line in whole.splitlines()] or [asked]
        for key, value in asked.items():
            if begun.get(key) != value:
                raise ValueError(
                    f"{path} is of a search with another {key}: {begun.get(key)!r}, not {value!r}; go on with that, or "
                    "delete the file"
                )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, "".join(f"{json.dumps(each)}\n" for each in (begun, *points)).encode())
        yield _Points(descriptor, dict(points))
