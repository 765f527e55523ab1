"""What the device itself gives, by fio: the limit beside which reads and writes are told."""

import ctypes
import json
import mmap
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

from tierstore.system import page_cache

DEPTH: Final = 64
_PAGE_BYTES: Final = 4096
_WRITTEN_BYTES: Final = 2**27
_TURNS: Final = 5


def resident_share(path: Path) -> float:
    """The share of the file's pages that are in the page cache, from 0 to 1."""
    size_bytes = path.stat().st_size
    libc, flags = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
    with path.open("rb") as file:
        address = page_cache.map_shared(file.fileno(), size_bytes, mmap.PROT_READ)
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), flags):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        page_cache.unmap(address, size_bytes)
    return sum(flag & 1 for flag in flags.raw) / len(flags)


def _fio(path: Path, **settings: object) -> dict[str, Any]:
    """What one job did, past the page cache unless told otherwise."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is missing, which measures the device's limit: on Debian and Ubuntu, apt install fio.")
    given = {"name": "limit", "filename": path, "direct": 1, "iodepth": DEPTH, "ioengine": "io_uring"} | settings
    flags = [f"--{name}={value}" for name, value in given.items()]
    done = subprocess.run(["fio", "--output-format=json", *flags], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout)["jobs"][0])


class Seconds(NamedTuple):
    """What reads took: by the clock, and of a processor."""

    elapsed: float
    processor: float


def read_seconds(path: Path, reads: int, *, direct: bool = True) -> Seconds:
    """Of so many reads of 4 KiB at random places of a file, 64 at a time, into registered buffers. Unless ``direct``,
    they go by way of the page cache, from which fio drops the file first."""
    batches = {"fixedbufs": 1, "registerfiles": 1, "iodepth_batch_submit": 16, "iodepth_batch_complete_max": 32}
    places = {"rw": "randread", "bs": _PAGE_BYTES, "number_ios": reads, "norandommap": 1, "randrepeat": 0}
    job = _fio(path, direct=int(direct), **places, **batches)
    processor = 1e-5 * (job["usr_cpu"] + job["sys_cpu"]) * job["read"]["runtime"]  # of per cent and ms
    return Seconds(float(reads / job["read"]["iops"]), processor)


def reads_per_s(path: Path) -> float:
    """Reads of 4 KiB a second at queue depth 64."""
    return statistics.median(20_000 / read_seconds(path, 20_000).elapsed for _ in range(_TURNS))


def written_bytes_per_s(folder: Path) -> float:
    """Of writing on, in pieces of 4 MiB, synced at the end."""
    path, rates = folder / "device.dat", []
    for _ in range(_TURNS):
        job = _fio(path, rw="write", bs="4m", iodepth=1, size=_WRITTEN_BYTES, end_fsync=1)
        rates.append(1e3 * _WRITTEN_BYTES / float(job["job_runtime"]))
        path.unlink()
    return statistics.median(rates)
