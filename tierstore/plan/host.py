"""A host: what its parts can do, take and cost, and what tierstore's own work takes on it."""

from dataclasses import dataclass, replace
from typing import Any, Final

from ..layout import RowLayout
from ..settings.sections import Checked, option
from .dense import DenseWork

_MOST: Final = 1e18
ID_BYTES: Final = 8
TRAINING_FLOPS: Final = 3
"""Of forward and backward, for each of forward: a layer's gradient has two products of the size of its own. Other
work of a dense model is counted so too."""
AHEAD_BATCHES, HANDED_OVER_BATCHES = 7, 5
"""Times ``batch_us``: fetching a batch ahead, and taking it over; 5.6 to 7 and 4 to 6 in measured runs."""


@dataclass(frozen=True, kw_only=True)
class Memory(Checked):
    """Memory of one kind, all of a host's (DDR) or of one accelerator (HBM)."""

    part: str = ""  # here and below: its name among the parts
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


@dataclass(frozen=True, kw_only=True)
class SoftwareCosts(Checked):
    """What tierstore's own work takes on one core of the host, beyond what the parts are limited to;
    docs/planning/model.md says how a step adds it up."""

    batch_us: float = option(
        0.0,
        "a batch or a query, whatever its ids; a training step takes three times this, one fetched ahead twelve more",
        low=0,
    )
    id_ns: float = option(0.0, "an id, and again a distinct row: found in a cache, or updated", low=0)
    byte_ns: float = option(0.0, "a byte of a row or a bag in memory", low=0)
    miss_ns: float = option(0.0, "a row fetched from a page that the system has in memory", low=0)
    read_ns: float = option(0.0, "a page read from the device, without the device's own time", low=0)
    append_ns: float = option(0.0, "a row appended to the log and synced", low=0)
    append_ns_per_byte: float = option(0.0, "a byte of such a row", low=0)
    transaction_us: float = option(0.0, "a transaction in which rows are appended, however many", low=0)
    wake_us: float = option(
        0.0,
        "sharing a matrix product between threads, and starting it; a pool's lookups or updates take 1.7 of it",
        low=0,
    )
    value_ns: float = option(0.0, "a value that a dense model reads or writes, on one core", low=0)

    def lookup_ns(self, *, ids: float, rows: float, bags: float, layout: RowLayout) -> float:
        """Pooling rows that are in memory; ``rows``: distinct ones."""
        return self.byte_ns * (ID_BYTES * ids + layout.weight_bytes * (rows + bags))

    def update_ns(self, *, ids: float, rows: float, bags: float, layout: RowLayout) -> float:
        """Backward and optimizer of the same: gradients of bags, and rows with their state, read and written."""
        moved = 2 * (layout.row_bytes * rows + layout.weight_bytes * bags)
        return self.admission_ns(ids=ids, rows=rows) + self.byte_ns * moved

    def admission_ns(self, *, ids: float, rows: float) -> float:
        """Finding them in a cache in which not all rows fit."""
        return self.id_ns * (ids + rows)

    def miss_row_ns(self, layout: RowLayout) -> float:
        """A row fetched from the page cache."""
        return self.miss_ns + self.byte_ns * layout.row_bytes

    def append_row_ns(self, layout: RowLayout) -> float:
        """A row appended."""
        return self.append_ns + self.append_ns_per_byte * layout.row_bytes

    def dense_ns(self, dense: DenseWork, *, samples: float, threads: int, is_training: bool) -> tuple[float, float]:
        """A dense model's step or query beyond its flops: of starting its products, and of its values over all
        threads."""
        times = TRAINING_FLOPS if is_training else 1
        starts = 1e3 * times * dense.dense_products * self.wake_us if threads > 1 else 0.0
        return starts, times * samples / threads * dense.dense_values * self.value_ns


@dataclass(frozen=True, kw_only=True)
class Host(Checked):
    """One machine; ``source``: where its figures come from."""

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


def times(value: Any, factor: float, *paths: str) -> Any:
    """With some numbers multiplied; "ddr.usd" is a field of a field, of several parts that of each."""
    for path in paths:
        name, _, rest = path.partition(".")
        part = getattr(value, name)
        if isinstance(part, tuple):
            changed: Any = tuple(times(each, factor, rest) for each in part)
        else:
            changed = times(part, factor, rest) if rest else part * factor
        value = replace(value, **{name: changed})
    return value


def with_accelerators(host: Host, accelerators: tuple[Accelerator, ...]) -> Host:
    """With these; its name says so where they are fewer than before."""
    most, left = len(host.accelerators), len(accelerators)
    name = host.name
    if left < most:
        name += f" with {left} of {most} GPUs" if left else f" without {'its GPU' if most == 1 else 'GPUs'}"
    return replace(host, name=name, accelerators=accelerators)
