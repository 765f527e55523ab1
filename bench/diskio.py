"""Bytes that went between memory and the device, of this process."""

from pathlib import Path
from typing import NamedTuple

__all__ = ["DiskBytes", "of_process", "passed_to_write"]


class DiskBytes(NamedTuple):
    """Running totals; a difference of two tells what happened between them."""

    read: int
    written: int

    def __sub__(self, before: "DiskBytes") -> "DiskBytes":
        return DiskBytes(self.read - before.read, self.written - before.written)


def of_process() -> DiskBytes:
    """What this process fetched from devices and what it made dirty of files (/proc/self/io).

    Pages count as written when they are dirtied, so a page dirtied twice before the system wrote it counts once.
    """
    fields = _fields()
    return DiskBytes(fields["read_bytes"], fields["write_bytes"])


def passed_to_write() -> int:
    """Bytes that this process gave to ``write`` and its like."""
    return _fields()["wchar"]


def _fields() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
