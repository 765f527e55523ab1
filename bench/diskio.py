"""Bytes that went between memory and the device: of this process, and of everyone."""

import os
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["DiskBytes", "of_device", "of_process"]

_SECTOR_BYTES: Final = 512


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
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return DiskBytes(int(fields["read_bytes"]), int(fields["write_bytes"]))


def of_device(path: Path) -> DiskBytes | None:
    """What the device under ``path`` did for everyone, file system's journal included; None where it tells nothing."""
    number = path.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not counters.exists():
        return None
    fields = counters.read_text().split()
    return DiskBytes(int(fields[2]) * _SECTOR_BYTES, int(fields[6]) * _SECTOR_BYTES)
