"""What the prefetch pipeline drives: the modules over tables of a model, as one."""

from collections.abc import Sequence
from typing import Any

from .module import plain_names


class Modules:
    """Modules over tables, or what ``TieredModule.ahead`` of each gives for a pass; methods are as those of a
    ``TieredModule``, of which ``features`` is a list with what each is given, or one object that all are given.

    Attributes:
        is_collective: other ranks must bring their rows in at the same time.
    """

    def __init__(self, modules: Sequence[Any], names: Sequence[str]) -> None:
        self._modules = modules
        self._names = names
        self.is_collective = any(module.is_collective for module in modules)

    @classmethod
    def of(cls, module: Any) -> "Modules":
        """Those of a model, of several modules, or the one that is given. TypeError: there is none."""
        if _is_over_tables(module):
            return cls([module], [""])
        found: dict[Any, str] = {}
        for model in [module] if hasattr(module, "modules") else list(module):
            for name, plain in plain_names(model).items():
                if _is_over_tables(each := model.get_submodule(name)):
                    found.setdefault(each, plain)
        if not found:
            raise TypeError(
                f"a {type(module).__name__} has no module over tables, as TieredEmbeddingBag, to prefetch for"
            )
        return cls(list(found), list(found.values()))

    def ahead(self) -> "Modules":
        return Modules([module.ahead() for module in self._modules], self._names)

    def has_all_rows(self) -> bool:
        return all(module.has_all_rows() for module in self._modules)

    def begin(self, batches: Any) -> Any:
        """``iter(batches)``, which the thread that calls ``prepare`` reads from."""
        return next((each for each in self._modules if each.is_collective), self._modules[0]).begin(batches)

    def end(self) -> None:
        """The pass brings no more in; called once, by the thread that calls ``prepare``."""
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

    def _pairs(self, features: Any) -> list[tuple[Any, Any]]:
        """Each module with its own features, of a list or a dict by name, or with those that all share."""
        names = self._names
        if isinstance(features, dict):
            if sorted(features) != sorted(names):
                raise ValueError(f"features= gave a dict of {list(features)}, but the modules are {names}")
            return [(module, features[name]) for module, name in zip(self._modules, names, strict=True)]
        own = features if isinstance(features, list) and len(names) > 1 else [features] * len(names)
        if len(own) != len(names):
            raise ValueError(f"features= gave a list of {len(own)}, but there are {len(names)} modules: {names}")
        return list(zip(self._modules, own, strict=True))


def _is_over_tables(module: Any) -> bool:
    return hasattr(module, "prepare") and hasattr(module, "is_collective")
