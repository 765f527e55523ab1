"""What a plan assumes because nobody gave it, and what its answer becomes if that is off by a factor of two."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from ..system.sizes import format_size
from .prediction import Prediction, Setup, some
from .workload import Assumed, Figure, Workload, times

FACTORS: Final = (0.5, 2.0)
"""Of what was assumed."""


class Fleet(NamedTuple):
    """Hosts of one kind, and what they do.

    Attributes:
        machines: as ``machines_of``.
        usd: to buy; usd_a_month: with power.
        p99_s: of queries at the target's rate; None in training.
    """

    machines: str
    num_hosts: int
    usd: float
    usd_a_month: float
    watts: float
    samples_per_s: float
    p99_s: float | None
    bottleneck: str


class WhatIf(NamedTuple):
    """The answer if a figure were another.

    Attributes:
        factor, value: the figure, and of how many times what was assumed.
        fleet: None if nothing meets the target then.
        reason: why nothing meets the target; else "".
    """

    factor: float
    value: float
    fleet: Fleet | None
    reason: str = ""


class Assumption(NamedTuple):
    """Attributes:
    figure: a key of workloads and tables.
    value: what was taken; of tables of different values the first's.
    text: what was assumed, in words.
    instead: what to give, so that it need not be assumed.
    """

    figure: Figure
    value: float
    text: str
    instead: str
    what_if: tuple[WhatIf, ...]


def assumptions_of(workload: Workload, answer: Callable[[Workload], Prediction]) -> tuple[Assumption, ...]:
    """Of all that the workload assumes.

    Args:
        answer: of another workload; a ValueError says why there is none.
    """
    return tuple(
        Assumption(
            each.figure,
            _value(workload, each),
            _text(workload, each),
            "workload.dense_flops, or a run file" if each.figure == "dense_flops" else f"{each.figure}, or a trace",
            tuple(_what_if(workload, each, factor, answer) for factor in FACTORS),
        )
        for each in workload.assumed
    )


def machines_of(setup: Setup) -> str:
    """Hosts and their parts."""
    host = setup.host
    parts = [f"{format_size(host.ddr.capacity_bytes)} DDR", some(len(host.storage), "SSD")]
    parts += ["1 GPU"] if setup.hbm_bytes else []
    return f"{setup.num_hosts} x {host.name} ({', '.join(parts)})"


def describe_setup(setup: Setup) -> str:
    """Its machines and budgets, in one line."""
    host = setup.host
    of_it = [f"{format_size(setup.ddr_bytes)} of it for {setup.workload.dtype} rows"]
    of_it += [f"{format_size(setup.page_cache_bytes)} page cache"] if setup.page_cache_bytes else []
    parts = [f"{format_size(host.ddr.capacity_bytes)} DDR, {', '.join(of_it)}"]
    if setup.hbm_bytes:
        parts.append(f"1 GPU, {format_size(setup.hbm_bytes)} of its HBM for rows")
    parts += [some(len(host.storage), "SSD")] if host.storage else []
    parts += [f"{setup.workers} workers"] if setup.workers > 1 else []
    return f"{setup.num_hosts:,} x {host.name} ({'; '.join(parts)})"


def fleet_of(found: Prediction) -> Fleet:
    """The prediction's."""
    price, latency = found.price, found.latency
    return Fleet(
        machines=machines_of(found.setup),
        num_hosts=found.setup.num_hosts,
        usd=price.usd,
        usd_a_month=price.usd_a_month,
        watts=price.watts,
        samples_per_s=found.samples_per_s,
        p99_s=None if latency is None else latency.p99_s,
        bottleneck=found.bottleneck,
    )


def assumed_words(workload: Workload) -> str:
    """All of it, for a sentence."""
    return "; ".join(_text(workload, each) for each in workload.assumed)


def _value(workload: Workload, assumed: Assumed) -> float:
    if assumed.figure == "dense_flops":
        return workload.dense_flops
    first = next(table for table in workload.tables if table.name == assumed.tables[0])
    return float(getattr(first, assumed.figure))


def _text(workload: Workload, assumed: Assumed) -> str:
    value, every = _value(workload, assumed), some(len(workload.tables), "table")
    of = every if len(assumed.tables) == len(workload.tables) else f"{len(assumed.tables):,} of {every}"
    if assumed.figure == "dense_flops":
        layers = "the layers of MLPerf's DLRM-DCNv2 over these tables"
        return f"dense model: {value / 1e6:.3g} Mflop a sample, forward: {layers}"
    if assumed.figure == "pooling_factor":
        return f"pooling factor: {value:g} id a sample, in {of}"
    return f"skew: Zipf's law of exponent {value:g}, in {of}"


def _what_if(workload: Workload, assumed: Assumed, factor: float, answer: Callable[[Workload], Prediction]) -> WhatIf:
    value = factor * _value(workload, assumed)
    try:
        found = answer(replace(times(workload, assumed, factor), assumed=()))
    except ValueError as error:
        return WhatIf(factor, value, None, str(error))
    return WhatIf(factor, value, fleet_of(found))
