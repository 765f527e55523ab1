"""Processes of this package that another of its processes starts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def child_options(**variables: str) -> dict[str, Any]:
    """Options of ``subprocess.Popen`` for an interpreter with ``-P``; ``variables``: of its environment.

    It runs the package that was imported here, however that was found, and begins in ``/``: the folder in which this
    process began may be deleted by then, and in a deleted folder torch does not load. So its arguments are absolute.
    """
    found = sys.path[0 if sys.flags.safe_path else 1 :]  # what lies in the folder of the start is no module of ours
    paths = [str(Path(__file__).parents[2]), *(each for each in found if isinstance(each, str) and os.path.isabs(each))]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return {"cwd": "/", "stdin": subprocess.DEVNULL, "env": environment}
