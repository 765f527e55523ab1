"""All measurements of one machine, in order, as a ``Host``."""

import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ...kernels.threads import default_threads
from ...system.sizes import format_size
from ..host import Host, Link
from .accelerators import measure_accelerators
from .fit import Fitted, Loop, fit_costs
from .loops import LoopSizes, measure_loops
from .memory import measure_memory, measure_processor
from .storage import ReadRate, measure_storage, require_device

__all__ = ["Measurement", "Progress", "measure", "measure_host", "sizes_for"]

Progress = Callable[[str, float], None]
"""Told what is being measured, and which share of all is done, from 0 to 1."""

_DEFAULT_SECONDS: Final = 50.0
_LEAST_SECONDS: Final = 1.0
_MOST_SECONDS: Final = 3600.0
_FILE_BYTES: Final = 1 << 30
_LEAST_FILE_BYTES: Final = 32 << 20
_NETWORK_BYTES_PER_S: Final = 1.12e9
_NETWORK_LATENCY_US: Final = 30.0
_COLD_SECONDS: Final = 0.25
"""That a batch of cold reads may take; fewer are read of a slow device."""

_SHARES: Final = {"memory": 0.1, "matrix products": 0.04, "SSD": 0.35}
"""Of the time, by what is measured; loops over stores and GPUs take the rest."""
_LOOPS_BEGIN: Final = 0.55
_LOOPS_END: Final = 0.95


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was found.

    Attributes:
        reads: of the SSD, by block size and by how many were under way.
        loops: over stores, as they were timed.
        fitted_ns: what the costs in the host say of each loop.
    """

    host: Host
    reads: tuple[ReadRate, ...]
    loops: tuple[Loop, ...]
    fitted_ns: tuple[float, ...]


def measure_host(
    folder: str | Path, *, seconds: float = _DEFAULT_SECONDS, progress: Progress | None = None, device: str = "cpu"
) -> Host:
    """Time this machine: memory, cores, the SSD under ``folder``, GPUs, and tierstore's own work on a core.

    Prices, watts, the network and what a drive may be written are not measured: prices and watts are 0, the others
    what ``Host.source`` says. A file of up to 1 GiB and small stores are made in ``folder`` and removed. Kernels that
    were never used here are compiled first, which takes up to half a minute more.

    Args:
        folder: on the SSD that stores will be on.
        seconds: to spend, about; with fewer, figures are less sure.
        device: "cpu", or "cuda" for all GPUs, or "cuda:1".

    Raises:
        ValueError: no such folder or device, too little free, or a file system in memory.
        OSError: a file system without direct reads.
    """
    return measure(folder, seconds=seconds, progress=progress, device=device).host


def measure(
    folder: str | Path, *, seconds: float = _DEFAULT_SECONDS, progress: Progress | None = None, device: str = "cpu"
) -> Measurement:
    """As ``measure_host``, with what the figures were made of."""
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ValueError(f"seconds={seconds!r}: expected a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:,g}")
    say = progress or _say_nothing
    folder = Path(folder)
    require_device(folder)
    threads = default_threads()
    say("GPUs", 0.0)
    accelerators = measure_accelerators(device, seconds=seconds / 10)
    say("memory", 0.05)
    memory = measure_memory(seconds=seconds * _SHARES["memory"], threads=threads)
    processor = measure_processor(seconds=seconds * _SHARES["matrix products"], threads=threads)
    with _scratch(folder) as scratch:
        say("SSD", 0.2)
        file_bytes = max(_LEAST_FILE_BYTES, int(_FILE_BYTES * min(1.0, seconds / _DEFAULT_SECONDS)))
        found = measure_storage(scratch, seconds=seconds * _SHARES["SSD"], file_bytes=file_bytes)
        say("tierstore's own work", _LOOPS_BEGIN)
        sizes = sizes_for(seconds, found.storage.reads_per_s)
        loops = measure_loops(scratch, sizes=sizes, progress=lambda share: _say_share(say, share))
    fitted: Fitted = fit_costs(loops)
    say("done", 1.0)
    host = Host(
        name=platform.node() or "this machine",
        processor=processor,
        ddr=memory,
        network=Link(bytes_per_s=_NETWORK_BYTES_PER_S, latency_us=_NETWORK_LATENCY_US),
        costs=fitted.costs,
        storage=(found.storage,),
        accelerators=accelerators,
        source=_source(folder, threads),
    )
    return Measurement(host=host, reads=found.reads, loops=tuple(loops), fitted_ns=fitted.fitted_ns)


def _say_nothing(_step: str, _share: float) -> None:
    pass


def _say_share(say: Progress, share: float) -> None:
    say("tierstore's own work", _LOOPS_BEGIN + (_LOOPS_END - _LOOPS_BEGIN) * share)


def sizes_for(seconds: float, reads_per_s: float) -> LoopSizes:
    """Of the loops, for the time there is and the speed of the device."""
    share = min(1.0, seconds / _DEFAULT_SECONDS)
    whole = LoopSizes()
    samples = max(64, int(whole.samples * share))
    return LoopSizes(
        rows=max(20_000, int(whole.rows * share)),
        samples=samples,
        pooling_factor=whole.pooling_factor,
        miss_rows=max(256, int(whole.miss_rows * share) // whole.pooling_factor * whole.pooling_factor),
        passes=max(3, int(whole.passes * share)),
        cold_rows=max(64, int(reads_per_s * _COLD_SECONDS * share)),
    )


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own, gone afterwards whatever happens."""
    path = Path(tempfile.mkdtemp(prefix="tierstore-measure-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _source(folder: Path, threads: int) -> str:
    return (
        f"tierstore plan measure on {_processor_name()}, {threads} cores, "
        f"{format_size(psutil.virtual_memory().total)}, {folder.resolve()}; network (10 Gb/s), drive writes a day, "
        "watts and prices were not measured"
    )


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "an unknown processor")
