"""Hosts by name, and by file."""

import functools
import os
import tomllib
from pathlib import Path
from typing import Any

from ..host import Host, SoftwareCosts
from .catalog import DATA, read_figure, require_name
from .compose import compose
from .host_files import read_host

__all__ = ["example_hosts", "host_names", "load_host"]


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
