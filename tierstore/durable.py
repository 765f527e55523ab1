"""Making a rename or a new file last: the directory that names it must be synced too."""

import os
from pathlib import Path

__all__ = ["sync_directory"]


def sync_directory(directory: Path) -> None:
    """Have the device hold the directory's entries. OSError if it refuses."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
