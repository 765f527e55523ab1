"""Which tensors of some files become which tables: all of it decided, and checked, before a row is written."""

import difflib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from ..config import TableConfig
from ..errors import TableError
from ..ids import DynamicIds
from ..io import MAX_PAGE_BYTES
from ..kernels.arrays import Int64s
from ..layout import QuantizedName
from ..optim import Optimizer
from ..store.version import TableState
from ..system.excerpt import excerpt, excerpt_names
from .keys import IDS, SCORES, STATE_NAMES, StateTensor, part_of, state_key, state_tensors, table_of
from .sources import Source, TensorInfo


class Settings(NamedTuple):
    """What the caller of ``import_files`` asks of new tables."""

    optimizer: Optimizer | None = None
    dtype: str | None = None
    pooling: str | None = None
    rounding: str | None = None


class StatePart(NamedTuple):
    state: StateTensor
    source: Source
    key: str


class _Files(NamedTuple):
    """The file of each tensor, the numbers alongside, and the keys that the caller named for a table's state."""

    places: Mapping[str, Source]
    numbers: Mapping[str, float]
    parts: Mapping[tuple[str, str], str]

    def key_of(self, key: str, table: str, state: str) -> str:
        """Of a state of a table, or its ids, whose weights have ``key``."""
        return self.parts.get((table, state)) or state_key(key, state)


class Match(NamedTuple):
    """One table, ``config`` were it to be made, and where its parts are; ``kept`` if the file has it, else
    ``updates``, the count of updates that Adam's moments have. ``keys`` are all that are taken, ``unused`` the
    state that is not. ``ids``: int64 [rows] of the rows of a table with dynamic ids, and their scores if there are."""

    source: Source
    key: str
    config: TableConfig
    info: TensorInfo
    states: tuple[StatePart, ...]
    ids: Sequence[Int64s]
    kept: TableState | None
    updates: int | None
    keys: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def place(self) -> str:
        return _place(self.source, self.key)

    @property
    def size_bytes(self) -> int:
        """Weights and state in the files."""
        assert self.info.dtype is not None
        rows, dim = self.info.shape
        state = sum(part.state.last - part.state.first for part in self.states)
        return rows * (dim * self.info.dtype.itemsize + 4 * state)


def _place(source: Source, key: str) -> str:
    return f"{source.path}, tensor {excerpt(key)}"


def match_tables(
    sources: Sequence[Source], mapping: Mapping[str, str], settings: Settings, existing: Mapping[str, TableConfig]
) -> list[Match]:
    """The tables that the files hold; ``mapping`` as of ``import_files``, ``existing`` are the store's, which stand.

    Raises:
        ValueError: no tensor, an unknown one, two for one table, or one that cannot be a table; names file and key.
        TableError: an existing table is of another shape or dtype.
    """
    places = _places(sources)
    numbers = {key: number for source in sources for key, number in source.others.items() if number is not None}
    tables, parts = _divided(mapping, existing)
    files = _Files(places, numbers, parts)
    chosen = _chosen(sources, tables, parts, files)
    matches: dict[str, Match] = {}
    for key, table in chosen.items():
        match = _match(files, key, table, settings, existing.get(table))
        other = matches.setdefault(table, match)
        if other is not match:
            raise ValueError(
                f"both {other.place} and {match.place} would be table {table!r}; choose with mapping={{KEY: TABLE}}"
            )
    return list(matches.values())


