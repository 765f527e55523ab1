"""A host as the sum of named parts.

::

    name = "shelf"                                    # the file begins with [host]; these are its keys
    processor = { part = "epyc-9354", count = 2 }
    memory = { part = "ddr5-4800-64gb", count = 24, channels = 24, usd = 310 }
    storage = [{ part = "samsung-pm9a3-7680gb", count = 4 }]
    accelerators = [{ part = "l4", link = "pcie4-x16" }]
    network = { part = "ethernet-25gb" }
    costs = "host.json"                               # or { part = "epyc-2-cores", admit_ns = 25 }
    watts = 150
    usd = 4000

A figure that is set beside ``part`` stands in place of that of *one* such part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from ...system.excerpt import excerpt
from ..host import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage
from .catalog import FIGURES, load_part, require_name

__all__ = ["DEFAULT_COSTS", "compose", "naming"]

DEFAULT_COSTS: Final = "epyc-2-cores"
_KEYS: Final = (
    "name",
    "title",
    "processor",
    "memory",
    "storage",
    "accelerators",
    "network",
    "costs",
    "watts",
    "usd",
)
_REQUIRED: Final = ("name", "processor", "memory", "network")
_MOST_PARTS: Final = 4096


class _Some(NamedTuple):
    """Parts of one name.

    Attributes:
        number: how many.
        figures: of one of them.
        channels: of memory: how many channels they are in.
        link: of an accelerator: its way to the host.
    """

    name: str
    number: int
    channels: int
    link: str
    figures: dict[str, float]

    def total(self, figure: str) -> float:
        return self.figures.get(figure, 0.0) * self.number


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Have a ValueError begin with where it is, if that is said."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def compose(host: Mapping[str, Any], costs_of: Callable[[str], SoftwareCosts]) -> Host:
    """The host that a table of parts describes; see the module's docstring.

    Args:
        costs_of: the costs in a host's file, given what ``costs`` says if that is a string.

    Raises:
        ValueError: an unknown or missing key, an unknown part, a figure out of range; names the key and the nearest.
    """
    for key in host:
        require_name(key, _KEYS, "key")
    for key in _REQUIRED:
        if key not in host:
            raise ValueError(f"key {key!r} is missing")
    with naming("processor"):
        processor = _some(host["processor"], "processors")
    with naming("memory"):
        memory = _some(host["memory"], "memory")
    with naming("network"):
        network = _some(host["network"], "networks")
    with naming("costs"):
        costs = _costs(host.get("costs", {"part": DEFAULT_COSTS}), costs_of)
    drives = list(_list(host, "storage", "storage"))
    accelerators = list(_list(host, "accelerators", "accelerators"))
    listed = (processor, memory, *drives, *accelerators, network)
    return Host(
        name=_text(host["name"], "name"),
        processor=_processor(processor),
        ddr=_memory(memory),
        network=_network(network),
        costs=costs,
        storage=tuple(each for some in drives for each in [Storage(**some.figures)] * some.number),
        accelerators=tuple(each for some in accelerators for each in [_accelerator(some)] * some.number),
        watts=_number(host.get("watts", 0.0), "watts"),
        usd=_number(host.get("usd", 0.0), "usd"),
        source="parts: " + ", ".join(f"{some.number} x {some.name}" for some in listed),
    )


def _list(host: Mapping[str, Any], key: str, kind: str) -> Iterator[_Some]:
    entries = host.get(key, [])
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f'{key}: expected a list, as [{{ part = "NAME", count = 2 }}], not {excerpt(entries)}')
    for number, entry in enumerate(entries):
        with naming(f"{key}[{number}]"):
            yield _some(entry, kind)


def _some(entry: Any, kind: str) -> _Some:
    if not isinstance(entry, Mapping):
        raise ValueError(f'expected a table, as {{ part = "NAME", count = 2 }}, not {excerpt(entry)}')
    if "part" not in entry:
        raise ValueError("key 'part' is missing: the name of a part; tierstore plan parts lists them")
    part = load_part(kind, _text(entry["part"], "part"))
    others = {"memory": ("channels",), "accelerators": ("link",)}.get(kind, ())
    known = ("part", "count", *others, *FIGURES[kind])
    for key in entry:
        require_name(key, known, "key")
    count = _count(entry.get("count", 1), "count")
    figures = part.values() | {name: _number(value, name) for name, value in entry.items() if name in FIGURES[kind]}
    return _Some(
        part.name,
        count,
        _count(entry.get("channels", count), "channels"),
        _text(entry["link"], "link") if "link" in entry else part.link,
        figures,
    )


def _costs(entry: Any, costs_of: Callable[[str], SoftwareCosts]) -> SoftwareCosts:
    return costs_of(entry) if isinstance(entry, str) else SoftwareCosts(**_some(entry, "costs").figures)


def _processor(some: _Some) -> Processor:
    cores = some.total("cores")
    if cores != int(cores):
        raise ValueError(f"processor: cores={cores}: expected a whole number")
    return Processor(cores=int(cores), flops=some.total("flops"), watts=some.total("watts"), usd=some.total("usd"))


def _memory(some: _Some) -> Memory:
    return Memory(
        capacity_bytes=some.total("capacity_bytes"),
        bytes_per_s=some.figures["bytes_per_s"] * some.channels,
        row_bytes_per_s=some.figures["row_bytes_per_s"] * some.channels,
        watts=some.total("watts"),
        usd=some.total("usd"),
    )


def _network(some: _Some) -> Link:
    return Link(bytes_per_s=some.total("bytes_per_s"), latency_us=some.figures["latency_us"])


def _accelerator(some: _Some) -> Accelerator:
    own = some.figures
    return Accelerator(
        hbm=Memory(**{name: own[name] for name in ("capacity_bytes", "bytes_per_s", "row_bytes_per_s")}),
        pcie=Link(**load_part("links", some.link).values()),
        peer=Link(bytes_per_s=own["peer_bytes_per_s"], latency_us=own["peer_latency_us"]),
        flops=own["flops"],
        watts=own["watts"],
        usd=own["usd"],
    )


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}={excerpt(value)}: expected a text")
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key}={excerpt(value)}: expected a number")
    return value


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_PARTS:
        raise ValueError(f"{key}={excerpt(value)}: expected a whole number from 1 to {_MOST_PARTS:,}")
    return value
