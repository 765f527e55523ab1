"""Fields of frozen descriptions: each with its help and, where it is a number, with what it may be."""

from dataclasses import field, fields
from typing import Any, Final

from ..system.excerpt import excerpt

_MAX_COUNT: Final = 1 << 31
"""A bound far above any use, so that a typing error is reported at once."""


def option(default: Any, text: str, *, low: float | None = None, high: float = _MAX_COUNT) -> Any:
    """A dataclass's field; ``check_ranges`` looks at it if it has a ``low``."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


def check_ranges(description: Any) -> None:
    """Whether each field with a ``low`` is of its default's type and in [low, high]; an int may stand for a float.
    ValueError: names the field, its value and what is accepted."""
    for each in fields(description):
        low, high = each.metadata.get("low"), each.metadata.get("high", _MAX_COUNT)
        if low is None:
            continue
        value, kind = getattr(description, each.name), type(each.default)
        if type(value) not in (int, kind) or not low <= value <= high:
            what = "number" if kind is float else "whole number"
            raise ValueError(f"{each.name}={excerpt(value)}: expected a {what} from {low:,} to {high:,}")