def _divided(
    mapping: Mapping[str, str], existing: Mapping[str, TableConfig]
) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Table by key, and key by table and state."""
    tables: dict[str, str] = {}
    parts: dict[tuple[str, str], str] = {}
    for key, target in mapping.items():
        part = part_of(target)
        if part is None or target in existing:
            tables[key] = target
        elif part[0] not in mapping.values():
            raise ValueError(
                f"mapping={{{excerpt(key)}: {target!r}}}: {part[1]} is optimizer state of a table {part[0]!r}, whose "
                f"weights are not named; add mapping={{KEY: {part[0]!r}}}"
            )
        elif parts.setdefault(part, key) != key:
            raise ValueError(f"both {excerpt(parts[part])} and {excerpt(key)} would be {target!r}; choose one")
    return tables, parts


def _places(sources: Sequence[Source]) -> dict[str, Source]:
    places: dict[str, Source] = {}
    for source in sources:
        for key in source.tensors:
            other = places.setdefault(key, source)
            if other is not source:
                raise ValueError(
                    f"both {other.path} and {source.path} have a tensor {excerpt(key)}; give one of the two files"
                )
    return places


def _chosen(
    sources: Sequence[Source], tables: dict[str, str], parts: Mapping[tuple[str, str], str], files: _Files
) -> dict[str, str]:
    paths, places = ", ".join(str(source.path) for source in sources), files.places
    for key, target in [*tables.items(), *((key, ".".join(part)) for part, key in parts.items())]:
        if key not in places and (key in tables or key not in files.numbers):
            near = difflib.get_close_matches(key, places, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {excerpt_names(places) or 'none'}"
            raise ValueError(f"mapping={{{key!r}: {target!r}}}: no tensor {key!r} in {paths}; {hint}")
    if tables:
        return tables
    known = {table.key: table.config.name for source in sources if source.metadata for table in source.metadata.tables}
    # In the order of the store that was exported: a table's place decides about the first values of its rows.
    ordered = [*(key for key in known if key in places), *(key for key in places if key not in known)]
    chosen = {key: table for key in ordered if (table := table_of(key, known)) is not None}
    if not chosen:
        raise ValueError(
            f"no tensor in {paths} is named embedding_bags.TABLE.weight; there are {excerpt_names(places) or 'none'}. "
            "Say which to take: mapping={KEY: TABLE}"
        )
    return chosen


def _match(files: _Files, key: str, table: str, settings: Settings, existing: TableConfig | None) -> Match:
    source = files.places[key]
    info = source.tensors[key]
    place = _place(source, key)
    _require_table(info, place)
    exported = {each.key: each for each in source.metadata.tables}.get(key) if source.metadata else None
    theirs, has_ids = exported.config if exported else None, files.key_of(key, table, IDS) in files.places
    config = existing or _new_config(info, table, settings, theirs, place, has_ids=has_ids)
    step_key = files.key_of(key, table, "step")
    kept, updates = (exported.state, None) if exported else (None, _updates(files, step_key, config))
    states = _states(files, key, table, config, info.shape[0])
    ids = _ids(files, key, config, theirs, info.shape[0]) if has_ids else {}
    taken = (key, *(part.key for part in states), *ids, *(() if updates is None else (step_key,)))
    found = {name: files.key_of(key, table, name) for name in STATE_NAMES}
    unused = tuple(name for name, its in found.items() if its in files.places and its not in taken and name != "step")
    for name in STATE_NAMES:
        if (table, name) in files.parts and found[name] not in taken and not (kept and name == "step"):
            raise ValueError(
                f"mapping={{{excerpt(found[name])}: {f'{table}.{name}'!r}}}: table {table!r} has "
                f"{type(config.optimizer).__name__}, without {name}; {_other_optimizer((name,))}"
            )
    numbers = [] if config.ids is None else [np.arange(info.shape[0])]
    match = Match(source, key, config, info, states, [*ids.values()] or numbers, kept, updates, taken, unused)
    _require_fits(match, config, settings)
    return match


def _other_optimizer(unused: Sequence[str]) -> str:
    """What to do with state that a table's optimizer does not have."""
    names = "RowWiseAdagrad() or optimizer=Adagrad()" if "sum" in unused else "Adam()"
    return f"import into a new table with optimizer={names}"


def notes_of(match: Match, is_new: bool, count: int) -> tuple[str, ...]:
    """What the caller may not expect of a table's rows and their state; ``count`` is of its updates before."""
    config, notes, num_rows = match.config, list[str](), match.info.shape[0]
    if num_rows < config.num_embeddings and config.ids is None:
        notes.append(f"rows from {num_rows:,} on are not in the file: they stay as they are")
    if match.unused:
        what = f"the table's optimizer is {type(config.optimizer).__name__}"
        notes.append(f"{', '.join(match.unused)} not taken, as {what}: {_other_optimizer(match.unused)}")
    if config.optimizer.kind == "adam" and match.states and match.kept is None and match.updates is None:
        name = state_key(match.key, "step")
        then = "bias correction starts from 0" if is_new else f"the count of updates stays {count}"
        notes.append(f"no step: {then}; give {excerpt(name)[1:-1]}")
    elif state_tensors(config.optimizer, config.embedding_dim) and not match.states:
        then = "it starts at its initial value" if is_new else "the table keeps its own"
        notes.append(f"no optimizer state in the file: {then}")
    return tuple(notes)


def _updates(files: _Files, key: str, config: TableConfig) -> int | None:
    """The count of updates, a number or a tensor [1] or [], that lies with Adam's moments; None if there is none."""
    if config.optimizer.kind != "adam" or not (key in files.places or key in files.numbers):
        return None
    if key in files.places:
        source, place = files.places[key], _place(files.places[key], key)
        shape = source.tensors[key].shape
        if shape not in ((), (1,)):
            raise ValueError(f"{place} has shape {list(shape)}; a count of updates is one number")
        count = source.part_of(key)[...].item()
    else:
        place, count = excerpt(key), files.numbers[key]
    if not 0 <= count < 2**63:
        raise ValueError(f"{place} is {excerpt(count)}; a count of updates is 0 or more")
    return int(count)


def _require_table(info: TensorInfo, place: str) -> None:
    if info.dtype is None or not info.dtype.is_floating_point:
        raise ValueError(
            f"{place} is not of float64, float32, float16 or bfloat16, stored row by row; it is no table. If its rows "
            "are quantized, import what they were made from, and quantize that"
        )
    if len(info.shape) != 2 or not info.shape[1]:
        raise ValueError(f"{place} has shape {list(info.shape)}; a table is [rows, columns]")


