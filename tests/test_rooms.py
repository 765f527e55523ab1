"""The rooms of the package: their order, their sizes, and what they may import.

A room imports only rooms above it in the table, and no module imports itself by way of others. A limit may be raised
only by lowering another.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tierstore"
LINES = {
    "errors": 107, "system": 1369, "settings": 310, "report": 186, "layout": 169, "kernels": 2092, "init": 167,
    "optim": 888, "ids": 938, "config": 242, "cache": 2058, "io": 6261, "pool": 2443, "hbm": 3066, "lookup": 935,
    "trace": 459, "store": 4721, "exchange": 935, "nn": 2804, "dist": 5225, "models": 405, "metrics": 255,
    "offline": 811, "updates": 1661, "feed": 380, "train": 4610, "plan": 3696, "serve": 6749, "precision": 370,
    "warm_up": 339, "cli": 1423,
}  # fmt: skip
"""The most lines of each room, docstrings and all, in the order of docs/architecture.md."""
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(module: str) -> Iterator[str]:
    """The modules of the package that one imports, for types and within functions too."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            names = [f"{whole}.{each.name}" if f"{whole}.{each.name}" in MODULES else whole for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        yield from {name for name in names if name in MODULES} - {module}


def test_every_room_is_listed_here_and_in_the_docs() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {*LINES, "__init__", "__main__"}
    text = (PACKAGE.parent / "docs/architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)(?:\.py|/)` \|", text, re.MULTILINE) == list(LINES)


def test_rooms_import_only_rooms_above_them() -> None:
    order = list(LINES)
    pairs = [(module, other) for module in MODULES if room_of(module) in LINES for other in imports(module)]
    assert len(pairs) > 1000
    for module, other in pairs:
        if room_of(other) in LINES:
            assert order.index(room_of(other)) <= order.index(room_of(module)), f"{module} imports {other}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Within rooms; that of a package is its ``__init__``."""
    graph = {module: {each for each in imports(module) if room_of(each) == room_of(module)} for module in MODULES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("room", LINES)
def test_rooms_stay_within_their_lines(room: str) -> None:
    paths = [path for module, path in MODULES.items() if room_of(module) == room]
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    assert lines <= LINES[room], f"{room}: take {lines - LINES[room]} lines away, here or in another room"
