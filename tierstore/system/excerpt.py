"""Values in error messages: enough to know them by, however large they are."""

from collections.abc import Collection
from itertools import islice
from typing import Final

_MAX_CHARACTERS: Final = 80
_MAX_BITS: Final = 256
"""Python refuses to print integers of more than 4300 digits."""
_MAX_NAMES: Final = 40


def excerpt(value: object, limit: int = _MAX_CHARACTERS) -> str:
    """``repr(value)``, cut to some ``limit`` characters: what comes from a file may be long and hold control
    characters."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:limit]) + ("..." if len(value) > limit else "")
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= limit else text[:limit] + "..."


def excerpt_names(names: Collection[str]) -> str:
    """The first few of many names, and how many more there are."""
    shown = ", ".join(excerpt(name).replace("'", "") for name in islice(names, _MAX_NAMES))
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown
