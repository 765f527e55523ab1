"""How many random 4 KiB reads a second the device gives: direct reads, past the page cache, from many threads.

The limit that cold reads are measured against.
"""

import os
import sys
from pathlib import Path

import numpy as np

from tierstore.plan.measure import READ_BYTES, DirectReader, direct_reader

from .common import Report, Run, Spread, Table, measure, per_second, program

__all__ = ["READ_BYTES", "DirectReader", "data_file", "direct_reader", "run"]


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
