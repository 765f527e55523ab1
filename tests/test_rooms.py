"""A room imports only rooms above it in the list that docs/architecture.md begins with."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tierstore"
EXCEPTED: set[str] = set()
LISTED = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", (PACKAGE.parent / "docs/architecture.md").read_text(), re.MULTILINE)


def imports(path: Path) -> Iterator[str]:
    """The rooms that a module imports, for types and within functions too."""
    package = ["tierstore", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            parts = [*base, *(node.module or "").split(".")]
            names = [".".join(filter(None, parts)), *(".".join([*filter(None, parts), a.name]) for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        yield from {name.split(".")[1] for name in names if name.startswith("tierstore.")} & set(LISTED)


def test_every_room_is_listed() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {*LISTED, "__init__", "__main__"}


def test_rooms_import_only_rooms_above_them() -> None:
    of_room = [(room, path) for room in LISTED for path in PACKAGE.glob(f"{room}.py")] + [
        (room, path) for room in LISTED for path in (PACKAGE / room).rglob("*.py")
    ]
    assert len(of_room) > 200
    below = {
        f"{path.relative_to(PACKAGE)}: {other}"
        for room, path in of_room
        for other in imports(path)
        if LISTED.index(other) > LISTED.index(room)
    }
    assert below == EXCEPTED
