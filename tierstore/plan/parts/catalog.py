"""The parts that ship: in ``data/`` one file a kind, one table a part, one entry a figure. And hosts from files: all
figures, as ``tierstore plan measure`` writes them, or a sum of named parts, as docs/planning/machines.md describes. A
figure that is set next to ``part`` replaces that of *one* such part.
"""

import functools
import json
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any, Final, NamedTuple, TypeVar, cast

from ...settings.sections import ConfigError, check_ranges, converted, nearest, option
from ...system.files import require_new
from ...system.sizes import format_size
from ..host import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage
from ..json_file import write_json

DATA: Final = Path(__file__).parent / "data"


def _figures_of(description: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(description) if field.name != "part")


FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "processors": _figures_of(Processor),
    "memory": _figures_of(Memory),
    "accelerators": (*_figures_of(Memory), "flops"),
    "links": _figures_of(Link),
    "storage": _figures_of(Storage),
    "networks": _figures_of(Link),
    "costs": _figures_of(SoftwareCosts),
}
"""Of a part, by its kind; "costs": of tierstore's own work on a processor. The fields of ``plan.host`` say what each
means. An accelerator's are its memory's, and its own watts and price."""


class Figure(NamedTuple):
    """Attributes:
    source: the document that it comes from, and its address; "" if it is assumed.
    assumption: what was assumed, in words; "" if it is the document's.
    """

    value: float
    source: str = ""
    assumption: str = ""


class Part(NamedTuple):
    """``link``: of an accelerator, the name of the PCIe link that it is made for."""

    kind: str
    name: str
    title: str
    figures: Mapping[str, Figure]
    link: str

    def values(self) -> dict[str, float]:
        return {name: figure.value for name, figure in self.figures.items()}


def require_name(name: str, known: Mapping[str, Any] | tuple[str, ...], what: str) -> None:
    """ValueError that names the nearest if there is no such ``what``."""
    if name not in known:
        raise ValueError(f"there is no {what} {name[:100]!r}; {nearest(name, known)}")


def read_figure(entry: Mapping[str, Any]) -> Figure:
    """A figure of a data file: its value, and its source or what was assumed, or both."""
    source = _sources()[entry["source"]] if "source" in entry else ""
    return Figure(entry["value"], source, entry.get("assumption", ""))


@functools.cache
def _sources() -> dict[str, str]:
    return _read("sources")


@functools.cache
def catalog() -> dict[str, dict[str, Part]]:
    """The parts by kind and name."""

    def part(kind: str, name: str, entries: dict[str, Any]) -> Part:
        figures = {figure: read_figure(entries[figure]) for figure in FIGURES[kind] if figure in entries}
        return Part(kind, name, entries["title"], figures, entries.get("link", ""))

    return {kind: {name: part(kind, name, own) for name, own in _read(kind).items()} for kind in FIGURES}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def load_part(kind: str, name: str) -> Part:
    """The part of this name; ValueError names the nearest."""
    require_name(name, catalog()[kind], f"part of kind {kind!r} named")
    return catalog()[kind][name]


@functools.cache
def example_hosts() -> dict[str, dict[str, Any]]:
    """The tables of the hosts that ship, by name."""
    return _read("hosts")


def shown(name: str, value: float) -> str:
    """A figure as people read it; its name says the unit."""
    return format_size(value) if name == "capacity_bytes" else f"{value:,.4g}"


def describe_parts(*, sources: bool = False) -> str:
    """All parts and the hosts made of them, for people, each figure under its key in a host's file. A ``*`` marks a
    figure in which something is assumed."""
    lines, indent = [], " " * 27
    for kind, named in catalog().items():
        lines.append(kind)
        for part in named.values():
            lines.append(f"  {part.name:24} {part.title}")
            texts = []
            for name, (value, source, assumption) in part.figures.items():
                texts.append(f"{name} {shown(name, value)}{'*' if assumption else ''}")
                assumed = f"assumed: {assumption}" if assumption else ""
                lines += [f"      {texts[-1]}: {'; '.join(filter(None, (source, assumed)))}"] if sources else []
            if not sources:
                lines += textwrap.wrap(", ".join(texts), 100, initial_indent=indent, subsequent_indent=indent)
        lines.append("")
    lines += ["hosts", *(f"  {name:24} {host['title']}" for name, host in example_hosts().items()), ""]
    lines.append("* something is assumed in it. All prices are assumptions: put yours in a file of your own.")
    return "\n".join(lines)


