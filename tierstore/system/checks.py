"""Arguments and settings that are checked before they are used, with errors that say what to give instead; and what
errors show of a value."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from numbers import Integral
from typing import Any, Final, NoReturn, TypeVar

_T = TypeVar("_T")
_Class = TypeVar("_Class", bound=type)
_MAX_CHARACTERS: Final = 80
_MAX_BITS: Final = 256  # Python refuses to print integers of more than 4300 digits
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


@contextlib.contextmanager
def packages_for(what: str, names: str) -> Iterator[None]:
    """Around imports: an ImportError says what they are for, and what to give to pip."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == __package__.partition(".")[0]:
            raise  # the package is broken: to install others mends nothing
        raise ImportError(f"{what} needs more packages ({error}): pip install {names}") from None


def require_choice(value: object, choices: Collection[str], name: str) -> None:
    """ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={excerpt(value)} is not one of {', '.join(choices)}")


def require_token(text: str, name: str = "token") -> str:
    """A token that a header can carry; else ValueError, which does not show it."""
    if not (text and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(f"{name} must be one line of printable ASCII without spaces, and not empty")
    return text


def require_int(value: object, name: str, low: int, high: int) -> int:
    """The value as an int, numpy's integers too. TypeError for what is none, ValueError unless in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not low <= (number := int(value)) <= high:
        raise ValueError(f"{name}={excerpt(number)} must be in [{low}, {high}]")
    return number


def by_kind(fields: Mapping[str, Any], kinds: Mapping[str, type[_T]], what: str) -> _T:
    """Settings kept as a dict, whose ``kind`` says of which class they are. ValueError for an unknown kind; what the
    class raises for other fields."""
    rest = dict(fields)
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"{what} kind {kind!r} is not one of {sorted(kinds)}")
    return kinds[kind](**rest)


def hinting(hints: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Decorates a class: an argument that other libraries have, named in ``hints``, is a TypeError that says what to
    do instead."""

    def decorate(kind: _Class) -> _Class:
        plain: Callable[..., None] = kind.__init__  # type: ignore[misc]

        @functools.wraps(plain)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in filter(hints.__contains__, given):
                raise TypeError(f"{kind.__name__} has no argument {name}: {hints[name]}")
            plain(self, *args, **given)

        kind.__init__ = checked  # type: ignore[misc]
        return kind

    return decorate


class Unpicklable:
    """Base of what holds files, locks or threads; whatever refers to it, as a module does, cannot be pickled either."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: its files, memory and threads are this process's. In another "
            'process open the store again, with mode="r" if this one writes it. To save a model with its rows: '
            "tierstore.checkpoint.save(store, model); without them: its state_dict(). copy.deepcopy of a model "
            "shares its tables"
        )
