"""Workloads by name, and from a file.

A workload file is TOML: ``[workload]`` with the keys of ``Workload``, and a ``[[table]]`` for each table with those of
``TableShape``; ``count = N`` in one makes N alike, named NAME0, NAME1, ...
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from ..config import require_int
from ..settings.names import nearest
from ..settings.toml_file import read_toml
from ..system.excerpt import excerpt
from .published import PUBLISHED
from .workload import TableShape, Workload

__all__ = ["PRESETS", "load_workload", "preset", "scaled"]

PRESETS: Final[Mapping[str, Workload]] = {workload.name: workload for workload in PUBLISHED}

_WHAT: Final = "workload file"
_MAX_ALIKE: Final = 10_000
_COUNT: Final = "count"
_REQUIRED: Final = ("name", "num_embeddings", "embedding_dim")
_WORKLOAD_KEYS: Final = tuple(each.name for each in fields(Workload) if each.name != "tables")
_TABLE_KEYS: Final = (*(each.name for each in fields(TableShape)), _COUNT)


def preset(name: str) -> Workload:
    """A published model, by its name in any case.

    Raises:
        ValueError: there is none of this name; says the nearest.
    """
    found = PRESETS.get(name.lower())
    if found is None:
        raise ValueError(f"there is no preset {excerpt(name)}; {nearest(name.lower(), PRESETS)}")
    return found


def load_workload(source: str | os.PathLike[str]) -> Workload:
    """A preset by its name, or a workload file by its path.

    Raises:
        ValueError: it is neither, or the file has an unknown key or a value that cannot be; names the file, the key
            and what is accepted.
    """
    text = os.fspath(source)
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    if path.suffix == ".toml" or path.exists():
        return _read(path)
    raise ValueError(
        f"{excerpt(text)} is neither a preset nor a {_WHAT}; {nearest(text.lower(), PRESETS, all_are='presets are')}"
    )


def scaled(workload: Workload, factor: float) -> Workload:
    """The same with ``factor`` times the rows, of each table one at least; for machines smaller than the model's.

    Raises:
        ValueError: the factor is not above 0, or a table gets more rows than there can be.
    """
    if not 0 < factor < float("inf"):
        raise ValueError(f"factor={factor}: expected a number above 0")
    tables = tuple(
        replace(table, num_embeddings=max(1, round(table.num_embeddings * factor))) for table in workload.tables
    )
    return replace(workload, name=f"{workload.name} x {factor:g}", tables=tables)


def _read(path: Path) -> Workload:
    document = read_toml(path, _WHAT)
    _require_known(document, ("workload", "table"), f"{path}")
    keys, tables = document.get("workload", {}), document.get("table", [])
    if not isinstance(keys, dict):
        raise ValueError(f"{path}: workload = {excerpt(keys)}: expected a section, [workload]")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: table = {excerpt(tables)}: expected a [[table]] for each table")
    _require_known(keys, _WORKLOAD_KEYS, f"{path}: [workload]")
    _require_name(keys.get("name", path.stem), f"{path}: [workload]")
    shapes = [
        shape for number, table in enumerate(tables, 1) for shape in _shapes(table, f"{path}: [[table]] {number}")
    ]
    try:
        return Workload(**{"name": path.stem, **keys}, tables=tuple(shapes))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _shapes(table: dict[str, Any], origin: str) -> list[TableShape]:
    _require_known(table, _TABLE_KEYS, origin)
    missing = next((key for key in _REQUIRED if key not in table), None)
    if missing is not None:
        raise ValueError(f"{origin} has no {missing}")
    _require_name(table["name"], origin)
    values = dict(table)
    count = values.pop(_COUNT, None)
    try:
        if count is None:
            return [TableShape(**values)]
        require_int(count, _COUNT, 1, _MAX_ALIKE)
        first = TableShape(**values)
        return [replace(first, name=f"{first.name}{number}") for number in range(count)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{origin}: {error}") from None


def _require_known(keys: Iterable[str], known: Iterable[str], origin: str) -> None:
    names = list(known)
    for key in keys:
        if key not in names:
            raise ValueError(f"{origin}: unknown key {excerpt(key)}; {nearest(key, names, all_are='expected one of')}")


def _require_name(name: object, origin: str) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{origin}: name = {excerpt(name)}: expected a text")
