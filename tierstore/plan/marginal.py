"""What a little more of each resource would bring: finite differences of the prediction."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .demand import Demand
from .host import Host
from .model import predict
from .prediction import Setup
from .price import Pricing

__all__ = ["Marginal", "marginal_values"]

STEP: Final = 0.1
GIB: Final = float(2**30)


class Marginal(NamedTuple):
    """Attributes:
    resource: "ddr", "hbm", "page cache", "ssd reads", "cores", ...
    change: of each host's, as "+10 %" or "+1 GiB".
    samples_per_s: more than without, of all hosts.
    usd: price of the change at all hosts; None where the parts' prices do not say it.
    """

    resource: str
    change: str
    samples_per_s: float
    usd: float | None


class _Change(NamedTuple):
    resource: str
    text: str
    setup: Setup
    usd: float | None


def marginal_values(setup: Setup, demand: Demand, pricing: Pricing | None = None) -> tuple[Marginal, ...]:
    """Of a tenth more of each resource, of 1 GiB more of each kind of memory, and of a core more; the best first.

    Memory that is more is used, by rows or as page cache; the host then has so much more of it. A tenth of the drives'
    reads or writes costs a tenth of the drives, as if there were such drives.

    Raises: as ``predict``.
    """
    before = predict(setup, demand, pricing=pricing).samples_per_s
    found = [
        Marginal(
            change.resource,
            change.text,
            predict(change.setup, demand, pricing=pricing).samples_per_s - before,
            None if change.usd is None else change.usd * setup.num_hosts,
        )
        for change in _changes(setup)
    ]
    return tuple(sorted(found, key=lambda each: -each.samples_per_s))


def _changes(setup: Setup) -> Iterator[_Change]:
    tenth = f"+{STEP:.0%}".replace("%", " %")
    for resource, own in (("ddr", setup.ddr_bytes), ("page cache", setup.page_cache_bytes)):
        if own:
            yield _more_ddr(setup, resource, STEP * own, tenth)
        yield _more_ddr(setup, resource, GIB, "+1 GiB")
    if setup.hbm_bytes:
        yield _more_hbm(setup, STEP * setup.hbm_bytes, tenth)
        yield _more_hbm(setup, GIB, "+1 GiB")
    for resource, host, usd in _faster(setup):
        yield _Change(resource, tenth, replace(setup, host=host), usd)
    yield _more_cores(setup)


def _more_ddr(setup: Setup, resource: str, size: float, text: str) -> _Change:
    memory = setup.host.ddr
    grown = replace(memory, capacity_bytes=memory.capacity_bytes + size)
    field = "ddr_bytes" if resource == "ddr" else "page_cache_bytes"
    more: dict[str, Any] = {field: getattr(setup, field) + size, "host": replace(setup.host, ddr=grown)}
    usd = memory.usd / memory.capacity_bytes * size if memory.usd else None
    return _Change(resource, text, replace(setup, **more), usd)


def _more_hbm(setup: Setup, size: float, text: str) -> _Change:
    grown = tuple(
        replace(each, hbm=replace(each.hbm, capacity_bytes=each.hbm.capacity_bytes + size))
        for each in setup.host.accelerators
    )
    more = replace(setup, hbm_bytes=setup.hbm_bytes + size, host=replace(setup.host, accelerators=grown))
    return _Change("hbm", text, more, None)


def _faster(setup: Setup) -> Iterator[tuple[str, Host, float | None]]:
    """(resource, host of which it is a tenth faster, price)."""
    host = setup.host
    drives_usd = STEP * sum(drive.usd for drive in host.storage) or None
    for way, names in (("reads", ("reads_per_s", "read_bytes_per_s")), ("writes", ("write_bytes_per_s",))):
        drives = tuple(_scaled(drive, *names) for drive in host.storage)
        yield f"ssd {way}", replace(host, storage=drives), drives_usd
    yield "ddr bandwidth", replace(host, ddr=_scaled(host.ddr, "bytes_per_s", "row_bytes_per_s")), None
    if setup.hosts > 1:
        yield "network", replace(host, network=_scaled(host.network, "bytes_per_s")), None
    if not setup.hbm_bytes:
        yield "flops", replace(host, processor=_scaled(host.processor, "flops")), None
        return
    accelerators = host.accelerators
    linked = tuple(replace(each, pcie=_scaled(each.pcie, "bytes_per_s")) for each in accelerators)
    yield "pcie", replace(host, accelerators=linked), None
    wide = tuple(replace(each, hbm=_scaled(each.hbm, "bytes_per_s", "row_bytes_per_s")) for each in accelerators)
    yield "hbm bandwidth", replace(host, accelerators=wide), None
    yield "flops", replace(host, accelerators=tuple(_scaled(each, "flops") for each in accelerators)), None


def _scaled(part: Any, *names: str) -> Any:
    return replace(part, **{name: getattr(part, name) * (1 + STEP) for name in names})


def _more_cores(setup: Setup) -> _Change:
    """One, with its share of the flops; lookups use it if they used all there were."""
    processor = setup.host.processor
    cores = processor.cores + 1
    grown = replace(processor, cores=cores, flops=processor.flops * cores / processor.cores)
    threads = setup.threads + (setup.threads >= processor.cores)
    usd = processor.usd / processor.cores if processor.usd else None
    return _Change("cores", "+1", replace(setup, host=replace(setup.host, processor=grown), threads=threads), usd)
