"""A measurement for people: each figure, and what it means."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Final, NamedTuple

from ...system.sizes import format_size
from ..host import Accelerator, Host, SoftwareCosts, Storage
from .measurement import Measurement

__all__ = ["describe"]

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
    return "\n".join([*lines, "", *_reads(found), "", *_loops(found)])


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
    yield _Line("to its peer", _giga(gpu.peer.bytes_per_s), f"one float takes {gpu.peer.latency_us:.0f} us")
    yield _Line("matrix products", f"{gpu.flops / 1e12:,.1f} TFLOP/s", "bfloat16")


def _costs(host: Host) -> Iterator[_Line]:
    for each in fields(SoftwareCosts):
        yield _Line(each.name, f"{getattr(host.costs, each.name):,.3g}", each.metadata["help"])


def _reads(found: Measurement) -> Iterator[str]:
    depths = sorted({read.depth for read in found.reads})
    yield "Reads a second at random, by how many are under way"
    yield "  " + "block".ljust(10) + "".join(f"{depth:>12,}" for depth in depths)
    for size in sorted({read.block_bytes for read in found.reads}):
        own = {read.depth: read.reads_per_s for read in found.reads if read.block_bytes == size}
        yield "  " + format_size(size).ljust(10) + "".join(f"{own[depth]:>12,.0f}" for depth in depths)


def _loops(found: Measurement) -> Iterator[str]:
    yield "Loops on one core, us a batch: measured, and as the costs have it"
    width = max((len(loop.name) for loop in found.loops), default=0)
    for loop, fitted in zip(found.loops, found.fitted_ns, strict=True):
        yield f"  {loop.name:{width}}{loop.ns / 1e3:>12,.1f}{fitted / 1e3:>12,.1f}{fitted / loop.ns - 1:>+9.1%}"
