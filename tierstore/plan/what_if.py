"""What the answer becomes with half and twice of what was assumed, and with a tenth more of each resource."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from . import host as hosts
from .demand import Demand
from .model import predict
from .prediction import Prediction, Setup, some
from .workload import Assumed, Figure, Workload, times

FACTORS: Final = (0.5, 2.0)  # of what was assumed
_STEP: Final = 0.1


class Instead(NamedTuple):
    """Another answer, or the reason why there is none."""

    prediction: Prediction | None
    reason: str = ""

    @classmethod
    def of(cls, answer: Callable[[], Prediction]) -> "Instead":
        try:
            return cls(answer())
        except ValueError as error:
            return cls(None, str(error))


class Assumption(NamedTuple):
    """``value``: what was taken, of tables of different values the first's; ``what_if``: the answer for each of
    ``FACTORS``."""

    figure: Figure
    value: float
    text: str
    what_if: tuple[Instead, ...]


def assumptions_of(workload: Workload, answer: Callable[[Workload], Prediction]) -> tuple[Assumption, ...]:
    """Of all that the workload assumes; ``answer``: of another workload, or a ValueError."""

    def off(assumed: Assumed, factor: float) -> Instead:
        return Instead.of(lambda: answer(replace(times(workload, assumed, factor), assumed=())))

    return tuple(
        Assumption(each.figure, *_words(workload, each), tuple(off(each, factor) for factor in FACTORS))
        for each in workload.assumed
    )


def assumed_words(workload: Workload) -> str:
    return "; ".join(_words(workload, each)[1] for each in workload.assumed)


def _words(workload: Workload, assumed: Assumed) -> tuple[float, str]:
    if assumed.figure == "dense_flops":
        flops, layers = workload.dense_flops, "the layers of MLPerf's DLRM-DCNv2 over these tables"
        return flops, f"dense model: {flops / 1e6:.3g} Mflop a sample, forward: {layers}"
    value = next(float(getattr(each, assumed.figure)) for each in workload.tables if each.name == assumed.tables[0])
    every = some(len(workload.tables), "table")
    of = every if len(assumed.tables) == len(workload.tables) else f"{len(assumed.tables):,} of {every}"
    if assumed.figure == "pooling_factor":
        return value, f"pooling factor: {value:g} id a sample, in {of}"
    return value, f"skew: Zipf's law of exponent {value:g}, in {of}"


class Marginal(NamedTuple):
    """``samples_per_s``: more than without, of all hosts; ``usd``: price of the change at all hosts, None where parts
    have no price."""

    resource: str
    change: str
    samples_per_s: float
    usd: float | None


def marginal_values(setup: Setup, demand: Demand) -> tuple[Marginal, ...]:
    """Of a tenth more of each resource, and of a core more, all else staying; the best first. More memory is used, by
    rows or as page cache; a tenth of the drives' reads or writes costs a tenth of them. Raises: as ``predict``."""
    before = predict(setup, demand).samples_per_s
    found = []
    for resource, changed, usd in _changes(setup):
        more = predict(changed, demand).samples_per_s - before
        found.append(Marginal(resource, "+1" if resource == "cores" else "+10 %", more, usd * setup.num_hosts or None))
    return tuple(sorted(found, key=lambda each: -each.samples_per_s))


def _changes(setup: Setup) -> Iterator[tuple[str, Setup, float]]:
    """(resource, setup with more of it, US dollars a host or 0)."""
    host, ddr, processor = setup.host, setup.host.ddr, setup.host.processor
    hbm, drives_usd = "host.accelerators.hbm", _STEP * sum(drive.usd for drive in host.storage)
    for resource, field in (("ddr", "ddr_bytes"), ("page cache", "page_cache_bytes")):
        if size := _STEP * getattr(setup, field):
            larger = replace(host, ddr=replace(ddr, capacity_bytes=ddr.capacity_bytes + size))
            yield resource, replace(_more(setup, field), host=larger), ddr.usd * size / ddr.capacity_bytes
    yield "ssd reads", _more(setup, "host.storage.reads_per_s", "host.storage.read_bytes_per_s"), drives_usd
    yield "ssd writes", _more(setup, "host.storage.write_bytes_per_s"), drives_usd
    yield "ddr bandwidth", _more(setup, "host.ddr.bytes_per_s", "host.ddr.row_bytes_per_s"), 0.0
    if setup.hosts > 1:
        yield "network", _more(setup, "host.network.bytes_per_s"), 0.0
    if setup.hbm_bytes:
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
    found: Setup = hosts.times(setup, 1 + _STEP, *paths)
    return found
