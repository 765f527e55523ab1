"""Run the tests in an environment of its own for each Python that is there, and for the oldest dependencies allowed.

    python -m tests.matrix --torch 'torch==2.13.0' --pythons 'python3.12 python3.13' --tests 'tests/nn tests/store'

Environments stay in .matrix and are used again. Ends with 1 if a test or an installation failed.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".matrix"
SUPPORTED: Final = ("3.11", "3.12", "3.13", "3.14")
EXTRAS: Final = ("parquet", "serve", "plan")  # whose dependencies are the user's, not the tests'
SHOWN: Final = ("torch", "numpy", "numba", "lmdb", "pyarrow", "psutil")


class Environment(NamedTuple):
    """``pins`` are requirements that pip is held to, by name."""

    name: str
    python: str
    torch: str
    pins: dict[str, str]


def oldest(project: dict) -> dict[str, str]:
    """The lowest version of each dependency that a project's table allows, as a requirement, by name."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+).*", requirement) for requirement in wanted)
    return {match[1]: f"{match[1]}=={match[2]}" for match in found if match}


def version_of(python: str) -> str | None:
    """As "3.12"; None if there is no such program."""
    if shutil.which(python) is None:
        return None
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def environments(pythons: list[str], torch: str) -> list[Environment]:
    """One for each Python, and one with the oldest dependencies on the first of them."""
    found: dict[str, str] = {}
    for python in pythons:
        version = version_of(python)
        if version is None:
            print(f"skipped: {python} is not there; name others with PYTHONS='python3.12 /path/to/python3.13'")
        elif version not in SUPPORTED:
            print(f"skipped: {python} is Python {version}; supported are {', '.join(SUPPORTED)}")
        else:
            found.setdefault(version, python)
    pins = oldest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    made = [Environment(f"python{version}", python, torch, {}) for version, python in sorted(found.items())]
    return [*made, *(Environment("oldest", each.python, pins["torch"], pins) for each in made[:1])]


def install(environment: Environment) -> Path:
    """Its Python; made or brought up to date."""
    folder = FOLDER / environment.name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([environment.python, "-m", "venv", folder], check=True)
    pins = folder / "pins.txt"
    pins.write_text("\n".join(environment.pins.values()))
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *shlex.split(environment.torch)], check=True)
    subprocess.run([*pip, "--constraint", pins, "--editable", f"{ROOT}[dev]"], check=True)
    return python


def is_passed(environment: Environment, tests: list[str]) -> bool:
    """Whether the tests pass there; a line says what the environment has, and how pytest ended."""
    started, shown = time.monotonic(), ""
    try:
        python = install(environment)
        code = f"import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in {SHOWN!r}))"
        shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        subprocess.run([python, "-m", "tierstore", "compile"], check=True)
        run = [python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile"]
        outcome = subprocess.run([*run, *tests], cwd=ROOT, check=False).returncode
    except subprocess.CalledProcessError as error:
        print(f"{shlex.join(map(str, error.cmd))} ended with {error.returncode}")
        outcome = error.returncode
    word = "FAILED" if outcome else "passed"
    print(f"{environment.name:11} {word} in {time.monotonic() - started:.0f} s  ({shown})", flush=True)
    return not outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default=" ".join(f"python{version}" for version in SUPPORTED))
    parser.add_argument("--torch", default="torch", help="requirement for all but the oldest")
    parser.add_argument("--tests", default="", help="what pytest is to run; all without it")
    parser.add_argument("--only", default="", help="names of environments: python3.12 oldest")
    given = parser.parse_args()
    wanted = environments(given.pythons.split(), given.torch)
    FOLDER.mkdir(exist_ok=True)
    passed = []
    for environment in wanted:
        if not given.only or environment.name in given.only.split():
            print(f"\n{environment.name}: {environment.python}, {environment.torch}", flush=True)
            passed.append(is_passed(environment, given.tests.split()))
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
