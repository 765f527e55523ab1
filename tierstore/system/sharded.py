"""Reading a sharded store as one store: the package gives the way, as ``dist``, which has it, is built on ``store``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

open_whole: Callable[[Path, int | None], Any]
"""Opens the files of a directory's version, or the newest; set by ``tierstore/__init__.py``."""
