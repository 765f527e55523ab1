"""A host: what its parts can do, take and cost, and what tierstore's own work takes on it.

``tierstore plan measure`` makes one of the machine it runs on; the parts that ship (``parts``) are data with sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from ..rows import RowLayout
from ..settings.options import check_ranges, option
from ..system.sizes import format_size
from .dense import DenseWork

_MOST: Final = 1e18
TRAINING_FLOPS: Final = 3
"""Of forward and backward, for each of forward: a layer's gradient has two products of the size of its own. Other
work of a dense model is counted so too."""


class Checked:
    """A description whose fields are in their ranges; a ValueError names the field, its value and what is accepted."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Memory(Checked):
    """Memory of one kind, all of a host's (DDR) or of one accelerator (HBM)."""

    part: str = ""
    """Here and below: its name among the parts, "" where it is none of them."""
    capacity_bytes: float = option(0.0, "bytes", low=0, high=_MOST)
    bytes_per_s: float = option(0.0, "read in order, by all cores", low=0, high=_MOST)
    row_bytes_per_s: float = option(0.0, "read by rows of 256 bytes at random, by all cores", low=0, high=_MOST)
    watts: float = option(0.0, "in use", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class Storage(Checked):
    """One SSD."""

    part: str = ""
    capacity_bytes: float = option(0.0, "bytes", low=0, high=_MOST)
    read_latency_us: float = option(100.0, "of one read of 4 KiB with no other under way", low=0)
    reads_per_s: float = option(1.0, "of 4 KiB at random, many under way", low=1)
    read_bytes_per_s: float = option(1.0, "of large reads", low=1, high=_MOST)
    write_bytes_per_s: float = option(1.0, "of segments, 64 KiB or more, lasting", low=1, high=_MOST)
    drive_writes_a_day: float = option(1.0, "of its capacity, over the years of its warranty", low=0)
    watts: float = option(0.0, "reading at random", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class Link(Checked):
    """A way for bytes, one direction: PCIe to an accelerator, or a network."""

    part: str = ""
    bytes_per_s: float = option(1.0, "one direction", low=1, high=_MOST)
    latency_us: float = option(0.0, "of a transfer of nothing, there", low=0)


@dataclass(frozen=True, kw_only=True)
class Processor(Checked):
    """All cores of a host."""

    part: str = ""
    cores: int = option(1, "that threads may use", low=1, high=1 << 16)
    flops: float = option(1e9, "of float32 matrix products, by all cores, lasting", low=1, high=_MOST)
    watts: float = option(0.0, "under load", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class Accelerator(Checked):
    """One GPU."""

    part: str = ""
    hbm: Memory
    pcie: Link
    flops: float = option(1e9, "of matrix products in the precision of training, lasting", low=1, high=_MOST)
    watts: float = option(0.0, "under load, its memory's included", low=0)
    usd: float = option(0.0, "price", low=0)


def pooling_work(*, ids: float, rows: float, bags: float, layout: RowLayout) -> dict[str, float]:
    """Of a lookup, how often each of ``SoftwareCosts`` is paid, by its name; ``rows``: distinct ones, each table's by
    itself."""
    of = {"pool": ids, "pool_row": rows, "pool_bag": bags}
    return {key: cost for name, count in of.items() for key, cost in per_byte(name, count, layout.weight_bytes).items()}


def updating_work(*, ids: float, rows: float, bags: float, layout: RowLayout) -> dict[str, float]:
    """The same of backward and optimizer, which reads gradients of ids and bags, and rows with their state."""
    weights, whole = layout.weight_bytes, layout.row_bytes
    of = {"update": (ids, weights), "update_row": (rows, whole), "update_bag": (bags, weights)}
    return {key: cost for name, (count, size) in of.items() for key, cost in per_byte(name, count, size).items()}


def dense_work(dense: DenseWork, *, samples: float, threads: int, is_training: bool) -> dict[str, float]:
    """Of a dense model's step or query on the cores, beside its flops; seconds pass while all threads work."""
    times = TRAINING_FLOPS if is_training else 1
    products = 1000 * times * dense.dense_products
    return {
        "dense_product_us": products,
        "dense_wake_us": products if threads > 1 else 0.0,
        "dense_value_ns": times * samples / threads * dense.dense_values,
    }


def per_byte(name: str, count: float, size_bytes: float) -> dict[str, float]:
    """Of things of so many bytes."""
    return {f"{name}_ns": count, f"{name}_ns_per_byte": count * size_bytes}


@dataclass(frozen=True, kw_only=True)
class SoftwareCosts(Checked):
    """What tierstore's own work takes on one core of the host, beside what the parts are limited to.

    Each cost a row grows with the bytes that it touches: ``ns + ns_per_byte * bytes``. Of ids, bags and pooling these
    are the weights'; of a row that is updated, brought in or written, the optimizer's state too. ``tierstore plan
    measure`` fits them to loops over small stores; none is a guess.

    Lookup and training are paid by the id, by the distinct row of a batch (``row``: many ids may ask for one, and its
    bytes come from memory once) and by the bag (``bag``: its result, and in training its gradient). All three add up.
    """

    batch_us: float = option(0.0, "of a batch or a query, whatever its ids", low=0)
    step_us: float = option(0.0, "of a training step beyond those, whatever its ids", low=0)
    hand_over_us: float = option(0.0, "of a batch that was brought in ahead, on the thread that computes", low=0)
    ahead_us: float = option(0.0, "the same, on the thread that brings it in, whatever its ids", low=0)
    admit_ns: float = option(0.0, "of finding an id in a cache", low=0)
    admit_row_ns: float = option(0.0, "the same, a distinct row of the batch", low=0)
    pool_ns: float = option(0.0, "of pooling an id's row", low=0)
    pool_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    pool_row_ns: float = option(0.0, "of pooling, a distinct row of the batch", low=0)
    pool_row_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    pool_bag_ns: float = option(0.0, "of pooling, a bag", low=0)
    pool_bag_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    update_ns: float = option(0.0, "of backward and optimizer, an id", low=0)
    update_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    update_row_ns: float = option(0.0, "of backward and optimizer, a distinct row of the batch", low=0)
    update_row_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    update_bag_ns: float = option(0.0, "of backward and optimizer, a bag", low=0)
    update_bag_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    miss_ns: float = option(0.0, "of bringing in a row from a page that the system has in memory", low=0)
    miss_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    read_ns: float = option(0.0, "of asking the device for a page, beside the device's own time", low=0)
    append_ns: float = option(0.0, "of appending a row to the log, and having the device keep it", low=0)
    append_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    move_ns: float = option(0.0, "of a row that cleaning moves: reading and appending it", low=0)
    move_ns_per_byte: float = option(0.0, "the same, a byte of the row", low=0)
    transaction_us: float = option(0.0, "of a transaction in which rows are appended, however many", low=0)
    share_us: float = option(0.0, "of sharing a batch's lookups, or its updates, between threads", low=0)
    dense_product_us: float = option(0.0, "of a matrix product of a dense model on the cores, whatever its size", low=0)
    dense_wake_us: float = option(0.0, "the same, of sharing it between threads", low=0)
    dense_value_ns: float = option(0.0, "of a value that a dense model reads or writes, on one core", low=0)

    def ns_of(self, work: Mapping[str, float]) -> float:
        """Of amounts by the name of their cost; 1,000 is one of a cost in microseconds."""
        return float(sum(getattr(self, name) * amount for name, amount in work.items()))

    def admission_ns(self, *, ids: float, rows: float) -> float:
        """Of finding them in a cache in which not all rows fit."""
        return ids * self.admit_ns + rows * self.admit_row_ns


@dataclass(frozen=True, kw_only=True)
class Host(Checked):
    """One machine.

    Attributes:
        costs: measured, or those of a machine like it.
        source: where the figures come from.
    """

    name: str
    processor: Processor
    ddr: Memory
    network: Link
    costs: SoftwareCosts
    storage: tuple[Storage, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    watts: float = option(0.0, "of what is not listed: board, fans, losses of the power supply", low=0)
    usd: float = option(0.0, "price of what is not listed", low=0)
    source: str = ""


def shared_by(host: Host, ranks: int) -> Host:
    """What each of so many processes on it has."""
    drives = tuple(
        replace(
            each, capacity_bytes=each.capacity_bytes / ranks, reads_per_s=each.reads_per_s / ranks,
            read_bytes_per_s=each.read_bytes_per_s / ranks, write_bytes_per_s=each.write_bytes_per_s / ranks,
        )
        for each in host.storage
    )  # fmt: skip
    memory, processor = host.ddr, host.processor
    return replace(
        host,
        processor=replace(processor, cores=max(1, processor.cores // ranks), flops=processor.flops / ranks),
        ddr=replace(
            memory, capacity_bytes=memory.capacity_bytes / ranks, bytes_per_s=memory.bytes_per_s / ranks,
            row_bytes_per_s=memory.row_bytes_per_s / ranks,
        ),
        storage=drives,
    )  # fmt: skip


def with_accelerators(host: Host, accelerators: tuple[Accelerator, ...]) -> Host:
    """The host with these; its name says so where they are fewer than it is named for."""
    most, left = len(host.accelerators), len(accelerators)
    name = host.name
    if left < most:
        name += f" with {left} of {most} GPUs" if left else f" without {'its GPU' if most == 1 else 'GPUs'}"
    return replace(host, name=name, accelerators=accelerators)


def parts_of(host: Host) -> str:
    """The named parts that it has; "" if it is not made of parts."""
    if not host.processor.part:
        return ""
    devices = [*(drive.part for drive in host.storage), *(gpu.part for gpu in host.accelerators)]
    counted = [f"{len(list(alike))} x {part}" for part, alike in groupby(devices)]
    memory = f"{format_size(host.ddr.capacity_bytes)} of {host.ddr.part}"
    return ", ".join([host.processor.part, memory, *counted, host.network.part])
