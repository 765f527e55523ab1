"""Arguments that are checked before they are used."""

from collections.abc import Collection
from numbers import Integral

from .excerpt import excerpt


def require_choice(value: object, choices: Collection[str], name: str) -> None:
    """ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={excerpt(value)} is not one of {', '.join(choices)}")


def require_int(value: object, name: str, low: int, high: int) -> int:
    """The value as an int, numpy's integers too. TypeError for what is none, ValueError unless in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not low <= (number := int(value)) <= high:
        raise ValueError(f"{name}={excerpt(number)} must be in [{low}, {high}]")
    return number
