"""What a plan assumes because nobody gave it, and what its answer becomes if that is off by a factor of two."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from ..system.sizes import format_size
from .prediction import Prediction, Setup, some
from .workload import Assumed, Figure, Workload, times

FACTORS: Final = (0.5, 2.0)
"""Of what was assumed."""


class Instead(NamedTuple):
    """Another answer: ``prediction``, or the reason why there is none."""

    prediction: Prediction | None
    reason: str = ""

    @classmethod
    def of(cls, answer: Callable[[], Prediction]) -> "Instead":
        """A ValueError says why there is none."""
        try:
            return cls(answer())
        except ValueError as error:
            return cls(None, str(error))


class Assumption(NamedTuple):
    """Attributes:
    figure: a key of workloads and tables.
    value: what was taken; of tables of different values the first's.
    text: what was assumed, in words.
    what_if: the answer if the figure is ``factor`` times that, for each of ``FACTORS``.
    """

    figure: Figure
    value: float
    text: str
    what_if: tuple[Instead, ...]


def assumptions_of(workload: Workload, answer: Callable[[Workload], Prediction]) -> tuple[Assumption, ...]:
    """Of all that the workload assumes; ``answer``: of another workload, a ValueError says why there is none."""

    def off(assumed: Assumed, factor: float) -> Instead:
        return Instead.of(lambda: answer(replace(times(workload, assumed, factor), assumed=())))

    return tuple(
        Assumption(
            each.figure, _value(workload, each), _text(workload, each), tuple(off(each, factor) for factor in FACTORS)
        )
        for each in workload.assumed
    )


def machines_of(setup: Setup) -> str:
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
