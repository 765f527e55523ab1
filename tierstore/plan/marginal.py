"""What a prediction would be with a tenth more of one resource, all else staying."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .demand import Demand
from .host import Host
from .model import predict
from .prediction import Setup

_STEP: Final = 0.1
_TENTH: Final = "+10 %"


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
    found = [
        Marginal(
            resource,
            "+1" if resource == "cores" else _TENTH,
            predict(changed, demand).samples_per_s - before,
            None if not usd else usd * setup.num_hosts,
        )
        for resource, changed, usd in _changes(setup)
    ]
    return tuple(sorted(found, key=lambda each: -each.samples_per_s))


def _changes(setup: Setup) -> Iterator[tuple[str, Setup, float]]:
    """(resource, setup with more of it, US dollars a host or 0)."""
    host = setup.host
    for resource, field in (("ddr", "ddr_bytes"), ("page cache", "page_cache_bytes")):
        if size := _STEP * getattr(setup, field):
            more: dict[str, Any] = {field: getattr(setup, field) + size, "host": _with_memory(host, size)}
            yield resource, replace(setup, **more), host.ddr.usd * size / host.ddr.capacity_bytes
    for way, names in (("reads", ("reads_per_s", "read_bytes_per_s")), ("writes", ("write_bytes_per_s",))):
        drives = tuple(_scaled(drive, *names) for drive in host.storage)
        usd = _STEP * sum(drive.usd for drive in host.storage)
        yield f"ssd {way}", replace(setup, host=replace(host, storage=drives)), usd
    faster = {"ddr bandwidth": replace(host, ddr=_scaled(host.ddr, "bytes_per_s", "row_bytes_per_s"))}
    if setup.hosts > 1:
        faster["network"] = replace(host, network=_scaled(host.network, "bytes_per_s"))
    if setup.hbm_bytes:
        gpu, size = setup.gpu, _STEP * setup.hbm_bytes
        larger = replace(gpu, hbm=replace(gpu.hbm, capacity_bytes=gpu.hbm.capacity_bytes + size))
        yield "hbm", replace(setup, host=replace(host, accelerators=(larger,)), hbm_bytes=setup.hbm_bytes + size), 0.0
        gpus = {
            "hbm bandwidth": replace(gpu, hbm=_scaled(gpu.hbm, "bytes_per_s", "row_bytes_per_s")),
            "pcie": replace(gpu, pcie=_scaled(gpu.pcie, "bytes_per_s")),
            "flops": _scaled(gpu, "flops"),
        }
        faster |= {resource: replace(host, accelerators=(changed,)) for resource, changed in gpus.items()}
    else:
        faster["flops"] = replace(host, processor=_scaled(host.processor, "flops"))
    yield from ((resource, replace(setup, host=changed), 0.0) for resource, changed in faster.items())
    # A core, with its share of the flops; lookups use it if they used all there were.
    processor, cores = host.processor, host.processor.cores
    grown = replace(processor, cores=cores + 1, flops=processor.flops * (cores + 1) / cores)
    threads = setup.threads + (setup.threads >= cores)
    yield "cores", replace(setup, host=replace(host, processor=grown), threads=threads), processor.usd / cores


def _scaled(part: Any, *names: str) -> Any:
    return replace(part, **{name: getattr(part, name) * (1 + _STEP) for name in names})


def _with_memory(host: Host, more_bytes: float) -> Host:
    return replace(host, ddr=replace(host.ddr, capacity_bytes=host.ddr.capacity_bytes + more_bytes))
