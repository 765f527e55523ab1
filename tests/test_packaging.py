"""The package as others get it: its names, its wheel, what importing it costs, what its tree says."""

import ast
import contextlib
import importlib
import pkgutil
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tierstore
from bench.data import ROOT

HEAVY = {"IPython", "grpc", "ipywidgets", "lxml", "matplotlib", "pandas", "pyarrow", "scipy", "torchrec", "triton"}
"""What a reader, a plot or a notebook may need; whoever only wants a table must not wait for them."""


def all_modules() -> list[str]:
    found = pkgutil.walk_packages(tierstore.__path__, "tierstore.")
    return ["tierstore", *(module.name for module in found if module.name != "tierstore.__main__")]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code: str, *arguments: str) -> str:
    """Output of the code in a fresh interpreter that sees neither this directory nor the user's settings."""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_all_lists_names_that_exist() -> None:
    for name in all_modules():
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", [])  # modules within a package need none
        assert len(set(listed)) == len(listed), f"{name}: a name twice"
        assert [each for each in listed if not hasattr(module, each)] == [], name


def public_names(module: ModuleType) -> set[str]:
    """What the module shows of the package's own: imported or defined, but no submodules."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "")).startswith("tierstore")
    }


def test_packages_show_exactly_what_all_lists() -> None:
    for name in all_modules():
        package = importlib.import_module(name)
        if hasattr(package, "__path__"):
            assert public_names(package) <= set(getattr(package, "__all__", ())), name


def test_version_is_one(project: dict[str, Any]) -> None:
    assert tierstore.__version__ == version("tierstore") == project["version"]


def test_command_line_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="tierstore")
    assert script.value == "tierstore.cli:main"
    assert callable(script.load())


def test_import_says_nothing_and_loads_little() -> None:
    """Nor do help and wrong usage of any command. numba itself loads scipy, where it is there."""
    code = """
import contextlib, io, sys
from tierstore import cli
from tierstore.cli import entry
groups = [[name, each] for name, of in entry._COMMANDS.items() if of.commands for each in of.commands()]
for words in (["--version"], ["--help"], ["nix"], *([*each, "--help"] for each in [*groups, *zip(entry._COMMANDS)]),
              ["serve", "--nix"], ["export"], ["train"], ["quantize", "a", "b"]):
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
        cli.main(words)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numba", "tqdm"}))
import torch, numba
before = set(sys.modules)
from tierstore import *
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    command_line, package = run_python(code).splitlines()
    assert command_line == ""
    assert "tierstore" in package.split()
    assert not set(package.split()) & HEAVY


def test_names_are_there_when_they_are_asked_for() -> None:
    """Those of ``__all__``, and the packages that the documentation uses."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = set(re.findall(r"\btierstore\.([a-z]+)\.[A-Za-z]", "".join(each.read_text() for each in texts)))
    named = {name for name in used if (ROOT / "tierstore" / name).is_dir()}
    assert {"dist", "models", "optim"} <= named
    code = """
import sys, tierstore
found = [getattr(tierstore, name) for name in sys.argv[1:]]
print({*sys.argv[1:]} <= {*dir(tierstore)}, hasattr(tierstore, "nix"))
"""
    assert run_python(code, *named, *tierstore.__all__) == "True False\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and a source distribution, as the build backend makes them of the sources."""
    flit = pytest.importorskip("flit_core.buildapi", reason="the build backend is not there; make test installs it")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for path in sources():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (source / "cache").symlink_to("tierstore/cache")
    (source / "io").symlink_to("tierstore/io")
    with contextlib.chdir(source):
        return {"wheel": target / flit.build_wheel(str(target)), "source": target / flit.build_sdist(str(target))}


def test_what_is_built_holds_the_package_and_nothing_else(built: dict[str, Path], project: dict[str, Any]) -> None:
    with tarfile.open(built["source"]) as archive:
        top = {each.split("/", 2)[1] for each in archive.getnames()}
    assert top == {"tierstore", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    metadata = f"tierstore-{project['version']}.dist-info/"
    own = {name for name in names if not name.startswith(metadata)}
    package = [path.relative_to(ROOT) for path in sources() if path.is_relative_to(ROOT / "tierstore")]
    assert own == {
        path.as_posix()
        for path in package
        if path.suffix in (".py", ".html", ".css", ".toml", ".proto", ".binpb") or path.name == "py.typed"
    }
    assert {"tierstore/py.typed", "tierstore/serve/monitoring/page.html", "tierstore/report/page.html"} <= own
    assert {metadata + "licenses/LICENSE", metadata + "entry_points.txt"} <= names


def test_a_wheel_works_outside_the_checkout(built: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(built["wheel"]).extractall(target)
    code = """
import os, sys, warnings
os.environ["NUMBA_DISABLE_JIT"] = "1"  # to compile the kernels of another place takes half a minute
warnings.filterwarnings("ignore", "overflow encountered in scalar", RuntimeWarning)
sys.path.insert(0, sys.argv[1])
import tierstore, tierstore.cli, torch
assert tierstore.__file__.startswith(sys.argv[1]), tierstore.__file__
with tierstore.open(sys.argv[2], mode="w", ddr="1MiB") as store:
    table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=100, embedding_dim=4))
    table.write(torch.tensor([3]), torch.ones(1, 4))
    store.commit()
with tierstore.open(sys.argv[2], mode="r", ddr="1MiB") as store:
    print(store["item"].read(torch.tensor([3])).tolist())
"""
    assert run_python(code, str(target), str(tmp_path / "store")).strip() == "[[1.0, 1.0, 1.0, 1.0]]"


@pytest.mark.parametrize("layer", ["cache", "io"])
def test_root_links_lead_to_the_layers(layer: str) -> None:
    link = ROOT / layer
    assert link.is_symlink()
    assert link.readlink() == Path("tierstore", layer)
    assert link.resolve() == Path(tierstore.__file__).parent / layer


def test_links_do_not_hide_the_standard_library() -> None:
    code = "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, ''); import io; print(io.BytesIO)"
    assert run_python(code, str(ROOT)).strip() == "<class '_io.BytesIO'>"


MODULES = {"prometheus-client": "prometheus_client", "protobuf": "google", "grpcio": "grpc"}
BROUGHT = {"llvmlite", "triton"}  # what numba and torch depend on


def imported() -> Iterator[str]:
    """Modules of others that the package names in an import."""
    for path in (ROOT / "tierstore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            yield from (name.split(".")[0] for name in names)


def test_what_is_imported_is_asked_for_and_nothing_else(project: dict[str, Any]) -> None:
    extras = [each for extra in ("parquet", "serve") for each in project["optional-dependencies"][extra]]
    asked = {each.split(">")[0] for each in (*project["dependencies"], *extras)}
    used = set(imported()) - set(sys.stdlib_module_names) - {"tierstore"}
    assert {MODULES.get(name, name) for name in asked} == used - BROUGHT


def sources() -> list[Path]:
    """Every text file of the project, through no link."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(?<![\w.~$}*-])/(?:home|root|work|mnt|opt|Users|workspace)/\w", "a path of somebody's machine"),
        (r"--(?:extra-)?index-url\s+http|--find-links|\bpypi\b", "a package index: which one is the user's choice"),
        (r"(?i)\bthis session\b|\bissue #?\d", "the circumstances in which it was written"),
    ],
)
def test_tree_depends_on_no_machine(pattern: str, why: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        if path != Path(__file__) and path.name != "LICENSE"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, why
