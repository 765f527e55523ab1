"""What to say of arguments that other libraries have and ours do not."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T", bound=type)


def hinting(hints: Mapping[str, str]) -> Callable[[_T], _T]:
    """Decorates a class: an argument named in ``hints`` is a TypeError that says what to do instead."""

    def decorate(kind: _T) -> _T:
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
