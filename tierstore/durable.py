"""Making a rename or a new file last: the directory that names it must be synced too."""

import os
from pathlib import Path

__all__ = ["make_directory", "sync_directory"]


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing, durably. OSError if the system refuses."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the device hold the directory's entries. OSError if it refuses."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
