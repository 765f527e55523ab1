"""Tables from files into a store: which tensors become which tables is checked before a row is written."""

import difflib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ..config import MAX_KEPT_VERSIONS, Pooling, Rounding, TableConfig
from ..errors import TableError
from ..ids import DynamicIds
from ..io.files import MAX_PAGE_BYTES, rows_path
from ..kernels.arrays import Floats, Int64s
from ..layout import DtypeName, QuantizedName
from ..optim import Optimizer
from ..pool.converting import raw_weights
from ..store import Store, Table, open_store
from ..store.directory import kept_if_committed
from ..store.version import TableState
from ..system.checks import excerpt, excerpt_names
from .rows import chunks, numbered, write_keys
from .tensor_files import (
    IDS,
    SCORES,
    STATE_NAMES,
    FileTensor,
    StateTensor,
    TensorFiles,
    open_files,
    state_key,
    state_tensors,
    table_of,
)


class TableImport(NamedTuple):
    """``created``: the table is new. ``changed_rows``: that had other bits before. ``with_state``: optimizer state came
    with the weights. ``nonfinite``: values that are NaN or infinite, as stored. ``notes``: what was left out or
    missing."""

    name: str
    key: str
    created: bool
    rows: int
    changed_rows: int
    with_state: bool
    nonfinite: int
    config: TableConfig
    notes: tuple[str, ...]


class ImportReport(NamedTuple):
    """What an import did: the version that shows it, and the entries of the files that were not taken."""

    version: int
    tables: tuple[TableImport, ...]
    left_out: tuple[str, ...]


def import_files(
    directory: str | os.PathLike[str], files: Sequence[str | os.PathLike[str]], *, mapping: Mapping[str, str] | None =
    None, optimizer: Optimizer | None = None, dtype: DtypeName | None = None, pooling: Pooling | None = None, rounding:
    Rounding | None = None, ddr: int | str = "256MiB", progress: Callable[[int, int], None] | None = None,
) -> ImportReport:  # fmt: skip
    """Take tables from safetensors files or torch checkpoints into a store, and commit once all of it is there.

    The store is made if there is none, and so are tables that it does not have. Those that it has must have as many
    columns, at least as many rows, and the dtype; they keep their configuration and their other rows. A tensor named
    ``embedding_bags.TABLE.weight``, whatever stands before that, is a table; files by ``export_store`` say themselves
    what is. Optimizer state with the weights is taken too; without it a table keeps what state it has. ``extra`` and
    tensors of the last commit stay, and so do the kept versions.

    Memory: ``ddr``, 4 bytes a row and at most 64 MiB. A run cut short leaves the last commit as it was (and perhaps new
    tables, empty); repeat it from the start. One that fails leaves no new store.

    Args:
        files: each tensor is in one of them.
        mapping: table by key; if there are any, these tensors alone are taken, with their optimizer state and ids.
        optimizer, pooling, rounding: of new tables; default: what the file says, else SGD(lr=0.01), "sum", "nearest".
        dtype: of the weights in the store, rounded to nearest. Default: as in the file.
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises:
        ValueError: the files hold no table, or one that cannot be taken. TableError: an existing table is another.
        FormatError: a file cannot be read. StoreLockedError: the store is open for writing elsewhere.
        DiskFullError, DamagedError, BudgetError: as ``tierstore.open`` and ``commit``.
    """
    found = open_files(dict.fromkeys(Path(path).absolute() for path in files))
    asked = {"optimizer": optimizer, "dtype": dtype, "pooling": pooling, "rounding": rounding}
    keep = 1
    if rows_path(Path(directory)).exists():
        with open_store(directory, mode="r") as store:
            keep = min(len(store.versions) + 1, MAX_KEPT_VERSIONS)
    # Rows leave memory, and so are appended, in the order in which they came.
    opened = partial(open_store, directory, mode="w", keep=keep, ddr=ddr, policy="lru")
    with kept_if_committed(Path(directory)), opened() as store:
        existing = {name: table.config for name, table in store.tables.items()}
        matches = match_tables(found, mapping or {}, asked, existing)
        tables = [_make_table(store, match, match.config.name not in existing) for match in matches]
        total, before, imported = sum(match.size_bytes for match in matches), 0, list[TableImport]()
        for match, table in zip(matches, tables, strict=True):

            def add(done: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, total)

            imported.append(_import(match, table, add, match.config.name not in existing))
            before += match.size_bytes
        version = store.commit(extra=store.extra, tensors=store.tensors())
        taken = {key for match in matches for key in match.keys}
        left_out = tuple(key for key in (*found.tensors, *found.others) if key not in taken)
        return ImportReport(version, tuple(imported), left_out)


