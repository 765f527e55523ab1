"""Hosts from files: all figures, as ``tierstore plan measure`` writes them, or a sum of named parts.

::

    [host]
    name = "shelf"
    processor = { part = "epyc-9354", count = 2 }
    memory = { part = "ddr5-4800-64gb", count = 24, channels = 24, usd = 310 }
    storage = [{ part = "samsung-pm9a3-7680gb", count = 4 }]
    accelerators = [{ part = "l4", link = "pcie4-x16" }]
    network = { part = "ethernet-25gb" }
    costs = "host.json"                               # or { part = "epyc-2-cores", id_ns = 25 }
    watts = 150
    usd = 4000

A figure that is set beside ``part`` stands in place of that of *one* such part.
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any, Final, TypeVar, cast

from ...settings.sections import ConfigError, check_ranges, converted, option
from ...system.output import require_new
from ..host import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage
from ..json_file import write_json
from .catalog import FIGURES, example_hosts, load_part, read_figure, require_name

_Kind = TypeVar("_Kind")
_DEFAULT_COSTS: Final = "epyc-2-cores"
_MOST_PARTS: Final = 4096
_MAX_BYTES: Final = 1 << 20
_MAX_REASON: Final = 200


def _entry(kind: str, *more: tuple[str, type, Any]) -> Any:
    """A file's table of parts of one name; figures that it does not set are None."""
    figures = ((name, float, None) for name in FIGURES[kind])
    count = ("count", int, option(1, "such parts", low=1, high=_MOST_PARTS))
    return make_dataclass(
        kind, [("part", str), count, *more, *figures], kw_only=True, namespace={"__post_init__": check_ranges}
    )


_CHANNELS: Final = ("channels", int, option(0, "that memory is in; 0: one each", low=0, high=_MOST_PARTS))
_COSTS: Final = _entry("costs")
_TABLE: Final = make_dataclass(
    "host",
    [
        ("name", str),
        ("processor", _entry("processors")),
        ("memory", _entry("memory", _CHANNELS)),
        ("network", _entry("networks")),
        ("storage", GenericAlias(tuple, (_entry("storage"), ...)), ()),
        ("accelerators", GenericAlias(tuple, (_entry("accelerators", ("link", str, "")), ...)), ()),
        ("title", str, ""),
        ("watts", float, 0.0),
        ("usd", float, 0.0),
    ],
    kw_only=True,
)


def read_host(path: str | os.PathLike[str]) -> Host:
    """The host of a file, JSON or TOML by the end of its name: every figure of a ``Host`` under its field's name, or
    one table ``host`` of parts.

    Raises:
        ValueError: there is no such file, it is not JSON or TOML, or a key is unknown, missing or out of range; names
            the file, the key and the nearest.
    """
    path = Path(path)
    with _naming(str(path)):
        document = _document(path)
        if not isinstance(document, Mapping) or set(document) != {"host"}:
            return _whole(Host, document, "a host")
        return _composed(document["host"], path.parent)


def load_host(name_or_path: str | os.PathLike[str]) -> Host:
    """A host that ships, by its name, or that of a file: what has a slash in it or ends in .toml or .json. ValueError
    as of ``read_host``, or there is no such host; says the nearest."""
    name = os.fspath(name_or_path)
    if os.sep in name or Path(name).suffix in (".toml", ".json") or not isinstance(name_or_path, str):
        return read_host(name)
    require_name(name, host_names(), "host named")
    table = example_hosts()[name]
    base = {key: read_figure(table[key]).value for key in ("watts", "usd")}
    return _composed(table | base | {"name": name}, Path())


def host_names() -> tuple[str, ...]:
    """Of the hosts that ship."""
    return tuple(example_hosts())


# Of parts


