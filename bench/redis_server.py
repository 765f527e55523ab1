"""A Redis server of one's own, for measurements and tests."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

COMMAND: Final = shutil.which("redis-server")
OPTIONS: Final = ("--port", "0", "--save", "", "--appendonly", "no", "--unixsocket", "socket", "--logfile", "log")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """Its URL. Its socket is in the folder, whose name must be short; nothing is kept on disk."""
    assert COMMAND is not None, "redis-server is not installed"
    path, end = str(folder / "socket"), time.monotonic() + 30
    with subprocess.Popen([COMMAND, *OPTIONS], cwd=folder) as server, socket.socket(socket.AF_UNIX) as client:
        try:
            while client.connect_ex(path):
                assert time.monotonic() < end, f"redis-server does not answer: {folder / 'log'}"
                time.sleep(0.01)
            yield f"unix://{path}"
        finally:
            server.terminate()
