"""What tiers save: the answer beside the cheapest fleet that has every row in memory, and both if an input is off."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple, Protocol, TypeVar

from .assumptions import Assumption, Fleet
from .host import Accelerator, Host, Memory, Storage
from .price import Pricing
from .workload import Workload, times

_Part = TypeVar("_Part", Host, Memory, Storage, Accelerator)


class Span(NamedTuple):
    """Of the plan's own inputs, and the least and most with one of them off."""

    low: float
    own: float
    high: float


class Gain(NamedTuple):
    """Attributes:
    memory: the cheapest that has every row in DDR or HBM and meets the target; None if none does.
    reason: why there is none; else "".
    usd_a_month, watts: what the answer has less than that; None if there is none.
    """

    memory: Fleet | None
    reason: str
    usd_a_month: Span | None
    watts: Span | None


class _Pair(NamedTuple):
    memory: Fleet | None
    tiers: Fleet | None


class Cheapest(Protocol):
    """Finds a fleet, or says why there is none."""

    def __call__(
        self, workload: Workload, *, in_memory: bool, prices: "Prices | None" = None
    ) -> tuple[Fleet | None, str]: ...


class Prices(NamedTuple):
    """Hosts and power as they would cost."""

    hosts: tuple[Host, ...]
    pricing: Pricing


def gain_of(
    workload: Workload, tiers: Fleet, assumptions: tuple[Assumption, ...], prices: Prices, cheapest: Cheapest
) -> Gain:
    """Of the answer, ``tiers``.

    Uncertain is what nobody gave, at half and twice of it, and prices (``Pricing.spread``), one at a time.
    """
    memory, reason = cheapest(workload, in_memory=True)
    if memory is None:
        return Gain(None, reason, None, None)
    of_prices = [
        _Pair(*(cheapest(workload, in_memory=each, prices=changed)[0] for each in (True, False)))
        for changed in _off_prices(prices)
    ]
    pairs = [_Pair(memory, tiers), *_off(workload, assumptions, cheapest), *of_prices]
    return Gain(memory, "", _span(pairs, lambda fleet: fleet.usd_a_month), _span(pairs, lambda fleet: fleet.watts))


def _off(workload: Workload, assumptions: tuple[Assumption, ...], cheapest: Cheapest) -> Iterator[_Pair]:
    for assumed, assumption in zip(workload.assumed, assumptions, strict=True):
        for what_if in assumption.what_if:
            other = replace(times(workload, assumed, what_if.factor), assumed=())
            yield _Pair(cheapest(other, in_memory=True)[0], what_if.fleet)


def _span(pairs: list[_Pair], figure: Callable[[Fleet], float]) -> Span:
    """Over those that have both fleets; the first is the plan's own."""
    saved = [figure(each.memory) - figure(each.tiers) for each in pairs if each.memory and each.tiers]
    return Span(min(saved), saved[0], max(saved))


# Prices that are off


def _off_prices(prices: Prices) -> Iterator[Prices]:
    spread = prices.pricing.spread
    for factor in (1 - spread, 1 + spread) if spread else ():
        for change in _CHANGES:
            yield prices._replace(hosts=tuple(change(host, factor) for host in prices.hosts))
        pricing = replace(prices.pricing, usd_per_kwh=factor * prices.pricing.usd_per_kwh)
        yield prices._replace(pricing=pricing)


def _dearer(part: _Part, factor: float) -> _Part:
    return replace(part, usd=factor * part.usd)


def _dearer_memory(host: Host, factor: float) -> Host:
    return replace(host, ddr=_dearer(host.ddr, factor))


def _dearer_drives(host: Host, factor: float) -> Host:
    return replace(host, storage=tuple(_dearer(drive, factor) for drive in host.storage))


def _dearer_rest(host: Host, factor: float) -> Host:
    gpus = tuple(_dearer(gpu, factor) for gpu in host.accelerators)
    processor = replace(host.processor, usd=factor * host.processor.usd)
    return replace(_dearer(host, factor), processor=processor, accelerators=gpus)


_CHANGES: Final[tuple[Callable[[Host, float], Host], ...]] = (_dearer_memory, _dearer_drives, _dearer_rest)
