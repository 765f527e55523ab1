"""Makes a run smaller by a bound of its log loss: searches types of its tables and layers, as few bytes as the bound
lets them have, checks them on held-out rows, writes the new store.

Rows are looked up by the store in each type: it converts them as they are read, to the bits of a store in that type.
Each table's pooled rows are kept for each type, and a choice puts them together. The search is greedy, as for
multiple-choice knapsacks (Sinha and Zoltners, 1979): the type comes first that saves most bytes for the loss it adds.
Losses do not add up, so each step is measured with all before it. Measured points are lines of a file ``NEW.points``
beside the new folder until that is whole, so a killed search goes on.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from . import report
from .errors import DamagedError, TableError
from .layout import DtypeName
from .metrics import evaluate
from .models.dlrm import logits_of
from .nn.collection import TieredEmbeddingBagCollection
from .offline.quantization import quantize
from .pool.converting import layout_as
from .serve.models.dense import LOW, WEIGHTS_MIN, in_float32, low_layers, lowered
from .store import Store, open_store
from .store.directory import require_outside
from .store.manifest import MANIFEST_NAME
from .system.files import output_errors, output_locked, require_parent
from .system.sizes import format_size
from .system.terminal import columns_of
from .train.build import build_model, open_data, open_test_data
from .train.checkpoint import load_model, saved_config
from .train.config import RunConfig
from .train.readers import Batch

Choice = Mapping[str, str]
"""The type of each unit that is lowered."""
Part = Literal["search", "check"]
_CHUNK: Final = 2048
"""Rows that go through the layers at a time."""
_PARTS: Final[dict[Part, slice]] = {"search": slice(0, None, 2), "check": slice(1, None, 2)}
ROWS, LAYER, OTHERS = "rows of ", "layer ", "other weights"
"""Units, with the name of the table or layer."""
_DDR: Final = "256MiB"
Measure = Callable[[Choice, Part], float]
"""The log loss of a choice on a part of the held-out rows."""
_LEAST_LOSS: Final = 1e-9
"""Relative; less counts as this, so that among types that cost nothing the one that saves most comes first."""
MAX_ROWS: Final = 32_768
"""Of the held-out rows, by default: with 26 tables of 16 columns they take 270 MB."""


class Unit(NamedTuple):
    """A table's rows, or a layer's weights. ``size_bytes``: by type; the first is what it has, the others are fewer."""

    name: str
    size_bytes: Mapping[str, int]

    @property
    def own(self) -> str:
        return next(iter(self.size_bytes))


class HeldOut:
    """A run's last commit, and labelled rows, every second one to search on. ``units``: what can be lowered.
    ``digests`` tell runs and rows apart. Memory: 4 bytes for each row, column of a table, and type.

    ``data``: a file in the format of the run's; "": its own test rows. ValueError: the store is of no run, or in fewer
    bits already, or there are fewer than two rows. DataError, StoreNotFoundError, DamagedError.
    """

    def __init__(self, directory: Path, data: str, max_rows: int) -> None:
        with open_store(directory, mode="r", ddr=_DDR) as store:
            config, tensors, self.version = _config_of(store), store.tensors(), store.version
            self._batch = batch = _held_out(config, data, max_rows)
            self._names = names = list(config.data.sparse_columns)
            layouts = [replace(store[name].layout, state_dim=0) for name in names]
            counts = [sum(map(len, store.written_rows(store[name]))) for name in names]
            self._model = build_model(config, TieredEmbeddingBagCollection(store, tables=names)).eval()
            first = [self._look_up(store, name) for name in names]
        self._pooled: list[dict[Any, Tensor]]  # of each table, by type; its own comes first
        self._pooled = [{layout.dtype: each} for layout, each in zip(layouts, first, strict=True)]
        for dtype in get_args(DtypeName):
            with contextlib.suppress(TableError), open_store(directory, mode="r", ddr=_DDR, dtype=dtype) as store:
                if store.version != self.version:
                    raise ValueError(f"{directory} was committed to meanwhile; end its training first")
                for name, layout, own in zip(names, layouts, self._pooled, strict=True):
                    with contextlib.suppress(DamagedError):  # a row that does not fit the type
                        if layout_as(layout, dtype).row_bytes < layout.row_bytes:
                            own[dtype] = self._look_up(store, name)
        self.units = [
            Unit(ROWS + name, {each: count * layout_as(layout, each).row_bytes for each in own})
            for name, count, layout, own in zip(names, counts, layouts, self._pooled, strict=True)
        ]
        load_model(self._model, tensors)
        lower = {dtype: low for dtype, low in LOW.items() if low.is_fast()}  # else float32 is faster
        dense = list(self._model.dense_parameters().values())
        others = sum(each.nbytes for each in dense)
        linears = {name: each for name, each in self._model.named_modules() if type(each) is nn.Linear}
        self._linears: dict[str, dict[str, nn.Module]] = {}  # of each layer, by type
        for name, each in linears.items():
            if each.weight.numel() >= WEIGHTS_MIN:
                key = f"model.{name}.weight"
                stored = {dtype: lowered({key: tensors[key]}, {name: dtype}) for dtype in lower}
                sizes = {dtype: sum(part.nbytes for part in parts.values()) for dtype, parts in stored.items()}
                served = {dtype: lower[dtype](in_float32(parts)[key], each.bias) for dtype, parts in stored.items()}
                self._linears[name] = {"float32": each, **served}
                self.units.append(Unit(LAYER + name, {"float32": each.weight.nbytes, **sizes}))
                others -= each.weight.nbytes
        self.units.append(Unit(OTHERS, {"float32": others}))
        of_data = [batch.labels, batch.dense, batch.sparse.values(), batch.sparse.offsets()]
        self.digests = {"data": _digest(of_data), "run": _digest([*first, *dense])}  # pooled rows depend on the data

    def __len__(self) -> int:
        return len(self._batch)

    def _look_up(self, store: Store, name: str) -> Tensor:
        """float32 [rows, D]: pooled."""
        jagged, first = self._batch.sparse, self._names.index(name) * len(self)
        offsets = jagged.offsets()[first : first + len(self) + 1]
        return store[name].pooled(jagged.values()[offsets[0] : offsets[-1]], offsets - offsets[0])

    def logits(self, choice: Choice, part: Part) -> Tensor:
        """float32 [rows of the part]."""
        for name, each in self._linears.items():
            self._model.set_submodule(name, each[choice.get(LAYER + name, "float32")])
        own = _PARTS[part]
        of_tables = zip(self._names, self._pooled, strict=True)
        rows = [each[choice.get(ROWS + name, next(iter(each)))][own] for name, each in of_tables]
        chunks = zip(torch.split(self._batch.dense[own], _CHUNK), torch.split(torch.cat(rows, 1), _CHUNK), strict=True)
        with torch.inference_mode():
            return torch.cat([logits_of(self._model, *each) for each in chunks])

    def measure(self, choice: Choice, part: Part) -> float:
        return evaluate(self._batch.labels[_PARTS[part]].flatten(), self.logits(choice, part).flatten()).log_loss


def _config_of(store: Store) -> RunConfig:
    found = saved_config(store.extra, str(store.directory))
    if found is None:
        raise ValueError(f"{store.directory} is of no DLRM of tierstore train; quantize it with --dtype")
    low = [name for name in found.data.sparse_columns if store[name].layout.dtype != found.embedding.dtype]
    if low := [*low, *low_layers(store.tensors())]:
        raise ValueError(f"{store.directory}: {low[0]} is in fewer bits already; give the run that it is made of")
    return found


def _held_out(config: RunConfig, data: str, max_rows: int) -> Batch:
    own, first = config.data, 0
    if not data and not own.has_test:
        raise ValueError("the run has no test rows; name labelled rows that it was not trained on with --data")
    reader, hasher = open_data(replace(config, data=replace(own, path=data)) if data else config)
    if not data:
        reader, first = open_test_data(config, reader), 0 if own.test_path else own.train_rows
        max_rows = min(max_rows, own.test_rows or max_rows)
    found = next(reader.batches(hasher, batch_size=max_rows, start_row=first, log_dense=own.log_dense), None)
    if found is None or len(found) < 2:
        raise ValueError(f"{reader.path} has fewer than two rows from row {first} on")
    return found


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().contiguous().numpy().data)
    return found.hexdigest()


class Step(NamedTuple):
    """``added``: loss of this and all that was kept before, on the rows of the search, relative to that of no unit
    lowered; ``size_bytes``: of all units then."""

    unit: str
    dtype: str
    size_bytes: int
    added: float
    became: Literal["kept", "refused", "undone"]


class Found(NamedTuple):
    """``alone``: size of the change of the loss by each unit alone, by type. ``first``: log loss of no unit lowered,
    ``added`` relative to it, both by part."""

    choice: Choice
    alone: Mapping[str, Mapping[str, float]]
    steps: Sequence[Step]
    first: Mapping[Part, float]
    added: Mapping[Part, float]


def search(units: Sequence[Unit], bound: float, measure: Measure) -> Found:
    """A choice that adds at most ``bound`` on both parts; ``measure`` always gives the same. On the search's rows
    a loss that falls counts as one that rises: fewer bits help by luck, and on other rows they would not."""
    first: dict[Part, float] = {part: measure({}, part) for part in ("search", "check")}
    if not all(0 < loss < float("inf") for loss in first.values()):
        raise ValueError(f"the run's log losses are {first}, not positive numbers: no bound is relative to these")

    def added(choice: Choice, part: Part = "search") -> float:
        return measure(choice, part) / first[part] - 1

    lower = [(unit, dtype) for unit in units for dtype in unit.size_bytes if dtype != unit.own]
    alone = {unit.name: {unit.own: 0.0} for unit in units}
    for unit, dtype in lower:
        alone[unit.name][dtype] = abs(added({unit.name: dtype}))
    steps: list[Step] = []

    def gain(unit: Unit, dtype: str) -> float:
        now = _kept(steps).get(unit.name, unit.own)
        saved = unit.size_bytes[now] - unit.size_bytes[dtype]
        return saved / max(alone[unit.name][dtype] - alone[unit.name][now], _LEAST_LOSS)

    while left := [each for each in lower if gain(*each) > 0]:
        best = max(left, key=lambda each: gain(*each))
        choice = {**_kept(steps), best[0].name: best[1]}
        joint = added(choice)
        became: Any = "kept" if abs(joint) <= bound else "refused"
        steps.append(Step(best[0].name, best[1], size_of(units, choice), joint, became))
        lower.remove(best)
    while not added(_kept(steps), "check") <= bound:  # NaN breaks it, too
        last = max(index for index, step in enumerate(steps) if step.became == "kept")
        steps[last] = steps[last]._replace(became="undone")
    choice = _kept(steps)
    return Found(choice, alone, steps, first, {part: added(choice, part) for part in first})


def _kept(steps: Sequence[Step]) -> dict[str, str]:
    return {step.unit: step.dtype for step in steps if step.became == "kept"}


def size_of(units: Sequence[Unit], choice: Choice) -> int:
    """Bytes of all units."""
    return sum(each.size_bytes[choice.get(each.name, each.own)] for each in units)


class QuantizedRun(NamedTuple):
    """What was made. ``measured``: points that no earlier search had measured."""

    version: int
    units: list[Unit]
    found: Found
    summary: list[str]
    measured: int


def quantize_run(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], *, loss: float, data: str = "",
    max_rows: int = MAX_ROWS, progress: Callable[[int, int], None] | None = None,
) -> QuantizedRun:  # fmt: skip
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
    with _kept_points(path, asked) as (descriptor, known):
        begun = len(known)

        def measure(choice: Choice, part: Part) -> float:
            if progress is not None:
                progress(min(len(known), total), total)
            key = json.dumps([part, choice], sort_keys=True)
            if key not in known:
                known[key] = held.measure(choice, part)
                os.write(descriptor, f"{json.dumps([key, known[key]])}\n".encode())
            return known[key]

        found = search(held.units, loss, measure)
        layers = {name.removeprefix(LAYER): each for name, each in found.choice.items() if name.startswith(LAYER)}

        def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return lowered({name: each for name, each in tensors.items() if name.startswith("model.")}, layers)

        dtypes: Any = {name.removeprefix(ROWS): each for name, each in found.choice.items() if name.startswith(ROWS)}
        summary = summary_of(held.units, found, loss, len(held))
        told = {"asked": asked, "units": [each._asdict() for each in held.units], **found._asdict()}
        told["steps"] = [each._asdict() for each in found.steps]
        files = {
            "quantize.json": json.dumps(told, indent=1) + "\n",
            "quantize.html": page_of(held.units, found, loss, summary),
        }
        quantize(source, new, dtype=dtypes, version=held.version, tensors=kept, files=files)
        path.unlink()
    return QuantizedRun(held.version, held.units, found, summary, len(known) - begun)


@contextlib.contextmanager
def _kept_points(path: Path, asked: dict[str, Any]) -> Iterator[tuple[int, dict[str, float]]]:
    """The open file, to which lines are appended, and the log losses of the points that it has."""
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
        yield descriptor, dict(points)


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
    told = [f"{', '.join(sizes)}.", f"log loss {', '.join(losses)}; the bound is {_percent(bound)}."]
    return [*told, last] if undone else told


def page_of(units: Sequence[Unit], found: Found, bound: float, summary: Sequence[str]) -> str:
    """The loss over the bytes saved, and all steps in their order."""
    whole, done, saved = size_of(units, {}), 0, []
    for each in found.steps:
        now = (whole - each.size_bytes) // 1024
        if each.became != "refused" and now > done:
            saved.append(report.Step(done + 1, now, 100 * each.added))
            done = now
    limit = [report.Step(at, at, 100 * bound) for at in (1, done)] if saved else []
    lines = [report.Line("rows searched on", "c1", saved), report.Line("bound", "c2 dashed", limit)]
    plots = report.figure("Log loss added over bytes saved", lines, unit="% of the log loss", over="KiB saved")
    table = [["step", "bytes then", "log loss added", "became"]]
    for i, each in enumerate(found.steps, 1):
        size = format_size(each.size_bytes)
        table.append([f"{i}. {each.unit}: {each.dtype}", size, _percent(each.added), each.became])
    sections = [report.Section("Answer", summary), *plots, report.Section("Steps", table=table)]
    return report.page_of("tierstore quantize", sections)


def _percent(share: float) -> str:
    return f"{round(100 * share, 4) + 0.0:+.4f} %"  # no -0
