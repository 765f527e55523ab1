"""What a prediction would be with a tenth more of one resource, all else staying; and over the memory for rows."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .demand import Demand
from .host import Host
from .model import predict
from .prediction import Setup

_STEP: Final = 0.1
_TENTH: Final = "+10 %"
_STEPS_AN_OCTAVE: Final = 2
_LEAST: Final = 1024
"""The smallest budget is one of so many parts of all rows."""


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


class OfMemory(NamedTuple):
    """The step with another budget of host memory."""

    ddr_bytes: float
    step_s: float
    samples_per_s: float


class _Change(NamedTuple):
    resource: str
    setup: Setup
    usd: float | None = None
    text: str = _TENTH


def marginal_values(setup: Setup, demand: Demand) -> tuple[Marginal, ...]:
    """Of a tenth more of each resource, and of a core more; the best first.

    Memory that is more is used, by rows or as page cache; the host then has so much more of it. A tenth of the drives'
    reads or writes costs a tenth of the drives, as if there were such drives.

    Raises: as ``predict``.
    """
    before = predict(setup, demand).samples_per_s
    found = [
        Marginal(
            change.resource,
            change.text,
            predict(change.setup, demand).samples_per_s - before,
            None if change.usd is None else change.usd * setup.num_hosts,
        )
        for change in _changes(setup)
    ]
    return tuple(sorted(found, key=lambda each: -each.samples_per_s))


def _changes(setup: Setup) -> Iterator[_Change]:
    for resource, field in (("ddr", "ddr_bytes"), ("page cache", "page_cache_bytes")):
        if size := _STEP * getattr(setup, field):
            more: dict[str, Any] = {field: getattr(setup, field) + size, "host": _with_memory(setup.host, size)}
            memory = setup.host.ddr
            usd = memory.usd / memory.capacity_bytes * size if memory.usd else None
            yield _Change(resource, replace(setup, **more), usd)
    host = setup.host
    drives_usd = _STEP * sum(drive.usd for drive in host.storage) or None
    for way, names in (("reads", ("reads_per_s", "read_bytes_per_s")), ("writes", ("write_bytes_per_s",))):
        drives = tuple(_scaled(drive, *names) for drive in host.storage)
        yield _Change(f"ssd {way}", replace(setup, host=replace(host, storage=drives)), drives_usd)
    faster = {"ddr bandwidth": replace(host, ddr=_scaled(host.ddr, "bytes_per_s", "row_bytes_per_s"))}
    if setup.hosts > 1:
        faster["network"] = replace(host, network=_scaled(host.network, "bytes_per_s"))
    if not setup.hbm_bytes:
        faster["flops"] = replace(host, processor=_scaled(host.processor, "flops"))
    yield from (_Change(resource, replace(setup, host=changed)) for resource, changed in faster.items())
    if setup.hbm_bytes:
        yield from _of_gpu(setup)
    yield _more_cores(setup)


def _of_gpu(setup: Setup) -> Iterator[_Change]:
    gpu, size = setup.gpu, _STEP * setup.hbm_bytes

    def having(changed: Any) -> Setup:
        return replace(setup, host=replace(setup.host, accelerators=(changed,)))

    larger = having(replace(gpu, hbm=replace(gpu.hbm, capacity_bytes=gpu.hbm.capacity_bytes + size)))
    yield _Change("hbm", replace(larger, hbm_bytes=setup.hbm_bytes + size))
    yield _Change("hbm bandwidth", having(replace(gpu, hbm=_scaled(gpu.hbm, "bytes_per_s", "row_bytes_per_s"))))
    yield _Change("pcie", having(replace(gpu, pcie=_scaled(gpu.pcie, "bytes_per_s"))))
    yield _Change("flops", having(_scaled(gpu, "flops")))


def _scaled(part: Any, *names: str) -> Any:
    return replace(part, **{name: getattr(part, name) * (1 + _STEP) for name in names})


def _more_cores(setup: Setup) -> _Change:
    """One, with its share of the flops; lookups use it if they used all there were."""
    processor = setup.host.processor
    cores = processor.cores + 1
    grown = replace(processor, cores=cores, flops=processor.flops * cores / processor.cores)
    threads = setup.threads + (setup.threads >= processor.cores)
    usd = processor.usd / processor.cores if processor.usd else None
    return _Change("cores", replace(setup, host=replace(setup.host, processor=grown), threads=threads), usd, "+1")


def of_memory(setup: Setup, demand: Demand) -> tuple[OfMemory, ...]:
    """Over the budget of host memory, the setup's own among them, from a thousandth of a host's rows to all of them and
    more; beyond what the host has, as if it had more. Too little for a store to begin with is left out."""
    now, whole = setup.ddr_bytes, setup.workload.table_bytes / setup.hosts
    low, high = min(now, whole / _LEAST), max(2 * now, 1.5 * whole)
    first = math.floor(_STEPS_AN_OCTAVE * math.log2(low / now))
    last = math.ceil(_STEPS_AN_OCTAVE * math.log2(high / now))
    found = []
    for power in range(first, last + 1):
        size = now * 2 ** (power / _STEPS_AN_OCTAVE)
        own = replace(setup, ddr_bytes=size, host=_with_memory(setup.host, max(0.0, size - now)))
        with contextlib.suppress(ValueError):
            prediction = predict(own, demand)
            found.append(OfMemory(size, prediction.step_s, prediction.samples_per_s))
    return tuple(found)


def _with_memory(host: Host, more_bytes: float) -> Host:
    return replace(host, ddr=replace(host.ddr, capacity_bytes=host.ddr.capacity_bytes + more_bytes))
