"""What a prediction would be were one thing, or two, another, all else staying: a little more of each resource (finite
differences), or much less and much more of a quantity."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .demand import Demand
from .host import Host
from .model import predict
from .prediction import Prediction, Setup
from .result import Grid, Line, Marginal

_STEP: Final = 0.1
_GIB: Final = float(2**30)
_GRID_SIZES: Final = 9
_FACTORS: Final = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SHIFTS: Final = (-0.2, -0.1, 0.0, 0.1, 0.2)
_BATCH_FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_LEAST: Final = 1024
"""The smallest budget is one of so many parts of all rows."""


class _Change(NamedTuple):
    resource: str
    text: str
    setup: Setup
    usd: float | None


def marginal_values(setup: Setup, demand: Demand) -> tuple[Marginal, ...]:
    """Of a tenth more of each resource, of 1 GiB more of each kind of memory, and of a core more; the best first.

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
    tenth = f"+{_STEP:.0%}".replace("%", " %")
    for resource, own in (("ddr", setup.ddr_bytes), ("page cache", setup.page_cache_bytes)):
        if own:
            yield _more_ddr(setup, resource, _STEP * own, tenth)
        yield _more_ddr(setup, resource, _GIB, "+1 GiB")
    if setup.hbm_bytes:
        yield _more_hbm(setup, _STEP * setup.hbm_bytes, tenth)
        yield _more_hbm(setup, _GIB, "+1 GiB")
    for resource, host, usd in _faster(setup):
        yield _Change(resource, tenth, replace(setup, host=host), usd)
    yield _more_cores(setup)


def _more_ddr(setup: Setup, resource: str, size: float, text: str) -> _Change:
    memory = setup.host.ddr
    field = "ddr_bytes" if resource == "ddr" else "page_cache_bytes"
    more: dict[str, Any] = {field: getattr(setup, field) + size, "host": _with_memory(setup.host, size)}
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
    drives_usd = _STEP * sum(drive.usd for drive in host.storage) or None
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
    return replace(part, **{name: getattr(part, name) * (1 + _STEP) for name in names})


def _more_cores(setup: Setup) -> _Change:
    """One, with its share of the flops; lookups use it if they used all there were."""
    processor = setup.host.processor
    cores = processor.cores + 1
    grown = replace(processor, cores=cores, flops=processor.flops * cores / processor.cores)
    threads = setup.threads + (setup.threads >= processor.cores)
    usd = processor.usd / processor.cores if processor.usd else None
    return _Change("cores", "+1", replace(setup, host=replace(setup.host, processor=grown), threads=threads), usd)


# From much less to much more


def _ddr_sizes(setup: Setup, steps: int = 2) -> tuple[float, ...]:
    """Budgets around the setup's, which is among them: from a thousandth of a host's rows to all of them and more.

    Args:
        steps: to each doubling.
    """
    whole = setup.workload.table_bytes / setup.hosts
    low, high = min(setup.ddr_bytes, whole / _LEAST), max(2 * setup.ddr_bytes, 1.5 * whole)
    first = math.floor(steps * math.log2(low / setup.ddr_bytes))
    last = math.ceil(steps * math.log2(high / setup.ddr_bytes))
    return tuple(setup.ddr_bytes * 2 ** (power / steps) for power in range(first, last + 1))


def ddr_line(setup: Setup, demand: Demand, steps: int = 2) -> Line:
    """Over the budget of host memory; beyond what the host has, as if it had more."""
    sizes = _ddr_sizes(setup, steps)
    return _line("DDR for rows", "bytes", sizes, setup.ddr_bytes, lambda size: predict(_with_ddr(setup, size), demand))


def _with_ddr(setup: Setup, ddr_bytes: float) -> Setup:
    """In a host that has room for it."""
    more = max(0.0, ddr_bytes - setup.ddr_bytes)
    return replace(setup, ddr_bytes=ddr_bytes, host=_with_memory(setup.host, more))


def _with_memory(host: Host, more_bytes: float) -> Host:
    return replace(host, ddr=replace(host.ddr, capacity_bytes=host.ddr.capacity_bytes + more_bytes))


def _line(
    quantity: str, unit: str, values: Iterable[float], chosen: float, predicted: Callable[[float], Prediction]
) -> Line:
    """Values at which nothing can be predicted, such as too little memory for a store to begin with, are left out."""
    found: dict[float, Prediction] = {}
    for value in values:
        with contextlib.suppress(ValueError):
            found[value] = predicted(value)
    seconds = [{lane.name: lane.seconds for lane in each.lanes if lane.seconds} for each in found.values()]
    names = dict.fromkeys(name for each in seconds for name in each)
    return Line(
        quantity,
        unit,
        tuple(found),
        tuple(prediction.step_s for prediction in found.values()),
        tuple(prediction.samples_per_s for prediction in found.values()),
        {name: tuple(each.get(name, 0.0) for each in seconds) for name in names},
        chosen,
    )


def batch_line(setup: Setup, policy: str) -> Line:
    """Over the samples of a batch; by the law of the tables, since a trace has its own batches."""

    def at(samples: float) -> Prediction:
        workload = replace(setup.workload, batch_samples=int(samples))
        return predict(replace(setup, workload=workload), Demand.analytic(workload, policy))

    now = setup.workload.batch_samples
    values = sorted({float(max(1, round(now * factor))) for factor in _BATCH_FACTORS})
    return _line("batch", "samples", values, float(now), at)


def exponent_line(setup: Setup, policy: str) -> Line:
    """Over how uneven the accesses are: the exponents of all tables, moved together."""

    def at(shift: float) -> Prediction:
        tables = tuple(replace(each, exponent=max(0.0, each.exponent + shift)) for each in setup.workload.tables)
        workload = replace(setup.workload, tables=tables)
        return predict(replace(setup, workload=workload), Demand.analytic(workload, policy))

    return _line("change of all exponents", "", _SHIFTS, 0.0, at)


def grid_of(setup: Setup, demand: Demand) -> Grid | None:
    """Budgets of memory by reads of the drives; None without drives."""
    drives = setup.host.storage
    now = sum(drive.reads_per_s for drive in drives)
    # The plan's own is among the most, and what is smallest changes least.
    sizes = ddr_line(setup, demand, steps=1).values[-_GRID_SIZES:]
    if not now or len(sizes) < 2:
        return None

    def samples_per_s(size: float, factor: float) -> float:
        own = _with_ddr(setup, size)
        faster = tuple(replace(drive, reads_per_s=max(1.0, drive.reads_per_s * factor)) for drive in drives)
        return predict(replace(own, host=replace(own.host, storage=faster)), demand).samples_per_s

    rows = tuple(tuple(samples_per_s(size, factor) for size in sizes) for factor in _FACTORS)
    return Grid(sizes, tuple(now * factor for factor in _FACTORS), rows, setup.ddr_bytes, now)
