"""Limits on size that keep the code readable; they only ever get tighter."""

import ast
from pathlib import Path

import pytest

from bench.data import ROOT

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

MODULES = sorted(
    path
    for folder in ("tierstore", "bench", "docs", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_size(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES_MAX, "split the module: one noun each"
    too_long = [
        f"{node.name}, line {node.lineno}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not too_long
