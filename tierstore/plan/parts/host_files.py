"""Hosts as files: all figures, as ``tierstore plan measure`` writes them, or parts by name (``compose``)."""

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast, get_args, get_origin, get_type_hints

from ...system.excerpt import excerpt
from ...system.output import require_new, write_text
from ..host import Host, SoftwareCosts
from .catalog import require_name
from .compose import compose, naming

__all__ = ["host_from_dict", "host_to_dict", "read_host", "require_host_path", "require_writable", "write_host"]

_MAX_BYTES: Final = 1 << 20
_MAX_REASON: Final = 200
_FIGURES_BEFORE: Final = frozenset(("write_ns", "writes_per_s"))
_DELETE: Final = "\\u007f"
"""A character that JSON leaves as it is in a text and TOML does not allow there."""


def read_host(path: str | os.PathLike[str]) -> Host:
    """The host that a file describes, in JSON or TOML by the end of its name.

    A file has either every figure of a ``Host`` under its field's name, or one table ``host`` of parts.

    Raises:
        ValueError: there is no such file, it is not JSON or TOML, or a key is unknown, missing or out of range; names
            the file, the key and the nearest.
    """
    path = Path(path)
    with naming(str(path)):
        return host_from_dict(_document(path), path.parent)


def host_from_dict(document: Any, folder: Path) -> Host:
    """The host that a parsed file describes; ``folder``: where files that it names are. Errors as of ``read_host``."""
    if not isinstance(document, Mapping):
        raise ValueError(f"expected a table, not {excerpt(document)}")
    if set(document) != {"host"}:
        found: Host = _read(Host, document, "")
        return found
    with naming("host"):
        if not isinstance(document["host"], Mapping):
            raise ValueError(f"expected a table, not {excerpt(document['host'])}")
        return compose(document["host"], lambda name: _costs(folder / name))


def _costs(path: Path) -> SoftwareCosts:
    """Of a file with all figures: one of parts might lead back here."""
    with naming(str(path)):
        document = _document(path)
        if not isinstance(document, Mapping) or "costs" not in document:
            raise ValueError("expected a host as tierstore plan measure writes it, with 'costs'")
        found: SoftwareCosts = _read(SoftwareCosts, document["costs"], "costs")
        return found


def _document(path: Path) -> Any:
    require_host_path(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_BYTES:
        raise ValueError(f"has more than {_MAX_BYTES:,} bytes, which no host's file has")
    try:
        return json.loads(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid {path.suffix[1:].upper()}: {str(error)[:_MAX_REASON]}") from None


def require_host_path(path: Path) -> None:
    """ValueError unless the name says which of the two languages it is."""
    if path.suffix not in (".json", ".toml"):
        raise ValueError("the name of a host's file ends in .json or .toml")


def require_writable(path: Path, *, force: bool) -> None:
    """Raise what ``write_host`` would, before there is anything to write."""
    with naming(str(path)):
        require_host_path(path)
    require_new(path, force=force)


def _read(kind: Any, value: Any, key: str) -> Any:
    """A field of a host from what stands in a file; ``key`` is where."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{key}={excerpt(value)}: expected a list")
        return tuple(_read(get_args(kind)[0], each, f"{key}[{number}]") for number, each in enumerate(value))
    if not dataclasses.is_dataclass(kind):
        if isinstance(value, bool) or not isinstance(value, (str,) if kind is str else (int, float)):
            raise ValueError(f"{key}={excerpt(value)}: expected a {'text' if kind is str else 'number'}")
        return value
    hints, made = get_type_hints(kind), cast(Callable[..., Any], kind)
    with naming(key):
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a table, not {excerpt(value)}")
        if before := _FIGURES_BEFORE & set(value):
            raise ValueError(
                f"an older tierstore wrote this file: {min(before)!r} is a cost of its way of writing; run "
                "tierstore plan measure again"
            )
        for name in value:
            require_name(name, hints, "key")
        missing = next((name for name in hints if name not in value), None)
        if missing is not None:
            raise ValueError(f"key {missing!r} is missing")
    found = {name: _read(hints[name], each, f"{key}.{name}" if key else name) for name, each in value.items()}
    with naming(key):
        return made(**found)


def write_host(host: Host, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write all figures of a host, in JSON or TOML by the end of the name; the file is there whole or not at all.

    Raises:
        ValueError: the name ends in neither. FileExistsError: there is such a file, and ``force`` is not given.
    """
    path = Path(path)
    with naming(str(path)):
        require_host_path(path)
    document = host_to_dict(host)
    text = json.dumps(document, indent=1) + "\n" if path.suffix == ".json" else "\n".join(_toml(document, "")) + "\n"
    write_text(path, text, force=force)


def host_to_dict(host: Host) -> dict[str, Any]:
    """All figures by the names of their fields, as JSON has them."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(host)))
    return found


def _toml(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Lines of a table: plain values first, as what follows a header belongs to it."""
    inner = {key: value for key, value in table.items() if isinstance(value, (dict, list)) and value}
    for key, value in table.items():
        if key not in inner:
            yield f"{key} = {json.dumps(value, ensure_ascii=False).replace(chr(127), _DELETE)}"
    for key, value in inner.items():
        name = f"{prefix}{key}"
        for each in [value] if isinstance(value, dict) else value:
            yield from ("", f"[{name}]" if isinstance(value, dict) else f"[[{name}]]")
            yield from _toml(each, f"{name}.")