_Kind = TypeVar("_Kind")
_DEFAULT_COSTS: Final = "epyc-2-cores"
_MOST_PARTS: Final = 4096
_MAX_BYTES: Final = 1 << 20
_MAX_REASON: Final = 200


def _entry(kind: str, *more: tuple[str, type, Any]) -> Any:
    """A file's table of parts of one name; figures that it leaves out are None."""
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


def load_host(source: str | os.PathLike[str]) -> Host:
    """A host that ships, by its name, or that of a file: what has a slash in it or ends in .toml or .json. The file has
    every figure of a ``Host`` under its field's name, or one table ``host`` of parts.

    Raises:
        ValueError: there is no such host or file, it is not JSON or TOML, or a key is unknown, missing or out of range;
            names the file, the key and the nearest.
    """
    name = os.fspath(source)
    if isinstance(source, str) and os.sep not in name and Path(name).suffix not in (".toml", ".json"):
        require_name(name, host_names(), "host named")
        table = example_hosts()[name]
        base = {key: read_figure(table[key]).value for key in ("watts", "usd")}
        return _composed(table | base | {"name": name}, Path())
    path = Path(name)
    with _naming(name):
        document = _document(path)
        if not isinstance(document, Mapping) or set(document) != {"host"}:
            return _whole(Host, document, "a host")
        return _composed(document["host"], path.parent)


def host_names() -> tuple[str, ...]:
    """Of the hosts that ship."""
    return tuple(example_hosts())


def _composed(table: Any, folder: Path) -> Host:
    """The sum of a table's parts; ``folder``: of files that it names."""
    costs: Any = {"part": _DEFAULT_COSTS}
    if isinstance(table, Mapping):
        table = {**table}
        costs = table.pop("costs", costs)
    own = converted(table, _TABLE, "host")
    parts = (own.processor, own.memory, *own.storage, *own.accelerators, own.network)
    with _naming("host"):
        processor = _figures(own.processor, "processors", own.processor.count)
        if processor["cores"] == int(processor["cores"]):
            processor["cores"] = int(processor["cores"])
        memory, of_one = _figures(own.memory, "memory", own.memory.count), _figures(own.memory, "memory")
        channels = own.memory.channels or own.memory.count
        memory |= {name: channels * of_one[name] for name in ("bytes_per_s", "row_bytes_per_s")}
        network = _figures(own.network, "networks")
        network["bytes_per_s"] *= own.network.count
        return Host(
            name=own.name,
            processor=Processor(part=_counted(own.processor), **processor),
            ddr=Memory(part=own.memory.part, **memory),
            network=Link(part=_counted(own.network), **network),
            costs=_costs(costs, folder),
            storage=tuple(
                drive
                for each in own.storage
                for drive in [Storage(part=each.part, **_figures(each, "storage"))] * each.count
            ),
            accelerators=tuple(gpu for each in own.accelerators for gpu in [_accelerator(each)] * each.count),
            watts=own.watts,
            usd=own.usd,
            source="parts: " + ", ".join(map(_counted, parts)),
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid {path.suffix[1:].upper()}: {str(error)[:_MAX_REASON]}") from None


def write_host(host: Host, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write all figures of a host as JSON, whole or not at all. ValueError: the name does not end in .json.
    FileExistsError: there is such a file, and ``force`` is not given."""
    require_writable(Path(path), force=force)
    write_json(host, path, force=force)


def require_writable(path: Path, *, force: bool) -> None:
    """Raise what ``write_host`` would, before there is anything to write."""
    if path.suffix != ".json":
        raise ValueError(f"{path}: the name of a host's file that is written ends in .json")
    require_new(path, force=force)
