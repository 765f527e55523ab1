"""Where machine code is kept: not beside the sources, where pip leaves it behind when the package is uninstalled."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba

from ..system.release import __version__


def roots() -> Iterator[Path]:
    """The folders to try, best first: NUMBA_CACHE_DIR, the user's cache, and for a user without one a private folder
    among the temporary files. Each release has its own, as another may still run."""
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
    for place in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(place):
            yield Path(place, "tierstore", __version__)
    private = Path(tempfile.gettempdir(), f"tierstore-{os.geteuid()}")
    private.mkdir(mode=0o700, exist_ok=True)
    # Users who can write there have this process run what they like.
    found = private.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        yield private / __version__