class Match(NamedTuple):
    """One table, ``config`` as if it were made, and where its parts are. ``ids``: of dynamic ids, int64 [rows], and
    their scores if there are. ``step``, ``rate``: that the file has. ``keys``: of all that is taken; ``unused``: names
    of the optimizer state that is not."""

    config: TableConfig
    weights: FileTensor
    states: Sequence[tuple[StateTensor, FileTensor]]
    ids: Sequence[Int64s]
    step: int | None
    rate: float | None
    keys: Sequence[str]
    unused: Sequence[str]

    @property
    def num_rows(self) -> int:
        return self.weights.shape[0]

    @property
    def size_bytes(self) -> int:
        """Weights and state in the files."""
        assert self.weights.dtype is not None
        state = sum(each.last - each.first for each, _ in self.states)
        return self.num_rows * (self.config.embedding_dim * self.weights.dtype.itemsize + 4 * state)

    def read(self, start: int, stop: int) -> tuple[Tensor, Floats | None]:
        """Weights as in the file, and state, float32 [stop - start, state_dim], or None if there is none."""
        state = None
        if self.states:
            width = self.config.optimizer.state_dim(self.config.embedding_dim)
            state = np.empty((stop - start, width), np.float32)
            for each, tensor in self.states:
                state[:, each.first : each.last] = tensor.rows[start:stop].reshape(stop - start, -1).numpy()
        return self.weights.rows[start:stop], state


def _make_table(store: Store, match: Match, is_new: bool) -> Table:
    """The table, with its count of updates and learning rate as the file has them."""
    table = store.create_table(match.config)
    if match.states and match.step is not None:
        table.restore(TableState(match.step, table.learning_rate if match.rate is None else match.rate))
    elif match.rate is not None and is_new:
        # Updates are counted for the sake of the state: where that begins again, so do they.
        table.restore(TableState(0 if table.layout.state_dim else match.step or 0, match.rate))
    return table


