"""Figures as people read them."""

import math
from typing import Final

from ...system.sizes import format_size

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
    for scale, unit in _DURATIONS:
        if abs(seconds) >= scale and math.isfinite(seconds):
            return f"{significant(seconds / scale)} {unit}"
    if not math.isfinite(seconds):
        return significant(seconds)
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
    return format_size(value) if unit == "bytes" else f"{count(value)} {unit}"


def named(text: str) -> str:
    """A sentence that may hold names that a file gave: each word bounded, and without characters that a terminal would
    obey."""

    def word(each: str) -> str:
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in each[:_MAX_NAME])
        return shown + ("..." if len(each) > _MAX_NAME else "")

    return " ".join(map(word, text.split(" ")))


def resource(name: str) -> str:
    """Of something that there can be more of, with its abbreviations as they are written: "page cache", "DDR"."""
    return " ".join(_RESOURCES.get(word, word) for word in name.split(" "))
