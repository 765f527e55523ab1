"""Build the API reference from the docstrings: ``python -m docs.reference [FOLDER]`` writes HTML, by default to .docs.

What pdoc warns of, such as a link to a name that there is not, is an error here.
"""

import inspect
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import tierstore
from bench.data import ROOT

__all__ = ["MODULES", "build", "public", "undocumented"]

MODULES: Final = (
    "tierstore",
    "tierstore.nn.checkpoint",
    "tierstore.dist",
    "tierstore.errors",
    "tierstore.exchange",
    "tierstore.feed",
    "tierstore.init",
    "tierstore.metrics",
    "tierstore.models",
    "tierstore.offline",
    "tierstore.optim",
    "tierstore.plan",
    "tierstore.store.changes",
    "tierstore.trace",
    "tierstore.train",
    "tierstore.train.config",
    "tierstore.train.readers",
    "tierstore.updates",
)
"""What users import from. Names that several have are described in each."""


def build(folder: Path) -> None:
    """Write index.html and a page for each module."""
    import pdoc

    # A package's modules that it lists in __all__ come with it.
    modules = [name for name in MODULES if name.removeprefix("tierstore.") not in tierstore.__all__]
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pdoc.pdoc(*modules, output_directory=folder)


def public(name: str) -> Iterator[tuple[str, Any]]:
    """The names that a module gives to users, and what they stand for."""
    module = import_module(name)
    for each in getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")]):
        found = getattr(module, each)
        if getattr(module, "__all__", None) is not None or getattr(found, "__module__", None) == name:
            yield f"{name}.{each}", found


def undocumented() -> list[str]:
    """Public modules, functions, classes, and methods of these that say nothing of themselves."""
    found = [name for name in MODULES if not import_module(name).__doc__]
    for module in MODULES:
        for name, each in public(module):
            if not (inspect.isroutine(each) or inspect.isclass(each)):
                continue
            members: dict[str, Any] = {name: each}
            if inspect.isclass(each):
                members |= {
                    f"{name}.{member}": value
                    for member, value in vars(each).items()
                    if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
                }
            found += [shown for shown, value in members.items() if not inspect.getdoc(value)]
    return sorted(set(found))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".docs"
    build(target)
    print(f"written: {target / 'index.html'}")
