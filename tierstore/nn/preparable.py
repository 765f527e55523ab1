"""What the prefetch pipeline drives: a module over tables, or several as one."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from .function import Announced


class Preparable(Protocol):
    """A module whose rows can be brought in ahead: those over tables, as ``TieredEmbeddingBag``.

    Attributes:
        is_collective: other ranks must bring theirs in at the same time.
    """

    is_collective: bool

    def ahead(self) -> "Preparable":
        """What brings the rows of one pass in."""

    def has_all_rows(self) -> bool:
        """Whether all rows of its tables are in memory to stay: there is nothing to bring in."""

    def begin(self, batches: Any) -> Iterator[Any]:
        """``iter(batches)``, which the thread that calls ``prepare`` reads from."""

    def end(self) -> None:
        """The pass brings no more in; called once by whom ``prepare`` is called by."""

    def prepare(self, features: Any) -> Any:
        """Read ids for the forward call that will be given ``features``; returns a ticket."""

    def has_room(self, ticket: Any) -> bool:
        """Whether the rows would stay until that call."""

    def bring_in(self, ticket: Any) -> bool:
        """Bring in the rows that stay until that call; returns whether all do. Called once."""

    def forget(self, ticket: Any) -> None:
        """Release what that ticket stands for, if no forward took it."""

    def announce(self, features: Any) -> Announced | None:
        """Tell the caches that the rows of ``features`` will be used, after those announced before; None if there is
        no room for that yet."""


class _Several:
    def __init__(self, modules: Sequence[Preparable]) -> None:
        self._modules = modules
        self.is_collective = any(module.is_collective for module in modules)

    def ahead(self) -> "_Several":
        return _Several([module.ahead() for module in self._modules])

    def has_all_rows(self) -> bool:
        return all(module.has_all_rows() for module in self._modules)

    def begin(self, batches: Any) -> Iterator[Any]:
        return next((each for each in self._modules if each.is_collective), self._modules[0]).begin(batches)

    def end(self) -> None:
        for module in self._modules:
            module.end()

    def prepare(self, features: Any) -> list[Any]:
        tickets: list[Any] = []
        try:
            for module, own in self._pairs(features):
                tickets.append(module.prepare(own))
        except BaseException:
            self.forget(tickets)
            raise
        return tickets

    def has_room(self, ticket: list[Any]) -> bool:
        return all(module.has_room(own) for module, own in zip(self._modules, ticket, strict=True))

    def bring_in(self, ticket: list[Any]) -> bool:
        are_in = [module.bring_in(own) for module, own in zip(self._modules, ticket, strict=True)]
        return all(are_in)

    def forget(self, ticket: list[Any]) -> None:
        for module, own in zip(self._modules, ticket, strict=False):
            module.forget(own)

    def announce(self, features: Any) -> Announced | None:
        announced = Announced([])
        with announced.whole():
            for module, own in self._pairs(features):
                one = module.announce(own)
                if one is None:
                    announced.retire()
                    return None
                announced.batches.extend(one.batches)
        return announced

    def _pairs(self, features: Any) -> list[tuple[Preparable, Any]]:
        """Each module with its own features, of a list, or with those that all share."""
        own = features if isinstance(features, list) else [features] * len(self._modules)
        if len(own) != len(self._modules):
            raise ValueError(f"features= gave a list of {len(own)}, but there are {len(self._modules)} modules")
        return list(zip(self._modules, own, strict=True))


def as_one(module: Any) -> Preparable:
    """The modules over tables of a model, of several modules, or the one that is given."""
    if _is_preparable(module):
        one: Preparable = module
        return one
    given = [module] if hasattr(module, "modules") else list(module)
    found = list(dict.fromkeys(each for model in given for each in model.modules() if _is_preparable(each)))
    if not found:
        raise TypeError(f"a {type(module).__name__} has no module over tables, as TieredEmbeddingBag, to prefetch for")
    return found[0] if len(found) == 1 else _Several(found)


def _is_preparable(module: Any) -> bool:
    return hasattr(module, "prepare") and hasattr(module, "is_collective")
