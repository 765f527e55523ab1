"""A measurement for people: each figure, and what it means."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from ...system.sizes import format_size
from ..host import Accelerator, Host, Storage
from .measurement import Measurement

__all__ = ["describe"]

_COLUMN: Final = 34
_ROW_BYTES: Final = 264
"""A row of 64 float32 with what row-wise Adagrad keeps of it."""
_GROWING: Final = {
    "pool": "pooling an id's row",
    "pool_row": "  and a distinct row of the batch",
    "pool_bag": "  and a bag",
    "update": "training on an id",
    "update_row": "  and a distinct row of the batch",
    "update_bag": "  and a bag",
    "miss": "bringing in a row",
    "append": "appending a row that left",
    "move": "moving a row, so that room comes free",
}


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
        "tierstore's own work, on one core": _costs(host),
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
    costs = host.costs
    yield _Line("a batch or a query", f"{costs.batch_us:,.0f} us", "whatever its ids")
    yield _Line("  and each table but the first", f"{costs.table_us:,.1f} us", "")
    yield _Line("a training step", f"{costs.step_us:,.0f} us", "beyond that, whatever its ids")
    yield _Line("  and each table but the first", f"{costs.step_table_us:,.1f} us", "")
    yield _Line("a batch brought in ahead", f"{costs.ahead_us:,.0f} us", "on the thread that does")
    yield _Line("  and handed over", f"{costs.hand_over_us:,.0f} us", "on the thread that computes")
    yield _Line("finding an id in a cache", f"{costs.admit_ns:,.1f} ns", "where not all rows fit")
    yield _Line("  and a distinct row of the batch", f"{costs.admit_row_ns:,.1f} ns", "")
    for name, what in _GROWING.items():
        ns, ns_per_byte = getattr(costs, f"{name}_ns"), getattr(costs, f"{name}_ns_per_byte")
        meaning = f"of {_ROW_BYTES} bytes: {ns:,.1f} + {ns_per_byte:.3f} a byte"
        yield _Line(what, f"{ns + _ROW_BYTES * ns_per_byte:,.1f} ns", meaning)
    yield _Line("asking for a page", f"{costs.read_ns:,.0f} ns", "of the device, beside its own time")
    yield _Line("a transaction of appended rows", f"{costs.transaction_us:,.0f} us", "")


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