def _new_config(
    info: TensorInfo, table: str, settings: Settings, theirs: TableConfig | None, place: str, *, has_ids: bool
) -> TableConfig:
    rows, dim = info.shape
    dtype = settings.dtype or str(info.dtype).removeprefix("torch.")
    changes: dict[str, Any] = {"num_embeddings": rows, "embedding_dim": dim, "dtype": dtype}
    changes |= {"rounding": "nearest"} if dtype == "float32" else {}
    if has_ids:
        rows_before = theirs is not None and theirs.ids is not None and theirs.num_embeddings
        changes |= {"num_embeddings": rows_before} if rows_before else {"ids": DynamicIds()}
    changes |= {name: value for name, value in settings._asdict().items() if value is not None}
    try:
        if theirs is None:
            config = TableConfig(name=table, **changes)
        else:
            names = (table,) if theirs.feature_names == (theirs.name,) else theirs.feature_names
            config = replace(theirs, name=table, feature_names=names, **changes)
        config.layout(min(mmap.PAGESIZE, MAX_PAGE_BYTES)).pages_per_block  # noqa: B018 - ValueError for rows too wide
        return config
    except (ValueError, TypeError) as error:
        hint = '; say what to store it as with dtype="float32"' if info.dtype is torch.float64 else ""
        raise ValueError(f"{place}: {error}{hint}") from error


def _require_fits(match: Match, config: TableConfig, settings: Settings) -> None:
    """TableError unless the tensor has the table's columns, at most its rows, and its dtype (or is to be converted)."""
    if config.dtype in get_args(QuantizedName):
        raise TableError(
            f"{match.place} cannot be taken as table {config.name!r}, whose rows are {config.dtype}: import it as "
            "float32 into another store, and quantize that"
        )
    shape, dtype = match.info.shape, str(match.info.dtype).removeprefix("torch.")
    have = f"table {config.name!r} is {config.num_embeddings} x {config.embedding_dim} {config.dtype}"
    if shape[0] > config.num_embeddings or shape[1] != config.embedding_dim:
        larger = f", or Store.change_table({config.name!r}, num_embeddings={shape[0]}) before" * (config.ids is None)
        raise TableError(
            f"{match.place} is {shape[0]} x {shape[1]} {dtype}, {have}; choose another table with "
            f"mapping={{KEY: TABLE}}{larger if shape[1] == config.embedding_dim else ''}"
        )
    if (settings.dtype or dtype) != config.dtype:
        raise TableError(
            f'{match.place} is {shape[0]} x {shape[1]} {dtype}, {have}; convert it with dtype="{config.dtype}"'
        )
    if settings.optimizer not in (None, config.optimizer):
        raise TableError(f"{have} with {config.optimizer}, not {settings.optimizer}; leave the optimizer as it is")
    if settings.rounding not in (None, config.rounding):
        raise TableError(f"{have}, rounding={config.rounding!r}, not {settings.rounding!r}; leave rounding as it is")


def _ids(files: _Files, key: str, config: TableConfig, theirs: TableConfig | None, num_rows: int) -> dict[str, Int64s]:
    """By key, ids of rows, and their scores if the table evicts as the file's did. ValueError: they are no int64
    [num_rows], or an id comes twice. TableError: the table's rows have numbers."""
    names = [files.key_of(key, config.name, name) for name in (IDS, SCORES)]
    place = _place(files.places[names[0]], names[0])
    if config.ids is None:
        raise TableError(f"{place} has ids of rows, and table {config.name!r} numbers them: choose another table")
    if theirs is None or theirs.ids is None or theirs.ids.eviction.scores != config.ids.eviction.scores:
        names = names[:1]
    found = {}
    for name, source in [(name, files.places[name]) for name in names if name in files.places]:
        info = source.tensors[name]
        if info.dtype is not torch.int64 or info.shape != (num_rows,):
            raise ValueError(f"{_place(source, name)} is {info.dtype} {list(info.shape)}, not int64 {[num_rows]}")
        found[name] = source.read(name, 0, num_rows).numpy()
    distinct, counts = np.unique(found[names[0]], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{place} has id {distinct[counts > 1][0]} twice; leave out one of its rows")
    return found


def _states(files: _Files, key: str, table: str, config: TableConfig, num_rows: int) -> tuple[StatePart, ...]:
    """The optimizer state of weights of so many rows: all of it or none."""
    wanted = state_tensors(config.optimizer, config.embedding_dim)
    keys = {each.name: files.key_of(key, table, each.name) for each in wanted}
    places = files.places
    found = [StatePart(each, places[keys[each.name]], keys[each.name]) for each in wanted if keys[each.name] in places]
    if found and len(found) < len(wanted):
        names = ", ".join(keys.values())
        raise ValueError(
            f"{found[0].source.path} has {excerpt(found[0].key)}, but not all of {names}; give all of them or none"
        )
    for part in found:
        info = part.source.tensors[part.key]
        shapes = {part.state.shape(num_rows), (num_rows, part.state.last - part.state.first)}
        if info.dtype is not torch.float32 or info.shape not in shapes:
            raise ValueError(
                f"{_place(part.source, part.key)} is {info.dtype} {list(info.shape)}; {config.optimizer.kind} "
                f"of table {config.name!r} needs torch.float32 {list(part.state.shape(num_rows))}"
            )
    return tuple(found)
