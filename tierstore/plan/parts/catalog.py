"""The parts that ship, read from the files in ``data/``: one file a kind, one table a part, one entry a figure; and
what ``tierstore plan parts`` prints of them."""

import functools
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...settings.sections import nearest
from ...system.sizes import format_size
from ..host import Link, Memory, Processor, SoftwareCosts, Storage

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
"""What is known of a part, by its kind; the fields of ``plan.host`` say what each figure means. An accelerator's are
its memory's, and its own watts and price."""


class Figure(NamedTuple):
    """One figure of a part.

    Attributes:
        source: the document that it comes from, and its address; "" if it is assumed.
        assumption: what was assumed, in words; "" if it is the document's.
    """

    value: float
    source: str = ""
    assumption: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part."""

    kind: str
    """Of ``FIGURES``; "costs": what tierstore's own work takes on a processor."""
    name: str
    title: str
    figures: Mapping[str, Figure]
    link: str = ""
    """Of an accelerator: the name of the PCIe link that it is made for."""

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
    return tomllib.loads((DATA / "sources.toml").read_text(encoding="utf-8"))


@functools.cache
def _catalog() -> dict[str, dict[str, Part]]:
    return {
        kind: {
            name: Part(
                kind=kind,
                name=name,
                title=entries["title"],
                link=entries.get("link", ""),
                figures={figure: read_figure(entries[figure]) for figure in names if figure in entries},
            )
            for name, entries in tomllib.loads((DATA / f"{kind}.toml").read_text(encoding="utf-8")).items()
        }
        for kind, names in FIGURES.items()
    }


def parts(kind: str | None = None) -> tuple[Part, ...]:
    """All parts, or those of one kind; ValueError names the nearest kind."""
    if kind is not None:
        require_name(kind, FIGURES, "kind of part")
    return tuple(part for own, named in _catalog().items() if kind in (None, own) for part in named.values())


def load_part(kind: str, name: str) -> Part:
    """The part of this kind and name; ValueError names the nearest."""
    require_name(kind, FIGURES, "kind of part")
    require_name(name, _catalog()[kind], f"part of kind {kind!r} named")
    return _catalog()[kind][name]


@functools.cache
def example_hosts() -> dict[str, dict[str, Any]]:
    """The tables of the hosts that ship, by name."""
    return tomllib.loads((DATA / "hosts.toml").read_text(encoding="utf-8"))


def shown(name: str, value: float) -> str:
    """A figure as people read it; its name says the unit."""
    return format_size(value) if name == "capacity_bytes" else f"{value:,.4g}"


def describe_parts(*, sources: bool = False) -> str:
    """All parts and the hosts made of them, for people, each figure under its key in a host's file. A ``*`` marks a
    figure in which something is assumed."""
    lines, indent = [], " " * 27
    for kind, named in _catalog().items():
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
