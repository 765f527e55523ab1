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
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".matrix"
SUPPORTED: Final = ("3.11", "3.12", "3.13", "3.14")
EXTRAS: Final = ("parquet", "serve")  # whose dependencies are the user's, not the tests'
SHOWN: Final = ("torch", "numpy", "numba", "lmdb", "pyarrow", "psutil")


def oldest() -> dict[str, str]:
    """The lowest version of each dependency that the project allows, as a requirement, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+).*", requirement) for requirement in wanted)
    return {match[1]: f"{match[1]}=={match[2]}" for match in found if match}


def versions(pythons: list[str]) -> dict[str, str]:
    """The supported ones that are there, by version, as "3.12"."""
    found: dict[str, str] = {}
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in pythons:
        if shutil.which(python) is None:
            print(f"skipped: {python} is not there; name others with PYTHONS='python3.12 /path/to/python3.13'")
            continue
        version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        if version in SUPPORTED:
            found.setdefault(version, python)
        else:
            print(f"skipped: {python} is Python {version}; supported are {', '.join(SUPPORTED)}")
    return found


def install(name: str, python: str, torch: str, pins: dict[str, str]) -> Path:
    """The environment's Python; made or brought up to date."""
    made = FOLDER / name / "bin" / "python"
    if not made.exists():
        subprocess.run([python, "-m", "venv", FOLDER / name], check=True)
    held = FOLDER / name / "pins.txt"
    held.write_text("\n".join(pins.values()))
    pip = [made, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *shlex.split(torch)], check=True)
    subprocess.run([*pip, "--constraint", held, "--editable", f"{ROOT}[dev]"], check=True)
    return made


def is_passed(name: str, python: str, torch: str, pins: dict[str, str], tests: list[str]) -> bool:
    """Whether the tests pass there; a line says what the environment has, and how pytest ended."""
    print(f"\n{name}: {python}, {torch}", flush=True)
    started, shown = time.monotonic(), ""
    try:
        made = install(name, python, torch, pins)
        code = f"import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in {SHOWN!r}))"
        shown = subprocess.run([made, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        subprocess.run([made, "-m", "tierstore", "compile"], check=True)
        run = [made, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile"]
        outcome = subprocess.run([*run, *tests], cwd=ROOT, check=False).returncode
    except subprocess.CalledProcessError as error:
        print(f"{shlex.join(map(str, error.cmd))} ended with {error.returncode}")
        outcome = error.returncode
    word = "FAILED" if outcome else "passed"
    print(f"{name:11} {word} in {time.monotonic() - started:.0f} s  ({shown})", flush=True)
    return not outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default=" ".join(f"python{version}" for version in SUPPORTED))
    parser.add_argument("--torch", default="torch", help="requirement for all but the oldest")
    parser.add_argument("--tests", default="", help="what pytest is to run; all without it")
    given = parser.parse_args()
    found, pins, tests = versions(given.pythons.split()), oldest(), given.tests.split()
    FOLDER.mkdir(exist_ok=True)
    passed = [is_passed(f"python{version}", python, given.torch, {}, tests) for version, python in found.items()]
    passed += [is_passed("oldest", python, pins["torch"], pins, tests) for _, python in sorted(found.items())[:1]]
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
