"""What hosts cost, and how fast their drives wear out."""

import math
from dataclasses import dataclass
from typing import Any, Final

from ..settings.sections import option
from .host import Checked, Host, Storage
from .prediction import Prediction, Price

_SECONDS_A_DAY: Final = 86_400.0
_DAYS_A_MONTH: Final = 365.25 / 12


@dataclass(frozen=True, kw_only=True)
class Pricing(Checked):
    """Assumptions of money and time."""

    usd_per_kwh: float = option(0.12, "dollars a kilowatt-hour", low=0)
    pue: float = option(1.3, "watts of the building for each watt of a host (power usage effectiveness)", low=1)
    years: float = option(4.0, "for which hosts are used, and over which their price is spread", low=0.01, high=100)
    hours_a_day: float = option(24.0, "of use", low=0.01, high=24)
    warranty_years: float = option(5.0, "of drives: those over which their writes a day are rated", low=0.01, high=100)


def price_of(host: Host, count: int, pricing: Pricing) -> Price:
    """Of so many hosts: what they draw, what they cost, and both a month. An accelerator's include its memory's.

    ``usd / months + watts / 1000 * PUE * hours a month * usd per kWh``.
    """
    parts: tuple[Any, ...] = (host, host.processor, host.ddr, *host.storage, *host.accelerators)
    watts, usd = count * sum(part.watts for part in parts), count * sum(part.usd for part in parts)
    power = watts / 1000 * pricing.pue * pricing.hours_a_day * _DAYS_A_MONTH * pricing.usd_per_kwh
    return Price(watts, usd, usd / (12 * pricing.years) + power)


def drive_writes_a_day(host: Host, bytes_per_s: float, pricing: Pricing) -> float:
    """How often the most worn drive is written over in a day; drives share what is written as they are fast."""
    if not bytes_per_s:
        return 0.0
    speed = sum(drive.write_bytes_per_s for drive in host.storage)
    a_day = bytes_per_s * _SECONDS_A_DAY * pricing.hours_a_day / 24
    return a_day / speed * max(map(_wear, host.storage))


def years_of_life(prediction: Prediction, pricing: Pricing) -> float:
    """Until the first drive has been written as often as it is rated for; infinite if nothing is written."""
    drives, writes = prediction.setup.host.storage, prediction.drive_writes_a_day
    if not writes:
        return math.inf
    most = max(map(_wear, drives))
    return pricing.warranty_years * min(drive.drive_writes_a_day * most / _wear(drive) for drive in drives) / writes


def _wear(drive: Storage) -> float:
    """How fast it is written over beside other drives of its host."""
    return drive.write_bytes_per_s / drive.capacity_bytes
