"""How many random 4 KiB reads a second the device gives: direct reads, past the page cache, from many threads.

The limit that cold reads are measured against.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from .common import Report, Run, Spread, Table, measure, per_second, program

__all__ = ["READ_BYTES", "DirectReader", "data_file", "run"]

READ_BYTES: Final = 4096

_PREAD: Final[Any] = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))


@numba.njit(nogil=True, cache=True)
def _read_each(descriptor: int, address: int, offsets: NDArray[np.int64]) -> int:
    """Read READ_BYTES at each offset to ``address``; how many came back whole."""
    whole = 0
    for index in range(offsets.shape[0]):
        if _PREAD(descriptor, address, np.uintp(4096), offsets[index]) == 4096:
            whole += 1
    return whole


class DirectReader:
    """Random direct reads of one file, ``depth`` at a time: one thread for each, every one in its own system call."""

    def __init__(self, path: Path, depth: int) -> None:
        self._path = path
        self._depth = depth
        self._pages = path.stat().st_size // READ_BYTES
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise OSError(
                error.errno, f"{path} cannot be read directly ({error.strerror}); use --dir on another file system"
            ) from error
        # Anonymous maps begin on a page, as direct reads want it.
        self.buffer = mmap.mmap(-1, depth * READ_BYTES)
        self._address = np.frombuffer(self.buffer, np.uint8).ctypes.data
        self._threads = ThreadPoolExecutor(depth, "direct-read")
        self.read(np.zeros(depth, np.int64))

    def random_offsets(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        return generator.integers(0, self._pages, count) * READ_BYTES

    def read(self, offsets: NDArray[np.int64]) -> None:
        """Read a page at each offset and return when all have come."""
        parts = np.array_split(offsets, self._depth)
        addresses = range(self._address, self._address + self._depth * READ_BYTES, READ_BYTES)
        whole = sum(self._threads.map(_read_each, [self._descriptor] * self._depth, addresses, parts))
        if whole != len(offsets):
            raise OSError(f"{self._path}: {len(offsets) - whole} of {len(offsets)} direct reads failed")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)


@contextmanager
def direct_reader(path: Path, depth: int) -> Iterator[DirectReader]:
    reader = DirectReader(path, depth)
    try:
        yield reader
    finally:
        reader.close()


def data_file(folder: Path, size_bytes: int) -> Path:
    """A file of that many random bytes in ``folder``: zeros or holes might never reach the device."""
    path = folder / f"random-{size_bytes >> 20}MiB.dat"
    if path.exists() and path.stat().st_size == size_bytes:
        return path
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, size_bytes, 1 << 24):
            file.write(generator.bytes(min(1 << 24, size_bytes - start)))
        os.fsync(file.fileno())
    return path


def run(request: Run) -> Report:
    config = request.config
    path = data_file(request.folder, config["file_mib"] << 20)
    generator = np.random.default_rng(config["seed"])
    rates: dict[int, Spread] = {}
    for depth in config["depths"]:
        with direct_reader(path, depth) as reader:
            count = config["reads"] if depth > 1 else config["reads"] // 8
            times = measure(
                {"read": lambda: reader.read(reader.random_offsets(generator, count))},  # noqa: B023
                repetitions=config["repetitions"],
            )
        rates[depth] = per_second(count, times["read"])
    return Report(
        question="How many random 4 KiB reads a second does the device give?",
        tables=[
            Table(
                title="direct reads, one thread for each read in flight",
                columns=["queue depth", "reads/s", "lowest", "highest"],
                rows=[
                    [str(depth), f"{rate.median:,.0f}", f"{rate.lowest:,.0f}", f"{rate.highest:,.0f}"]
                    for depth, rate in rates.items()
                ],
            )
        ],
        figures={f"reads_per_s_depth_{depth}": rate.median for depth, rate in rates.items()},
        notes=[
            f"O_DIRECT pread of {READ_BYTES} bytes at uniformly random pages of a file of {config['file_mib']} MiB."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("device", run))