def _import(match: Match, table: Table, add: Callable[[int], None], is_new: bool) -> TableImport:
    changed = nonfinite = 0
    rows, notes = match.num_rows, _notes(match, table, is_new)
    for start, stop in chunks(table, rows):
        weights, state = match.read(start, stop)
        weights = weights.to(table.layout.torch_dtype).contiguous()
        nonfinite += int(torch.count_nonzero(~torch.isfinite(weights)))
        ids = [each[start:stop] for each in match.ids]
        keys = table.give_rows(*ids) if ids else numbered(table, start, stop)
        changed += write_keys(table, keys, raw_weights(weights), state)
        add(match.size_bytes * stop // rows)
    return TableImport(
        table.name, match.weights.key, is_new, rows, changed, bool(match.states), nonfinite, table.config, notes
    )


def _notes(match: Match, table: Table, is_new: bool) -> tuple[str, ...]:
    """What the caller may not expect of a table's rows and their state."""
    config, notes = match.config, list[str]()
    if match.num_rows < config.num_embeddings and config.ids is None:
        notes.append(f"rows from {match.num_rows:,} on are not in the file: they stay as they are")
    if match.unused:
        what = f"the table's optimizer is {type(config.optimizer).__name__}"
        names = "RowWiseAdagrad() or optimizer=Adagrad()" if "sum" in match.unused else "Adam()"
        notes.append(f"{', '.join(match.unused)} not taken, as {what}: import into a new table with optimizer={names}")
    if config.optimizer.kind == "adam" and match.states and match.step is None:
        then = "bias correction starts from 0" if is_new else f"the count of updates stays {table.state.step}"
        notes.append(f"no step: {then}; give {excerpt(state_key(match.weights.key, 'step'))[1:-1]}")
    elif state_tensors(config.optimizer, config.embedding_dim) and not match.states:
        then = "it starts at its initial value" if is_new else "the table keeps its own"
        notes.append(f"no optimizer state in the file: {then}")
    return tuple(notes)


def match_tables(
    files: TensorFiles, mapping: Mapping[str, str], asked: Mapping[str, Any], existing: Mapping[str, TableConfig]
) -> list[Match]:
    """The tables that the files hold; ``mapping`` as of ``import_files``, ``asked`` what its caller wants of new
    tables, ``existing`` the store's, which stand. ValueError: no tensor, an unknown one, two for one table, or one that
    cannot be a table; names file and key. TableError: an existing table is of another shape or dtype."""
    tables = dict(mapping)
    for key, table in mapping.items():
        if key not in files.tensors:
            near = difflib.get_close_matches(key, files.tensors, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {excerpt_names(files.tensors) or 'none'}"
            raise ValueError(f"mapping={{{key!r}: {table!r}}}: no tensor {key!r} in {files}; {hint}")
        owner, _, part = table.rpartition(".")
        if owner and part in (*STATE_NAMES, IDS) and table not in existing:
            raise ValueError(
                f"mapping={{{excerpt(key)}: {table!r}}}: tensors are taken as tables, and {part} only from its place "
                "beside the weights: write a file that has it there (docs/exchange.md)"
            )
    if not tables:
        known = {key: each.config.name for key, each in files.exported.items() if key in files.tensors}
        # In the order of the store that was exported: a table's place decides about the first values of its rows.
        for key in (*known, *files.tensors):
            if (name := table_of(key, known)) is not None:
                tables.setdefault(key, name)
    if not tables:
        raise ValueError(
            f"no tensor in {files} is named embedding_bags.TABLE.weight; there are "
            f"{excerpt_names(files.tensors) or 'none'}. Say which to take: mapping={{KEY: TABLE}}"
        )
    asked = {name: value for name, value in asked.items() if value is not None}
    matches: dict[str, Match] = {}
    for key, table in tables.items():
        match = _match(files, files.tensors[key], table, asked, existing.get(table))
        other = matches.setdefault(table, match)
        if other is not match:
            raise ValueError(
                f"both {other.weights.place} and {match.weights.place} would be table {table!r}; choose with "
                "mapping={KEY: TABLE}"
            )
    return list(matches.values())


def _match(
    files: TensorFiles, weights: FileTensor, table: str, asked: Mapping[str, Any], existing: TableConfig | None
) -> Match:
    keys = {name: state_key(weights.key, name) for name in (*STATE_NAMES, IDS, SCORES)}
    if weights.dtype is None or not weights.dtype.is_floating_point:
        raise ValueError(
            f"{weights.place} is not of float64, float32, float16 or bfloat16, stored row by row; it is no table. "
            "If its rows are quantized, import what they were made from, and quantize that"
        )
    if len(weights.shape) != 2 or not weights.shape[1]:
        raise ValueError(f"{weights.place} has shape {list(weights.shape)}; a table is [rows, columns]")
    exported = files.exported.get(weights.key)
    theirs = None if exported is None else exported.config
    config = existing or _new_config(weights, table, asked, theirs, has_ids=keys[IDS] in files.tensors)
    states = _states(files, weights.shape[0], config, keys)
    ids = _ids(files, weights, config, theirs, keys)
    taken = [weights.key, *(tensor.key for _, tensor in states), *ids]
    step, rate = exported.state if exported else (_count_of_updates(files, keys["step"], config), None)
    taken += [keys["step"]] if step is not None else []
    unused = [name for name in STATE_NAMES[:-1] if keys[name] in files.tensors and keys[name] not in taken]
    numbers = [] if config.ids is None else [np.arange(weights.shape[0])]
    _require_fits(weights, config, asked)
    return Match(config, weights, states, [*ids.values()] or numbers, step, rate, taken, unused)


def _new_config(
    weights: FileTensor, table: str, asked: Mapping[str, Any], theirs: TableConfig | None, *, has_ids: bool
) -> TableConfig:
    dtype = asked.get("dtype") or str(weights.dtype).removeprefix("torch.")
    changes: dict[str, Any] = {"embedding_dim": weights.shape[1], "num_embeddings": weights.shape[0], "dtype": dtype}
    changes |= {"rounding": "nearest"} if dtype == "float32" else {}
    if has_ids and theirs is not None and theirs.ids is not None:
        changes["num_embeddings"] = theirs.num_embeddings
    elif has_ids:
        changes["ids"] = DynamicIds()
    changes |= asked
    try:
        if theirs is None:
            config = TableConfig(name=table, **changes)
        else:
            names = (table,) if theirs.feature_names == (theirs.name,) else theirs.feature_names
            config = replace(theirs, name=table, feature_names=names, **changes)
        config.layout(min(mmap.PAGESIZE, MAX_PAGE_BYTES)).pages_per_block  # noqa: B018 - ValueError for rows too wide
        return config
    except (ValueError, TypeError) as error:
        hint = '; say what to store it as with dtype="float32"' if weights.dtype is torch.float64 else ""
        raise ValueError(f"{weights.place}: {error}{hint}") from error


def _states(
    files: TensorFiles, rows: int, config: TableConfig, keys: Mapping[str, str]
) -> list[tuple[StateTensor, FileTensor]]:
    """The optimizer state of weights: all of it or none."""
    wanted = state_tensors(config.optimizer, config.embedding_dim)
    found = [(each, files.tensors[keys[each.name]]) for each in wanted if keys[each.name] in files.tensors]
    for each, tensor in found:
        if len(found) < len(wanted):
            names = ", ".join(keys[each.name] for each in wanted)
            raise ValueError(
                f"{tensor.path} has {excerpt(tensor.key)}, but not all of {names}; give all of them or none"
            )
        if tensor.dtype is not torch.float32 or tensor.shape not in {each.shape(rows), (rows, each.last - each.first)}:
            raise ValueError(
                f"{tensor.place} is {tensor.dtype} {list(tensor.shape)}; {config.optimizer.kind} "
                f"of table {config.name!r} needs torch.float32 {list(each.shape(rows))}"
            )
    return found


def _ids(
    files: TensorFiles, weights: FileTensor, config: TableConfig, theirs: TableConfig | None, keys: Mapping[str, str]
) -> dict[str, Int64s]:
    """By key, ids of rows, and their scores if the table evicts as the file's did. ValueError: they are no int64
    [rows], or an id comes twice. TableError: the table's rows have numbers."""
    ids, rows = files.tensors.get(keys[IDS]), weights.shape[0]
    if ids is None:
        return {}
    if config.ids is None:
        raise TableError(f"{ids.place} has ids of rows, and table {config.name!r} numbers them: choose another table")
    scores = files.tensors.get(keys[SCORES])
    if theirs is None or theirs.ids is None or theirs.ids.eviction.scores != config.ids.eviction.scores:
        scores = None
    found = {}
    for tensor in filter(None, (ids, scores)):
        if tensor.dtype is not torch.int64 or tensor.shape != (rows,):
            raise ValueError(f"{tensor.place} is {tensor.dtype} {list(tensor.shape)}, not int64 {[rows]}")
        found[tensor.key] = tensor.rows[:].numpy()
    distinct, counts = np.unique(found[ids.key], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{ids.place} has id {distinct[counts > 1][0]} twice; leave out one of its rows")
    return found


def _count_of_updates(files: TensorFiles, key: str, config: TableConfig) -> int | None:
    """A number or a tensor [1] or [] that lies with Adam's moments; None if there is none."""
    tensor = files.tensors.get(key)
    if config.optimizer.kind != "adam" or tensor is None:
        return None
    if tensor.shape not in ((), (1,)):
        raise ValueError(f"{tensor.place} has shape {list(tensor.shape)}; a count of updates is one number")
    count = tensor.rows[...].item()
    if not 0 <= count < 2**63:
        raise ValueError(f"{tensor.place} is {excerpt(count)}; a count of updates is 0 or more")
    return int(count)


def _require_fits(weights: FileTensor, config: TableConfig, asked: Mapping[str, Any]) -> None:
    """TableError unless the tensor has the table's columns, at most its rows, and its dtype (or is converted)."""
    place = weights.place
    if config.dtype in get_args(QuantizedName):
        raise TableError(
            f"{place} cannot be taken as table {config.name!r}, whose rows are {config.dtype}: import it as "
            "float32 into another store, and quantize that"
        )
    (rows, dim), dtype = weights.shape, str(weights.dtype).removeprefix("torch.")
    have = f"table {config.name!r} is {config.num_embeddings} x {config.embedding_dim} {config.dtype}"
    if rows > config.num_embeddings or dim != config.embedding_dim:
        larger = f", or Store.change_table({config.name!r}, num_embeddings={rows}) before" * (config.ids is None)
        raise TableError(
            f"{place} is {rows} x {dim} {dtype}, {have}; choose another table with "
            f"mapping={{KEY: TABLE}}{larger if dim == config.embedding_dim else ''}"
        )
    if asked.get("dtype", dtype) != config.dtype:
        raise TableError(f'{place} is {rows} x {dim} {dtype}, {have}; convert it with dtype="{config.dtype}"')
    for name in ("optimizer", "rounding"):
        own = getattr(config, name)
        if asked.get(name, own) != own:
            raise TableError(f"{have}, {name}={own}, not {asked[name]}; leave the {name} as it is")
