"""Arguments that are checked before they are used."""

from collections import Counter
from collections.abc import Collection, Sequence
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


def require_partition(towers: Sequence[Sequence[str]], names: Sequence[str], what: str) -> None:
    """ValueError unless each of ``names`` is in one of the towers, and each tower has one."""
    counts = Counter(name for tower in towers for name in tower)
    wrong = next((name for name in [*names, *counts] if counts[name] != 1 or name not in names), None)
    if wrong is not None:
        there = "is in no tower" if not counts[wrong] else "is in two towers" if wrong in names else "does not exist"
        raise ValueError(f"towers: {wrong!r} {there}; name each of the {what} once")
    if not all(towers):
        raise ValueError(f"towers: one of the {len(towers)} is empty; give each one of the {what} at least")
