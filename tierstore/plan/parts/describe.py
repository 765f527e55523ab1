"""What ``tierstore plan parts`` prints."""

from collections.abc import Iterator
from typing import Final

from ...system.sizes import format_size
from .catalog import FIGURES, Part, parts
from .host_files import example_hosts

__all__ = ["describe_parts"]

_TITLES: Final = {
    "processors": "Processors, a socket",
    "memory": "Memory, a DIMM in a channel of its own",
    "accelerators": "Accelerators",
    "links": "Links to an accelerator, one direction",
    "storage": "SSDs",
    "networks": "Network ports, one direction",
    "costs": "tierstore's own work, on one core",
}
_UNITS: Final = {
    "cores": ("cores", 1.0, ""),
    "flops": ("matrix products", 1e-12, " TFLOP/s"),
    "bytes_per_s": ("in order", 1e-9, " GB/s"),
    "row_bytes_per_s": ("rows at random", 1e-9, " GB/s"),
    "peer_bytes_per_s": ("to its peers", 1e-9, " GB/s"),
    "peer_latency_us": ("after", 1.0, " us"),
    "latency_us": ("after", 1.0, " us"),
    "read_latency_us": ("one read", 1.0, " us"),
    "reads_per_s": ("reads", 1e-3, "k/s"),
    "read_bytes_per_s": ("read", 1e-9, " GB/s"),
    "write_bytes_per_s": ("written", 1e-9, " GB/s"),
    "drive_writes_a_day": ("drive writes a day", 1.0, ""),
    "watts": ("", 1.0, " W"),
    "usd": ("", 1.0, " USD"),
}
_PER_LINE: Final = 5


def describe_parts(*, sources: bool = False) -> str:
    """All parts and the hosts made of them, for people. A ``*`` marks a figure in which something is assumed.

    Args:
        sources: say with each figure where it comes from.
    """
    return "\n".join(_lines(sources))


def _lines(sources: bool) -> Iterator[str]:
    for kind in FIGURES:
        yield f"{_TITLES[kind]} ({kind})"
        for part in parts(kind):
            yield f"  {part.name:24} {part.title}"
            yield from _with_sources(part) if sources else _in_short(part)
        yield ""
    yield "Hosts"
    for name, host in example_hosts().items():
        yield f"  {name:24} {host['title']}"
    yield ""
    yield "* something is assumed in it. All prices are assumptions: put yours in a file of your own."


def _in_short(part: Part) -> Iterator[str]:
    shown = [_shown(part, name) for name in part.figures]
    for first in range(0, len(shown), _PER_LINE):
        yield " " * 27 + ", ".join(shown[first : first + _PER_LINE])


def _with_sources(part: Part) -> Iterator[str]:
    for name, figure in part.figures.items():
        why = "; ".join(text for text in (figure.source, figure.assumption and f"assumed: {figure.assumption}") if text)
        yield f"      {_shown(part, name)}: {why}"


def _shown(part: Part, name: str) -> str:
    figure = part.figures[name]
    mark = "*" if figure.assumption else ""
    if name == "capacity_bytes":
        return f"{format_size(figure.value)}{mark}"
    what, scale, unit = _UNITS.get(name, (name, 1.0, ""))
    value = figure.value * scale
    return f"{what} {value:,.0f}{unit}{mark}".strip() if value >= 1000 else f"{what} {value:.4g}{unit}{mark}".strip()
