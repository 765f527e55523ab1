"""What the GPU benchmark needs, looked for before it imports anything but the standard library."""

import importlib
import importlib.metadata
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Lack", "lacks", "require_all", "told"]

_PROJECT: Final = Path(__file__).resolve().parents[2] / "pyproject.toml"
_PYTHON: Final = (3, 11)
_INDIRECT: Final = ("llvmlite",)
"""Needed by numba, which says so only when it compiles."""
_COMPILERS: Final = ("cc", "gcc", "clang")


class Lack(NamedTuple):
    """Something that is missing.

    Attributes:
        name: for people.
        why: what was seen.
        requirement: what pip is to install, or "".
    """

    name: str
    why: str
    requirement: str


def lacks() -> list[Lack]:
    """Everything that is missing."""
    if sys.version_info < _PYTHON:
        return [Lack("Python", f"this is {sys.version.split()[0]}, wanted 3.11 or newer", "")]
    import tomllib

    wanted = [*tomllib.loads(_PROJECT.read_text())["project"]["dependencies"], *_INDIRECT]
    found = [_lack_of(requirement) for requirement in wanted]
    if _may_use_cuda():
        found.append(_lack_of("triton"))
        if not any(map(shutil.which, _COMPILERS)):
            found.append(Lack("a C compiler", "Triton builds its launchers with one", ""))
    return [lack for lack in found if lack is not None]


def _lack_of(requirement: str) -> Lack | None:
    name = re.split(r"[<>=!~\s;\[]", requirement, maxsplit=1)[0]
    try:
        importlib.import_module(name)
    except Exception as error:  # a library that fails in a way of its own is missing, too
        return Lack(name, f"{type(error).__name__}: {error}".splitlines()[0], requirement)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
    if all((_numbers(version) >= _numbers(bound)) == (sign == ">=") for sign, bound in bounds):
        return None
    return Lack(name, f"{version} is installed, wanted {requirement.removeprefix(name)}", requirement)


def _numbers(version: str) -> tuple[int, ...]:
    """The release number, without "+cu130", "rc1" and zeros at its end."""
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _may_use_cuda() -> bool:
    """Whether a GPU could be used, or it is not known: torch is missing."""
    torch: Any = sys.modules.get("torch")
    return torch is None or torch.version.cuda is not None


def told(missing: list[Lack]) -> str:
    """What is missing, a line each, and the command that brings it."""
    lines = ["The GPU benchmark cannot run:", *(f"- {lack.name}: {lack.why}" for lack in missing)]
    wanted = [shlex.quote(lack.requirement) for lack in missing if lack.requirement]
    if wanted:
        lines += ["", f"    {sys.executable} -m pip install {' '.join(wanted)}"]
    return "\n".join(lines)


def require_all() -> None:
    """SystemExit with what is missing, to standard error, unless everything is there."""
    missing = lacks()
    if missing:
        sys.exit(told(missing))
