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

import pytest

import tierstore
from bench.data import ROOT

HEAVY = {"IPython", "grpc", "ipywidgets", "lxml", "matplotlib", "pandas", "pyarrow", "scipy", "torchrec", "triton"}
"""What a reader, a plot or a notebook may need; whoever only wants a table must not wait for them."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code: str, *arguments: str) -> str:
    """Output of the code in a fresh interpreter that sees neither this directory nor the user's settings."""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


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
    found = pkgutil.walk_packages(tierstore.__path__, "tierstore.")
    for name in ["tierstore", *(each.name for each in found if each.name != "tierstore.__main__")]:
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", [])  # modules within a package need none
        assert len(set(listed)) == len(listed), f"{name}: a name twice"
        assert [each for each in listed if not hasattr(module, each)] == [], name
        if hasattr(module, "__path__"):
            assert public_names(module) <= set(listed), name


def test_version_is_one_and_the_command_line_is_installed() -> None:
    assert tierstore.__version__ == version("tierstore") == PROJECT["version"]
    (script,) = entry_points(group="console_scripts", name="tierstore")
    assert script.value == "tierstore.cli:main"
    assert callable(script.load())


def test_import_says_nothing_loads_little_and_gives_every_name_when_asked_for_it(store_dir: Path) -> None:
    """Nor do help, wrong usage of any command, and inspect. numba itself loads scipy, where it is there. Names are
    those of ``__all__``, and packages that the documentation uses."""
    tierstore.open(store_dir).close()
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = set(re.findall(r"\btierstore\.([a-z]+)\.[A-Za-z]", "".join(each.read_text() for each in texts)))
    named = {name for name in used if (ROOT / "tierstore" / name).is_dir()}
    assert {"dist", "models", "optim"} <= named
    code = """
import contextlib, io, sys
from tierstore import cli
from tierstore.cli import entry
groups = [[name, each] for name, of in entry._COMMANDS.items() if of.commands for each in of.commands()]
for words in (["--version"], ["--help"], ["nix"], *([*each, "--help"] for each in [*groups, *zip(entry._COMMANDS)]),
              ["serve", "--nix"], ["export"], ["train"], ["quantize", "a", "b"], ["inspect", sys.argv.pop(1)]):
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
        cli.main(words)
assert "nothing committed yet, 0 tables" in shown.getvalue()
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numba", "tqdm"}))
import torch, numba
before = set(sys.modules)
from tierstore import *
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
import tierstore
found = [getattr(tierstore, name) for name in sys.argv[1:]]
print({*sys.argv[1:]} <= {*dir(tierstore)}, hasattr(tierstore, "nix"))
"""
    command_line, package, names = run_python(code, str(store_dir), *named, *tierstore.__all__).splitlines()
    assert command_line == ""
    assert "tierstore" in package.split()
    assert not set(package.split()) & HEAVY
    assert names == "True False"


def test_a_wheel_holds_the_package_and_works_outside_the_checkout(tmp_path: Path) -> None:
    """As the build backend makes it of the sources."""
    flit = pytest.importorskip("flit_core.buildapi", reason="the build backend is not there; make test installs it")
    source, made, target = (tmp_path / name for name in ("source", "made", "site"))
    made.mkdir()
    for path in sources():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    for layer in ("cache", "io"):
        (source / layer).symlink_to(f"tierstore/{layer}")
    with contextlib.chdir(source):
        wheel, archive = made / flit.build_wheel(str(made)), made / flit.build_sdist(str(made))
    with tarfile.open(archive) as opened:
        top = {each.split("/", 2)[1] for each in opened.getnames()}
    assert top == {"tierstore", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"tierstore-{PROJECT['version']}.dist-info/"
    own = {name for name in names if not name.startswith(metadata)}
    package = [path.relative_to(ROOT) for path in sources() if path.is_relative_to(ROOT / "tierstore")]
    kinds = (".py", ".html", ".css", ".toml", ".proto", ".binpb")
    assert own == {path.as_posix() for path in package if path.suffix in kinds or path.name == "py.typed"}
    assert {"tierstore/py.typed", "tierstore/report/page.html"} <= own
    assert {metadata + "licenses/LICENSE", metadata + "entry_points.txt"} <= names
    zipfile.ZipFile(wheel).extractall(target)
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


def test_root_links_lead_to_the_layers_and_do_not_hide_the_standard_library() -> None:
    for layer in ("cache", "io"):
        assert (ROOT / layer).readlink() == Path("tierstore", layer)
        assert (ROOT / layer).resolve() == Path(tierstore.__file__).parent / layer
    code = "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, ''); import io; print(io.BytesIO)"
    assert run_python(code, str(ROOT)).strip() == "<class '_io.BytesIO'>"


MODULES = {"prometheus-client": "prometheus_client", "protobuf": "google", "grpcio": "grpc", "redis[hiredis]": "redis"}
BROUGHT = {"llvmlite", "triton"}  # what numba and torch depend on
FOR_OTHERS = {"gcsfs", "s3fs"}  # what fsspec imports


def imported() -> Iterator[str]:
    """Modules of others that the package names in an import."""
    for path in (ROOT / "tierstore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            yield from (name.split(".")[0] for name in names)


def test_what_is_imported_is_asked_for_and_nothing_else() -> None:
    names = ("feed", "parquet", "remote", "serve", "shell")
    extras = [each for extra in names for each in PROJECT["optional-dependencies"][extra]]
    asked = {each.split(">")[0] for each in (*PROJECT["dependencies"], *extras)} - FOR_OTHERS
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


def test_tree_depends_on_no_machine() -> None:
    forbidden = [
        r"(?<![\w.~$}*-])/(?:home|root|work|mnt|opt|Users|workspace)/\w",  # a path of somebody's machine
        r"--(?:extra-)?index-url\s+http|--find-links|\bpypi\b",  # which package index is the user's choice
        r"(?i:\bthis session\b|\bissue #?\d)",  # the circumstances in which it was written
    ]
    pattern = re.compile("|".join(forbidden))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        if path != Path(__file__) and path.name != "LICENSE"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found
