"""Limits on size that keep the code readable; they only ever get tighter."""

import ast
from pathlib import Path

from bench.data import ROOT

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

MODULES = sorted(
    path
    for folder in ("tierstore", "bench", "docs", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
)


def _too_long(path: Path) -> list[str]:
    text = path.read_text()
    found = ["the module: split it, one noun each"] if text.count("\n") > MODULE_LINES_MAX else []
    return found + [
        f"{node.name}, line {node.lineno}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]


def test_size() -> None:
    found = {str(path.relative_to(ROOT)): _too_long(path) for path in MODULES}
    assert {path: what for path, what in found.items() if what} == {}
