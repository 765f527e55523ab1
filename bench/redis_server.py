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
_OPTIONS: Final = ("--port", "0", "--save", "", "--appendonly", "no", "--loglevel", "warning", "--logfile", "log")
_START_SECONDS: Final = 30.0


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """Its URL. Its socket is in the folder, whose name must be short; nothing is kept on disk."""
    assert COMMAND is not None, "redis-server is not installed"
    path = folder / "socket"
    with subprocess.Popen([COMMAND, *_OPTIONS, "--unixsocket", path.name], cwd=folder) as server:
        try:
            end = time.monotonic() + _START_SECONDS
            while not _answers(path):
                assert server.poll() is None, f"redis-server ended: {folder / 'log'}"
                assert time.monotonic() < end, f"redis-server does not answer: {folder / 'log'}"
                time.sleep(0.01)
            yield f"unix://{path}"
        finally:
            server.terminate()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
