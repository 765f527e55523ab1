"""What every room needs of the operating system: files, processes, signals, kill points, errors, sizes, terminals."""

from typing import Final

__version__: Final = "0.1.0"
"""Which release this is."""

__all__ = ["__version__"]
