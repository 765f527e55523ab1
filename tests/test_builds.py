"""What a wheel and a source distribution hold, and that the packages asked for are those used."""

import ast
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"prometheus-client": "prometheus_client", "protobuf": "google", "grpcio": "grpc"}
BROUGHT = {"llvmlite", "triton"}  # what numba and torch depend on


def imported():
    """Modules of others that the package names in an import."""
    for path in (ROOT / "tierstore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            yield from (name.split(".")[0] for name in names)


def test_what_is_imported_is_asked_for_and_nothing_else():
    extras = [each for extra in ("parquet", "serve", "plan") for each in PROJECT["optional-dependencies"][extra]]
    asked = {each.split(">")[0] for each in (*PROJECT["dependencies"], *extras)}
    used = set(imported()) - set(sys.stdlib_module_names) - {"tierstore"}
    assert {MODULES.get(name, name) for name in asked} == used - BROUGHT


@pytest.fixture
def backend(tmp_path, monkeypatch):
    """The build backend, in a copy of what it builds from."""
    flit = pytest.importorskip("flit_core.buildapi", reason="the build backend is not there; make test installs it")
    for name in ("tierstore", "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "checkout")
    monkeypatch.chdir(tmp_path / "checkout")
    return flit


def test_the_source_distribution_has_the_package_alone(backend, tmp_path):
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        names = {each.split("/", 2)[1] for each in archive.getnames()}
    assert names == {"tierstore", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
