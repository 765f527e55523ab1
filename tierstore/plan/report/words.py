"""Figures as people read them."""

import math
from typing import Final

from ...system.sizes import format_size

__all__ = [
    "count",
    "duration",
    "money",
    "named",
    "named_words",
    "quantity",
    "resource",
    "share",
    "significant",
    "watts",
]

_SCALES: Final = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"))
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MAX_NAME: Final = 60
_RESOURCES: Final = {"hbm": "HBM", "ddr": "DDR", "ssd": "SSD", "pcie": "PCIe"}


def significant(value: float, digits: int = 3) -> str:
    """A number with so many digits that count: 1234.5 -> "1,230", 0.012345 -> "0.0123"."""
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "unknown"
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def count(value: float) -> str:
    """Whole below ten thousand or so, then scaled: 12345678 -> "12.3 M"."""
    for scale, unit in _SCALES:
        if abs(value) >= scale and math.isfinite(value):
            return significant(value / scale) + unit
    return f"{value:,.0f}" if abs(value) >= 100 and math.isfinite(value) else significant(value)


def duration(seconds: float) -> str:
    """In the largest unit of which there is one: 0.00123 -> "1.23 ms"."""
    if not math.isfinite(seconds):
        return significant(seconds)
    for scale, unit in _DURATIONS:
        if abs(seconds) >= scale:
            return f"{significant(seconds / scale)} {unit}"
    return f"{significant(seconds * 1e9)} ns" if seconds else "0 s"


def share(part: float, digits: int = 1) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * part:.{digits}f} %"


def money(usd: float) -> str:
    """US dollars."""
    return f"${usd:,.0f}" if abs(usd) >= 100 else f"${usd:,.2f}"


def watts(value: float) -> str:
    return f"{value:,.0f} W" if value < 10_000 else f"{significant(value / 1000)} kW"


def quantity(value: float, unit: str) -> str:
    """An amount with its unit; bytes are scaled as sizes are."""
    if unit == "bytes":
        return format_size(value)
    return f"{count(value)} {unit}" if unit else count(value)


def named(text: str) -> str:
    """A name that a file gave: bounded, and without characters that a terminal would obey."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:_MAX_NAME])
    return shown + ("..." if len(text) > _MAX_NAME else "")


def named_words(text: str) -> str:
    """A sentence that may hold names that a file gave."""
    return " ".join(named(word) for word in text.split(" "))


def resource(name: str) -> str:
    """A resource's name with its abbreviations as they are written: "ssd reads" -> "SSD reads"."""
    return " ".join(_RESOURCES.get(word, word) for word in name.split(" "))
