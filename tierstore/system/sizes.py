"""Byte sizes as people write them: 2147483648, "2GiB", "512MB", "50%" (of memory), "5% of tables"; and what a machine
and its devices have: memory, CPUs."""

import contextlib
import logging
import mmap
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import BudgetError
from .checks import excerpt

if TYPE_CHECKING:
    import torch

_LOG: Final = logging.getLogger("tierstore")
_UNITS: Final = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_STATM: Final = Path("/proc/self/statm")
_MAX_BYTES: Final = 1 << 63
_MAX_TEXT: Final = 40
"""No size takes more characters; Python refuses integers of many thousands of digits."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%(\s*of\s+tables)?", re.IGNORECASE)


def format_count(count: int, noun: str) -> str:
    """ "1 row", "2,000 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def machine_memory_bytes() -> int:
    """Memory this process may use: the machine's, or a limit of its control groups if one is less (a container's)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files("memory", "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def free_memory_bytes() -> int:
    """Memory that this process could still take, page cache included; all of it where the system does not tell."""
    left = machine_memory_bytes()
    with contextlib.suppress(OSError, IndexError):
        _, resident, of_files, *_ = map(int, _STATM.read_text().split())
        available = int(re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
        left = min(available, left - (resident - of_files) * mmap.PAGESIZE)
    return left


def cpu_limit() -> float:
    """CPUs this process may use: those it may run on, or a quota of its control groups if one is less."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for path in _limit_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, *period = path.read_text().split()
            of = period[0] if period else (path.parent / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                limits.append(int(quota) / int(of))
    return min(limits)


def _limit_files(controller: str, name: str, first_name: str) -> Iterator[Path]:
    """Where limits may stand: the process's control group and those around it, versions 2 and 1. A container may see
    the groups from the root of its own, where the path in /proc leads nowhere."""
    try:
        lines = os.fsdecode(_CGROUP.read_bytes()).splitlines()
    except OSError:
        lines = []
    groups = [(_CGROUP_ROOT, name, "/"), (_CGROUP_ROOT / controller, first_name, "/")]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            groups.append((_CGROUP_ROOT, name, group))
        elif controller in controllers.split(","):
            groups.append((_CGROUP_ROOT / controller, first_name, group))
    for root, file, group in groups:
        inside = Path(group.lstrip("/"))
        if ".." not in inside.parts:
            yield from (root / part / file for part in (inside, *inside.parents))


def file_memory_bytes() -> int:
    """Resident memory of this process that belongs to files, which ``top`` shows as SHR; 0 where it is not told."""
    with contextlib.suppress(OSError):
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    return 0


def require_memory(size_bytes: int, name: str) -> None:
    """BudgetError if ``size_bytes`` is more than this process may use at all; ``name`` is the argument with its
    value."""
    total = machine_memory_bytes()
    if size_bytes > total:
        raise BudgetError(
            f"{name} would take {format_size(size_bytes)} and this machine, or this container, has "
            f'{format_size(total)}; give less, as "50%" of it'
        )


def parse_size(value: int | str, *, name: str, table_bytes: int = 0, memory_bytes: int | None = None) -> int:
    """Bytes meant by ``value``: a number of bytes; a number with a unit ("KiB" are powers of two, "kB" of ten); "N%"
    of ``memory_bytes``, by default the machine's; "N% of tables": of ``table_bytes``. ValueError names the
    argument for what is no size, TypeError for another type."""
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise TypeError(f"{name} must be an int or a str, not {type(value).__name__}")
    if not isinstance(value, str):
        if not 0 <= (size_bytes := int(value)) < _MAX_BYTES:
            raise ValueError(f"{name}={excerpt(size_bytes)}: a size is not negative, and below 2**63")
        return size_bytes
    text = value.strip()
    share, size = (pattern.fullmatch(text) if len(text) <= _MAX_TEXT else None for pattern in (_SHARE, _SIZE))
    if share is not None:
        memory = machine_memory_bytes() if memory_bytes is None else memory_bytes
        whole = table_bytes if share[2] else memory
        return min(int(whole * Fraction(share[1]) / 100), _MAX_BYTES - 1)
    size_bytes = -1 if size is None else int(Fraction(size[1]) * _UNITS.get(size[2].lower(), -1))
    if not 0 <= size_bytes < _MAX_BYTES:
        raise ValueError(
            f"{name}={excerpt(value)} is not a size; write bytes as an int, or "
            '"512MiB", "2GiB", "50%" (of memory), "5% of tables"'
        )
    return size_bytes


def is_share_of_tables(value: object) -> bool:
    """Whether the size is written as "5% of tables"."""
    share = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    return share is not None and share[2] is not None


def format_size(size_bytes: float) -> str:
    """For people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def resolve_device(device: "str | torch.device", hbm: int | str) -> "torch.device":
    """The device meant by the arguments of ``tierstore.open``; ValueError if it is none that rows can live on.
    BudgetError: ``hbm`` of the CPU is more than the machine has."""
    import torch  # loaded late: the command line parses sizes, too

    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device={device!r} is no device; give "cpu", "cuda" or "cuda:1"') from error
    has_hbm = parse_size(hbm, name="hbm", table_bytes=1 << 62) > 0
    if resolved.type == "cpu":
        require_memory(parse_size(hbm, name="hbm"), f"hbm={hbm!r}")
        if has_hbm and torch.cuda.is_available():
            _LOG.warning('hbm=%r is of host memory, and slow, though there is a GPU: open with device="cuda"', hbm)
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f'device={device!r}: rows live in memory of the CPU or of a CUDA device; give "cpu" or "cuda"')
    if not torch.cuda.is_available():
        raise ValueError(
            f'device={str(device)!r}: torch {torch.__version__} sees no CUDA device here; give device="cpu", or '
            "install a torch built for CUDA on a machine with a GPU and its driver"
        )
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: there are {torch.cuda.device_count()} CUDA devices, from 0 on")
    if not has_hbm:
        raise ValueError(
            f'device={str(device)!r} with hbm={hbm!r}: rows need memory on the GPU; give hbm="2GiB" or "10% of tables"'
        )
    return torch.device("cuda", index)


def device_memory_bytes(device: "torch.device") -> int:
    """Memory of the device, or what this process may use of the machine's."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes()
