"""What a reader types to run this program again."""

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["program"]


def program() -> str:
    """``tierstore`` if that is found on PATH, else the path that this process was started by, quoted for a shell."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "tierstore":
        return f"{_shortest(Path(sys.executable))} -m tierstore"
    if started.name != "tierstore" or not started.is_file():
        return "tierstore"
    found = shutil.which("tierstore")
    return "tierstore" if found and os.path.samefile(found, started) else _shortest(started)


def _shortest(path: Path) -> str:
    relative = os.path.relpath(path)
    if os.sep not in relative:
        relative = os.path.join(os.curdir, relative)
    return shlex.quote(min(relative, str(path), key=len))
