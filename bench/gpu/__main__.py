"""The command line of ``python -m bench.gpu``: what it needs is looked for before anything else is imported."""

import importlib
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path


def _missing() -> dict[str, str]:
    """What pip is to install, or another name, and what was seen instead."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    # llvmlite: numba needs it, and says so only when it compiles.
    wanted, found = [*tomllib.loads(project.read_text())["project"]["dependencies"], "llvmlite"], {}
    for requirement in [*wanted, "triton"]:
        name = re.split(r"[<>=!~\s;\[]", requirement, maxsplit=1)[0]
        torch = sys.modules.get("torch")
        if name == "triton" and torch is not None and torch.version.cuda is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that fails in a way of its own is missing, too
            found[requirement] = f"{type(error).__name__}: {error}".splitlines()[0]
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        found["a C compiler"] = "Triton builds its launchers with one"
    return found


if __name__ == "__main__":
    if missing := _missing():
        packages = " ".join(shlex.quote(name) for name in missing if not name.startswith("a "))
        lines = [f"- {name}: {why}" for name, why in missing.items()]
        lines += [f"\n    {sys.executable} -m pip install {packages}"] if packages else []
        sys.exit("\n".join(["The GPU benchmark cannot run:", *lines]))
    from ..common import program
    from .runner import PARTS, run

    run.__module__ = "bench.gpu"  # which says what it needs
    sys.exit(program("gpu", run, parts=tuple(PARTS)))
