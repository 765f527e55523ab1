"""What to say after a name that is not known."""

import difflib
from collections.abc import Iterable
from typing import Final

_MAX_CHARACTERS: Final = 100
_MAX_NAMES: Final = 20


def nearest(name: str, known: Iterable[str], *, all_are: str = "there are") -> str:
    """The nearest of the known names, or some of them; ``all_are`` says what these are."""
    names = list(known)
    close = difflib.get_close_matches(name[:_MAX_CHARACTERS], names, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"{all_are} {', '.join(names[:_MAX_NAMES]) or 'none'}{', ...' if len(names) > _MAX_NAMES else ''}"
