"""All measurements of one machine, in order, as a ``Host``; and for people, each figure and what it means."""

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from ...kernels.threads import default_threads
from ...system.sizes import format_size
from ..host import Accelerator, Host, Link, SoftwareCosts, Storage
from .dense import measure_dense
from .fit import Loop, fit_costs
from .loops import LoopSizes, measure_loops
from .machine import measure_accelerators, measure_memory, measure_processor
from .storage import measure_storage, require_device

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

_SHARES: Final = {"memory": 0.1, "matrix products": 0.04, "dense models": 0.08, "SSD": 0.35}
"""Of the time, by what is measured; loops over stores and GPUs take the rest."""
_LOOPS_BEGIN: Final = 0.55
_LOOPS_END: Final = 0.95


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was found.

    Attributes:
        loops: over stores, as they were timed.
        fitted_ns: what the costs in the host say of each loop.
    """

    host: Host
    loops: tuple[Loop, ...]
    fitted_ns: tuple[float, ...]


def measure(
    folder: str | Path, *, seconds: float = _DEFAULT_SECONDS, progress: Progress | None = None, device: str = "cpu"
) -> Measurement:
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
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ValueError(f"seconds={seconds!r}: expected a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:,g}")
    say = progress or (lambda _step, _share: None)
    folder = Path(folder)
    require_device(folder)
    threads = default_threads()
    say("GPUs", 0.0)
    accelerators = measure_accelerators(device, seconds=seconds / 10)
    say("memory", 0.05)
    memory = measure_memory(seconds=seconds * _SHARES["memory"], threads=threads)
    processor = measure_processor(seconds=seconds * _SHARES["matrix products"], threads=threads)
    with tempfile.TemporaryDirectory(prefix="tierstore-measure-", dir=folder, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        say("SSD", 0.2)
        file_bytes = max(_LEAST_FILE_BYTES, int(_FILE_BYTES * min(1.0, seconds / _DEFAULT_SECONDS)))
        drive = measure_storage(scratch, seconds=seconds * _SHARES["SSD"], file_bytes=file_bytes)

        def say_share(share: float) -> None:
            say("tierstore's own work", _LOOPS_BEGIN + (_LOOPS_END - _LOOPS_BEGIN) * share)

        say_share(0.0)
        loops = measure_loops(scratch, sizes=sizes_for(seconds, drive.reads_per_s), progress=say_share)
    loops += measure_dense(processor, seconds=seconds * _SHARES["dense models"])
    fitted = fit_costs(loops)
    say("done", 1.0)
    host = Host(
        name=platform.node() or "this machine",
        processor=processor,
        ddr=memory,
        network=Link(bytes_per_s=_NETWORK_BYTES_PER_S, latency_us=_NETWORK_LATENCY_US),
        costs=fitted.costs,
        storage=(drive,),
        accelerators=accelerators,
        source=_source(folder, threads),
    )
    return Measurement(host=host, loops=tuple(loops), fitted_ns=fitted.fitted_ns)


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


# For people

_COLUMN: Final = 34


class _Line(NamedTuple):
    what: str
    figure: str
    meaning: str


def describe(found: Measurement) -> str:
    """Tables of what was measured, what each figure means, and how well the costs fit the loops."""
    host = found.host
    sections = {
        "Memory and cores": _memory(host),
        **{f"SSD {number}": _storage(each) for number, each in enumerate(host.storage)},
        **{f"GPU {number}": _accelerator(each) for number, each in enumerate(host.accelerators)},
        "tierstore's own work, on one core: us or ns": _costs(host),
    }
    lines = [host.source]
    for title, section in sections.items():
        lines += ["", title, *(f"  {each.what:{_COLUMN}}{each.figure:>14}   {each.meaning}" for each in section)]
    return "\n".join([*lines, "", *_loops(found)])


def _giga(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s"


def _memory(host: Host) -> Iterator[_Line]:
    ddr, processor = host.ddr, host.processor
    yield _Line("memory", format_size(ddr.capacity_bytes), "that processes here may take")
    yield _Line("read in order", _giga(ddr.bytes_per_s), "by all cores; the limit of scans and copies")
    yield _Line("read by rows at random", _giga(ddr.row_bytes_per_s), "256 bytes each; the limit of lookups in memory")
    yield _Line("matrix products", f"{processor.flops / 1e9:,.0f} GFLOP/s", f"float32, on {processor.cores} cores")


def _storage(ssd: Storage) -> Iterator[_Line]:
    yield _Line("size", format_size(ssd.capacity_bytes), "of the file system")
    yield _Line("one read of 4 KiB", f"{ssd.read_latency_us:,.0f} us", "none other under way: what one miss waits")
    yield _Line("reads of 4 KiB at random", f"{ssd.reads_per_s:,.0f} /s", "many under way: the limit of cold rows")
    yield _Line("large reads", _giga(ssd.read_bytes_per_s), "1 MiB each, 8 under way")
    yield _Line("large writes", _giga(ssd.write_bytes_per_s), "1 MiB each, lasting")


def _accelerator(gpu: Accelerator) -> Iterator[_Line]:
    yield _Line("memory", format_size(gpu.hbm.capacity_bytes), "of the device")
    yield _Line("read in order", _giga(gpu.hbm.bytes_per_s), "by a sum")
    yield _Line("read by rows at random", _giga(gpu.hbm.row_bytes_per_s), "256 bytes each, pooled by 32")
    yield _Line(
        "from the host", _giga(gpu.pcie.bytes_per_s), f"page-locked; one float takes {gpu.pcie.latency_us:.0f} us"
    )
    yield _Line("matrix products", f"{gpu.flops / 1e12:,.1f} TFLOP/s", "bfloat16")


def _costs(host: Host) -> Iterator[_Line]:
    for each in fields(SoftwareCosts):
        yield _Line(each.name, f"{getattr(host.costs, each.name):,.3g}", each.metadata["help"])


def _loops(found: Measurement) -> Iterator[str]:
    yield "Loops, on one core but for dense models on more, us a batch: measured, and as the costs have it"
    width = max((len(loop.name) for loop in found.loops), default=0)
    for loop, fitted in zip(found.loops, found.fitted_ns, strict=True):
        yield f"  {loop.name:{width}}{loop.ns / 1e3:>12,.1f}{fitted / 1e3:>12,.1f}{fitted / loop.ns - 1:>+9.1%}"