def _composed(table: Any, folder: Path) -> Host:
    """The sum of a table's parts; ``folder``: where files that it names are."""
    costs: Any = {"part": _DEFAULT_COSTS}
    if isinstance(table, Mapping):
        table = {**table}
        costs = table.pop("costs", costs)
    own = converted(table, _TABLE, "host")
    listed = (own.processor, own.memory, *own.storage, *own.accelerators, own.network)
    with _naming("host"):
        channels = own.memory.channels or own.memory.count
        processor = _figures(own.processor, "processors", own.processor.count)
        memory, network = _figures(own.memory, "memory", own.memory.count), _figures(own.network, "networks")
        memory |= {name: channels * _figures(own.memory, "memory")[name] for name in ("bytes_per_s", "row_bytes_per_s")}
        if processor["cores"] == int(processor["cores"]):
            processor["cores"] = int(processor["cores"])
        network["bytes_per_s"] *= own.network.count
        drives = [(Storage(part=each.part, **_figures(each, "storage")), each.count) for each in own.storage]
        gpus = [(_accelerator(each), each.count) for each in own.accelerators]
        return Host(
            name=own.name,
            processor=Processor(part=_counted(own.processor), **processor),
            ddr=Memory(part=own.memory.part, **memory),
            network=Link(part=_counted(own.network), **network),
            costs=_costs(costs, folder),
            storage=tuple(drive for drive, count in drives for _ in range(count)),
            accelerators=tuple(gpu for gpu, count in gpus for _ in range(count)),
            watts=own.watts,
            usd=own.usd,
            source="parts: " + ", ".join(map(_counted, listed)),
        )


def _counted(entry: Any) -> str:
    return f"{entry.count} x {entry.part}"


def _figures(entry: Any, kind: str, count: int = 1) -> dict[str, Any]:
    """Of so many parts together; what the entry sets stands in place of the part's own."""
    figures = load_part(kind, entry.part).values()
    return {name: count * (figures[name] if (own := getattr(entry, name)) is None else own) for name in FIGURES[kind]}


def _accelerator(entry: Any) -> Accelerator:
    own = _figures(entry, "accelerators")
    link = entry.link or load_part("accelerators", entry.part).link
    return Accelerator(
        part=entry.part,
        hbm=Memory(**{name: own[name] for name in ("capacity_bytes", "bytes_per_s", "row_bytes_per_s")}),
        pcie=Link(part=link, **load_part("links", link).values()),
        **{name: own[name] for name in ("flops", "watts", "usd")},
    )


def _costs(said: Any, folder: Path) -> SoftwareCosts:
    """Of a part, or of a file with all figures: one of parts might lead back here."""
    if not isinstance(said, str):
        return SoftwareCosts(**_figures(converted(said, _COSTS, "costs"), "costs"))
    with _naming(f"costs: {folder / said}"):
        document = _document(folder / said)
        if not isinstance(document, Mapping) or "costs" not in document:
            raise ValueError("expected a host as tierstore plan measure writes it, with 'costs'")
        return _whole(SoftwareCosts, document["costs"], "costs")


# Files


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _whole(kind: type[_Kind], document: Any, what: str) -> _Kind:
    """Every figure is there: one that is left out would count as 0."""
    try:
        return cast(_Kind, converted(document, kind, what, is_whole=True))
    except ConfigError as error:
        reason = str(error).removeprefix("a host: ").removeprefix("a host.")
        hint = "; if an older tierstore wrote the file, run tierstore plan measure again" if "key " in reason else ""
        raise ValueError(f"{reason}{hint}") from None


def _document(path: Path) -> Any:
    if path.suffix not in (".json", ".toml"):
        raise ValueError("the name of a host's file ends in .json or .toml")
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


def write_host(host: Host, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write all figures of a host as JSON; the file is there whole or not at all. ValueError: the name does not end in
    .json. FileExistsError: there is such a file, and ``force`` is not given."""
    require_writable(Path(path), force=force)
    write_json(host, path, force=force)


def require_writable(path: Path, *, force: bool) -> None:
    """Raise what ``write_host`` would, before there is anything to write."""
    if path.suffix != ".json":
        raise ValueError(f"{path}: the name of a host's file that is written ends in .json")
    require_new(path, force=force)
