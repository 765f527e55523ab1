"""Programs that import peers: in processes of their own, as peers bring versions of what the package imports, too."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PEERS: Final = ROOT / ".peers"


def run(code: str, folder: Path = ROOT) -> str:
    """What it prints, without warnings; one that fails does so with its traceback."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PEERS)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
