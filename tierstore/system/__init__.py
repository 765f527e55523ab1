"""What every room needs of the operating system: files, processes, signals, kill points, sizes, terminals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__version__: Final = "0.1.0"
"""Which release this is."""
open_whole: Callable[[Path, int | None], Any]
"""Opens the files of a sharded store as one store, of the directory's version, or the newest. Set by
``tierstore/__init__.py``, as ``dist``, which has it, is built on ``store``."""

__all__ = ["__version__", "open_whole"]
