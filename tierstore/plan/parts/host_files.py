"""Hosts as files: all figures, as ``tierstore plan measure`` writes them, or parts by name (``compose``)."""

import functools
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from ...settings.sections import ConfigError, converted
from ...system.output import require_new, write_text
from ..host import Host, SoftwareCosts
from ..json_file import plain
from .catalog import DATA, read_figure, require_name
from .compose import compose, naming

__all__ = [
    "example_hosts",
    "host_from_dict",
    "host_names",
    "load_host",
    "read_host",
    "require_host_path",
    "require_writable",
    "write_host",
]

_Kind = TypeVar("_Kind")
_MAX_BYTES: Final = 1 << 20
_MAX_REASON: Final = 200
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
    if not isinstance(document, Mapping) or set(document) != {"host"}:
        return _whole(Host, document, "a host")
    with naming("host"):
        return compose(document["host"], lambda name: _costs(folder / name))


def _costs(path: Path) -> SoftwareCosts:
    """Of a file with all figures: one of parts might lead back here."""
    with naming(str(path)):
        document = _document(path)
        if not isinstance(document, Mapping) or "costs" not in document:
            raise ValueError("expected a host as tierstore plan measure writes it, with 'costs'")
        return _whole(SoftwareCosts, document["costs"], "costs")


def _whole(kind: type[_Kind], document: Any, what: str) -> _Kind:
    """Every figure is there: one that is left out would count as 0."""
    try:
        return cast(_Kind, converted(document, kind, what, is_whole=True))
    except ConfigError as error:
        reason = str(error).removeprefix("a host: ").removeprefix("a host.")
        hint = "; if an older tierstore wrote the file, run tierstore plan measure again" if "key " in reason else ""
        raise ValueError(f"{reason}{hint}") from None


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


def write_host(host: Host, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write all figures of a host, in JSON or TOML by the end of the name; the file is there whole or not at all.

    Raises:
        ValueError: the name ends in neither. FileExistsError: there is such a file, and ``force`` is not given.
    """
    path = Path(path)
    with naming(str(path)):
        require_host_path(path)
    document = plain(host)
    text = json.dumps(document, indent=1) + "\n" if path.suffix == ".json" else "\n".join(_toml(document, "")) + "\n"
    write_text(path, text, force=force)


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


@functools.cache
def example_hosts() -> dict[str, dict[str, Any]]:
    """The tables of the hosts that ship, by name."""
    return tomllib.loads((DATA / "hosts.toml").read_text())


def host_names() -> tuple[str, ...]:
    """Of the hosts that ship."""
    return tuple(example_hosts())


def load_host(name_or_path: str | os.PathLike[str]) -> Host:
    """A host that ships, by its name, or that of a file (``read_host``): what has a slash in it or ends in .toml or
    .json is a file.

    Raises:
        ValueError: no such host, or no such file, or it does not describe a host; names the key or the nearest name.
    """
    name = os.fspath(name_or_path)
    if os.sep in name or Path(name).suffix in (".toml", ".json") or not isinstance(name_or_path, str):
        return read_host(name)
    require_name(name, host_names(), "host named")
    table = example_hosts()[name]
    base = {key: read_figure(table[key]).value for key in ("watts", "usd")}
    return compose(table | base | {"name": name}, _no_file)


def _no_file(name: str) -> SoftwareCosts:
    raise AssertionError(f"a host that ships refers to the file {name}")
