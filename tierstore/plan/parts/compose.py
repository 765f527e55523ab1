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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ...settings.options import check_ranges, option
from ...settings.sections import converted, described
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


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """What a table of a part says beside figures."""

    part: str
    count: int = option(1, "such parts", low=1, high=_MOST_PARTS)
    channels: int = option(0, "of memory: how many channels they are in; 0: one each", low=0, high=_MOST_PARTS)
    link: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)


class _Some(NamedTuple):
    """Parts of one name.

    Attributes:
        link: of an accelerator: its way to the host.
        figures: of one of them.
    """

    entry: _Entry
    link: str
    figures: dict[str, float]

    def total(self, figure: str) -> float:
        return self.figures.get(figure, 0.0) * self.entry.count


@dataclass(frozen=True, kw_only=True)
class _Table:
    """A host's file; the tables of parts are looked at by kind."""

    name: str
    title: str = ""
    watts: float = 0.0
    usd: float = 0.0


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
    if not isinstance(host, Mapping):
        raise ValueError(f"expected a table, not {excerpt(host)}")
    for key in host:
        require_name(key, _KEYS, "key")
    for key in _REQUIRED:
        if key not in host:
            raise ValueError(f"key {key!r} is missing")
    own = described(_Table, {key: value for key, value in host.items() if key in vars(_Table)["__annotations__"]})
    processor = _some(host["processor"], "processors", "processor")
    memory = _some(host["memory"], "memory", "memory")
    network = _some(host["network"], "networks", "network")
    entry = host.get("costs", {"part": DEFAULT_COSTS})
    with naming("costs") if isinstance(entry, str) else nullcontext():
        costs = costs_of(entry) if isinstance(entry, str) else SoftwareCosts(**_some(entry, "costs", "costs").figures)
    drives, accelerators = _list(host, "storage", "storage"), _list(host, "accelerators", "accelerators")
    listed = (processor, memory, *drives, *accelerators, network)
    return Host(
        name=own.name,
        processor=_processor(processor),
        ddr=_memory(memory),
        network=_network(network),
        costs=costs,
        storage=tuple(each for some in drives for each in [Storage(**some.figures)] * some.entry.count),
        accelerators=tuple(each for some in accelerators for each in [_accelerator(some)] * some.entry.count),
        watts=own.watts,
        usd=own.usd,
        source="parts: " + ", ".join(f"{some.entry.count} x {some.entry.part}" for some in listed),
    )


def _list(host: Mapping[str, Any], key: str, kind: str) -> list[_Some]:
    entries = host.get(key, [])
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError(f'{key}: expected a list, as [{{ part = "NAME", count = 2 }}], not {excerpt(entries)}')
    return [_some(entry, kind, f"{key}[{number}]") for number, entry in enumerate(entries)]


def _some(entry: Any, kind: str, where: str) -> _Some:
    with naming(where):
        if not isinstance(entry, Mapping):
            raise ValueError(f'expected a table, as {{ part = "NAME", count = 2 }}, not {excerpt(entry)}')
        if "part" not in entry:
            raise ValueError("key 'part' is missing: the name of a part; tierstore plan parts lists them")
        others = {"memory": ("channels",), "accelerators": ("link",)}.get(kind, ())
        for key in entry:
            require_name(key, ("part", "count", *others, *FIGURES[kind]), "key")
        said = described(_Entry, {key: value for key, value in entry.items() if key not in FIGURES[kind]})
        part = load_part(kind, said.part)
        changed = {key: converted(value, float, key) for key, value in entry.items() if key in FIGURES[kind]}
        return _Some(said, said.link or part.link, part.values() | changed)


def _processor(some: _Some) -> Processor:
    cores = some.total("cores")
    if cores != int(cores):
        raise ValueError(f"processor: cores={cores}: expected a whole number")
    return Processor(cores=int(cores), flops=some.total("flops"), watts=some.total("watts"), usd=some.total("usd"))


def _memory(some: _Some) -> Memory:
    channels = some.entry.channels or some.entry.count
    return Memory(
        capacity_bytes=some.total("capacity_bytes"),
        bytes_per_s=some.figures["bytes_per_s"] * channels,
        row_bytes_per_s=some.figures["row_bytes_per_s"] * channels,
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
