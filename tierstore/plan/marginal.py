"""What a prediction would be with a tenth more of one resource, all else staying."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from .demand import Demand
from .host import times
from .model import predict
from .prediction import Setup

_STEP: Final = 0.1


class Marginal(NamedTuple):
    """Attributes:
    resource: "ddr", "hbm", "page cache", "ssd reads", "cores", ...
    change: of each host's, "+10 %"; of cores "+1".
    samples_per_s: more than without, of all hosts.
    usd: price of the change at all hosts; None where the parts' prices do not say it.
    """

    resource: str
    change: str
    samples_per_s: float
    usd: float | None


def marginal_values(setup: Setup, demand: Demand) -> tuple[Marginal, ...]:
    """Of a tenth more of each resource, and of a core more; the best first.

    Memory that is more is used, by rows or as page cache; the host then has so much more of it. A tenth of the drives'
    reads or writes costs a tenth of the drives, as if there were such drives.

    Raises: as ``predict``.
    """
    before = predict(setup, demand).samples_per_s
    found = []
    for resource, changed, usd in _changes(setup):
        more = predict(changed, demand).samples_per_s - before
        found.append(Marginal(resource, "+1" if resource == "cores" else "+10 %", more, usd * setup.num_hosts or None))
    return tuple(sorted(found, key=lambda each: -each.samples_per_s))


def _changes(setup: Setup) -> Iterator[tuple[str, Setup, float]]:
    """(resource, setup with more of it, US dollars a host or 0)."""
    host, ddr, processor = setup.host, setup.host.ddr, setup.host.processor
    for resource, field in (("ddr", "ddr_bytes"), ("page cache", "page_cache_bytes")):
        if size := _STEP * getattr(setup, field):
            larger = replace(host, ddr=replace(ddr, capacity_bytes=ddr.capacity_bytes + size))
            yield resource, replace(_more(setup, field), host=larger), ddr.usd * size / ddr.capacity_bytes
    drives_usd = _STEP * sum(drive.usd for drive in host.storage)
    yield "ssd reads", _more(setup, "host.storage.reads_per_s", "host.storage.read_bytes_per_s"), drives_usd
    yield "ssd writes", _more(setup, "host.storage.write_bytes_per_s"), drives_usd
    yield "ddr bandwidth", _more(setup, "host.ddr.bytes_per_s", "host.ddr.row_bytes_per_s"), 0.0
    if setup.hosts > 1:
        yield "network", _more(setup, "host.network.bytes_per_s"), 0.0
    if setup.hbm_bytes:
        hbm = "host.accelerators.hbm"
        yield "hbm", _more(setup, "hbm_bytes", f"{hbm}.capacity_bytes"), 0.0
        yield "hbm bandwidth", _more(setup, f"{hbm}.bytes_per_s", f"{hbm}.row_bytes_per_s"), 0.0
        yield "pcie", _more(setup, "host.accelerators.pcie.bytes_per_s"), 0.0
    yield "flops", _more(setup, "host.accelerators.flops" if setup.hbm_bytes else "host.processor.flops"), 0.0
    # A core, with its share of the flops; lookups use it if they used all there were.
    cores = processor.cores
    grown = replace(processor, cores=cores + 1, flops=processor.flops * (cores + 1) / cores)
    threads = setup.threads + (setup.threads >= cores)
    yield "cores", replace(setup, host=replace(host, processor=grown), threads=threads), processor.usd / cores


def _more(setup: Setup, *paths: str) -> Setup:
    """With a tenth more of some fields of fields."""
    found: Setup = times(setup, 1 + _STEP, *paths)
    return found
