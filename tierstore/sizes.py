"""Byte sizes as people write them: 2147483648, "2GiB", "512MB", "50%" (of memory), "5% of tables"."""

import re
from pathlib import Path
from typing import Final

import psutil

__all__ = ["format_size", "machine_memory_bytes", "parse_size"]

_UNITS: Final = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%(\s*of\s+tables)?", re.IGNORECASE)


def machine_memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit if that is less (a container's)."""
    limits = [int(psutil.virtual_memory().total)]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def parse_size(value: int | str, *, name: str, table_bytes: int = 0) -> int:
    """Bytes meant by ``value``.

    Args:
        value: a number of bytes; a number with a unit ("KiB", "MiB", "GiB", "TiB" are powers of two, "kB", "MB", "GB",
            "TB" of ten); "N%" of the machine's memory; "N% of tables": of ``table_bytes``.
        name: the argument's name, for the error.
        table_bytes: bytes of all tables with their optimizer state.

    Raises:
        ValueError: not a size.
        TypeError: neither an int nor a str.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} must be an int or a str, not {type(value).__name__}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name}={value}: a size cannot be negative")
        return value
    text = value.strip()
    if share := _SHARE.fullmatch(text):
        whole = table_bytes if share[2] else machine_memory_bytes()
        return int(whole * float(share[1]) / 100)
    size = _SIZE.fullmatch(text)
    if size is None or size[2].lower() not in _UNITS:
        raise ValueError(
            f"{name}={value!r} is not a size; write bytes as an int, or "
            '"512MiB", "2GiB", "50%" (of memory), "5% of tables"'
        )
    return int(float(size[1]) * _UNITS[size[2].lower()])


def format_size(size_bytes: float) -> str:
    """For people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
