"""What every room needs of the operating system: files, processes, signals, kill points, sizes, terminals."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

__version__: Final = "0.1.0"
"""Which release this is."""
open_whole: Callable[[Path, int | None], Any]
"""Opens the files of a sharded store as one store, of the directory's version, or the newest. Set by
``tierstore/__init__.py``, as ``dist``, which has it, is built on ``store``."""

__all__ = ["__version__", "late", "open_whole"]


def late(package: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` (PEP 562) of a package, whose ``globals()`` is given: its modules, and names by
    where they are, "MODULE", "MODULE:NAME" or "MODULE:" for all of it, when they are first asked for. torch and numba
    take seconds to load."""

    def find(name: str) -> Any:
        home, named = f"{package['__name__']}.{homes.get(name, f'{name}:')}:{name}".split(":")[:2]
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}", name=name) from None
        return package.setdefault(name, getattr(module, named) if named else module)

    return find, lambda: sorted({*package, *package["__all__"]})
