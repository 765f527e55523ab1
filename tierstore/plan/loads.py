"""What one step or query keeps busy: a term for each resource, and how they make up a step.

Everything is of one host. Lanes work side by side, the resources of one lane one after another, so a step takes as
long as its longest lane. ``SERIAL`` resources work for the batch that is computed. If rows are brought in ahead, those
of ``AHEAD`` work for later batches meanwhile, one after another, as whoever brings in a row has to make room for it
first; and so do ``LINKS`` and ``DRIVES``. ``SHARED`` ones limit what all others take of them.
``WAITS`` are for a core that another thread has: of few cores each is taken for its share of what the others do.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .prediction import Lane, ResourceLoad, Setup
from .tiers import PoolLoad, segment_bytes

SERIAL: Final = ("batch", "lookups", "hbm", "model", "network", "wait for a core")
AHEAD: Final = ("cold rows", "write-back", "wait ahead")
LINKS: Final = ("pcie",)
DRIVES: Final = ("ssd reads", "ssd writes")
SHARED: Final = ("cores", "ddr")
WAITS: Final = ("wait for a core", "wait ahead")

ID_BYTES: Final = 8
FLOAT_BYTES: Final = 4
TRAINING_FLOPS: Final = 3
"""Of forward and backward, for each of forward: a layer's gradient has two products of the size of its own."""
FLOPS_PER_WEIGHT: Final = 2
"""Of a dense layer, forward, a sample: by which its weights are told from its work."""


def loads_of(setup: Setup, pools: Sequence[PoolLoad], *, is_ahead: bool) -> tuple[ResourceLoad, ...]:
    """Of all resources, idle ones too, in the order in which a batch meets them.

    Args:
        is_ahead: rows of later batches come in while a batch is computed.
    """
    work = _Work(setup, pools, is_ahead)
    loads = (
        ResourceLoad("batch", work.batch_s(), 1.0, "batches"),
        work.lookups(),
        work.hbm(),
        work.model(),
        work.network(),
        work.cold_rows(),
        work.write_back(),
        work.pcie(),
        work.ssd_reads(),
        work.ssd_writes(),
        work.ddr(),
    )
    return (*loads, *work.cores({load.resource: load.seconds for load in loads}))


def lanes_of(seconds: Mapping[str, float], *, is_ahead: bool) -> tuple[Lane, ...]:
    """What works side by side, the longest first; of equal ones in the order in which a batch meets them.

    Args:
        seconds: for which a step keeps each resource busy.
        is_ahead: as of ``loads_of``; else everything waits for everything, but for what is shared.
    """
    if is_ahead:
        groups = {"computing": SERIAL, "fetching": AHEAD, "pcie": LINKS, "drives": DRIVES}
    else:
        groups = {"in turn": (*SERIAL, *AHEAD, *LINKS, *DRIVES)}
    groups |= {name: (name,) for name in SHARED}
    lanes = [Lane(name, sum(seconds[each] for each in own), own) for name, own in groups.items()]
    return tuple(sorted(lanes, key=lambda lane: -lane.seconds))


def step_seconds(seconds: Mapping[str, float], *, is_ahead: bool) -> float:
    """Of a step, from what it keeps each resource busy: of its longest lane; arguments as of ``lanes_of``."""
    return lanes_of(seconds, is_ahead=is_ahead)[0].seconds


def bottleneck_of(seconds: Mapping[str, float], *, is_ahead: bool) -> str:
    """The resource that takes longest in the longest lane. Waits for a core are the cores'."""
    longest = max(lanes_of(seconds, is_ahead=is_ahead)[0].resources, key=lambda name: seconds[name])
    return "cores" if longest in WAITS else longest


def fixed_seconds(setup: Setup, pools: Sequence[PoolLoad]) -> float:
    """Of a query, whatever its samples."""
    work = _Work(setup, pools, is_ahead=False)
    latencies = work.read_latency_s() + work.network_latency_s()
    return work.batch_s() + latencies + (work.pcie_latency_s() if setup.hbm_bytes else 0.0)


def written_bytes(pools: Sequence[PoolLoad]) -> float:
    """To the drives of a host."""
    return sum(pool.pages_written * pool.layout.page_bytes for pool in pools)


class _Work(NamedTuple):
    """A step or query of one host."""

    setup: Setup
    pools: Sequence[PoolLoad]
    is_ahead: bool

    # The batch that is computed

    def batch_s(self) -> float:
        """What a batch takes whatever is in it."""
        costs, more = self.setup.host.costs, len(self.setup.workload.tables) - 1
        microseconds = costs.batch_us + more * costs.table_us
        if self.is_training:
            microseconds += costs.step_us + more * costs.step_table_us
        return (microseconds + (costs.hand_over_us if self.is_ahead else 0.0)) * 1e-6

    @property
    def is_training(self) -> bool:
        return self.setup.workload.is_training

    @property
    def directions(self) -> int:
        """In training what comes, rows or pooled ones, makes something go back: rows that leave, gradients."""
        return 2 if self.is_training else 1

    def lookups(self) -> ResourceLoad:
        """Pooling, and in training backward and optimizer, by the main thread and those it has; on a GPU neither."""
        ids, costs, nanoseconds = sum(pool.lookups for pool in self.pools), self.setup.host.costs, 0.0
        for pool in () if self.setup.hbm_bytes else self.pools:
            of_pool = {"ids": pool.lookups, "rows": pool.unique, "bags": pool.bags, "row_bytes": pool.layout.row_bytes}
            nanoseconds += costs.lookup_ns(**of_pool) + (costs.training_ns(**of_pool) if self.is_training else 0.0)
        return ResourceLoad("lookups", nanoseconds * 1e-9 / self.threads, ids, "ids")

    @property
    def threads(self) -> int:
        return min(self.setup.threads, self.setup.host.processor.cores)

    def hbm(self) -> ResourceLoad:
        """Rows that are read to be pooled, each id's; in training distinct ones are read and written again."""
        again, pools = 2 if self.is_training else 0, self.pools if self.setup.hbm_bytes else ()
        moved = sum((pool.lookups + again * pool.unique) * pool.layout.row_bytes for pool in pools)
        speed = sum(each.hbm.row_bytes_per_s or each.hbm.bytes_per_s for each in self.setup.host.accelerators)
        return ResourceLoad("hbm", moved / speed if moved else 0.0, moved, "bytes")

    def model(self) -> ResourceLoad:
        """The dense part: on the accelerators where rows are there, else on the cores."""
        workload, host = self.setup.workload, self.setup.host
        flops = workload.dense_flops * workload.batch_samples / self.setup.hosts
        flops *= TRAINING_FLOPS if self.is_training else 1
        speed = sum(each.flops for each in host.accelerators) if self.setup.hbm_bytes else host.processor.flops
        return ResourceLoad("model", flops / speed, flops, "flops")

    def network(self) -> ResourceLoad:
        """What a host sends: ids to the hosts that have their rows, as many as it asks others and itself for; pooled
        rows back, in training their gradients, and the dense weights' in a ring."""
        workload, hosts, link = self.setup.workload, self.setup.hosts, self.setup.host.network
        if hosts == 1:
            return ResourceLoad("network", 0.0, 0.0, "bytes")
        others = (hosts - 1) / hosts
        columns = sum(table.embedding_dim for table in workload.tables)
        pooled = others * workload.batch_samples / hosts * columns * FLOAT_BYTES
        sent = others * sum(pool.lookups for pool in self.pools) * ID_BYTES + self.directions * pooled
        if self.is_training:
            sent += 2 * others * (workload.dense_flops / FLOPS_PER_WEIGHT) * FLOAT_BYTES
        return ResourceLoad("network", sent / link.bytes_per_s + self.network_latency_s(), sent, "bytes")

    def network_latency_s(self) -> float:
        """Of the exchanges of a step: ids, pooled rows; gradients, and two for each other host of the ring."""
        if self.setup.hosts == 1:
            return 0.0
        exchanges = 2 + (1 + 2 * (self.setup.hosts - 1) if self.is_training else 0)
        return exchanges * self.setup.host.network.latency_us * 1e-6

    # Rows on their way

    def cold_rows(self) -> ResourceLoad:
        """One thread: ids are looked for in the cache, rows brought in, and handed to the tier above, if any."""
        nanoseconds = sum(self._admitting_ns(pool) + self._bringing_ns(pool) for pool in self.pools)
        nanoseconds += 1e3 * self.setup.host.costs.ahead_us if self.is_ahead else 0.0
        return ResourceLoad("cold rows", nanoseconds * 1e-9, sum(pool.misses for pool in self.pools), "rows")

    def _admitting_ns(self, pool: PoolLoad) -> float:
        costs = self.setup.host.costs
        if self.setup.hbm_bytes:
            per_byte = costs.pool_ns_per_byte + costs.pool_row_ns_per_byte
            copying = costs.pool_ns + costs.pool_row_ns + per_byte * pool.layout.row_bytes
            return pool.hbm_misses * self.directions * (costs.admit_ns + costs.admit_row_ns + copying)
        if pool.is_full or not pool.lookups:
            return 0.0
        return pool.asked / pool.unique * costs.admission_ns(ids=pool.lookups, rows=pool.unique)

    def _bringing_ns(self, pool: PoolLoad) -> float:
        costs = self.setup.host.costs
        a_row = costs.miss_ns + costs.miss_ns_per_byte * pool.layout.row_bytes
        return pool.misses * a_row + pool.pages_read * costs.read_ns

    def write_back(self) -> ResourceLoad:
        """One thread, as LMDB has one writer."""
        nanoseconds = sum(self._writing_ns(pool) for pool in self.pools)
        return ResourceLoad("write-back", nanoseconds * 1e-9, sum(pool.rows_written for pool in self.pools), "rows")

    def _writing_ns(self, pool: PoolLoad) -> float:
        costs, row_bytes = self.setup.host.costs, pool.layout.row_bytes
        appending = pool.rows_written * (costs.append_ns + costs.append_ns_per_byte * row_bytes)
        moving = pool.rows_moved * (costs.move_ns + costs.move_ns_per_byte * row_bytes)
        return appending + moving + 1e3 * pool.transactions * costs.transaction_us

    def pcie(self) -> ResourceLoad:
        """The fuller direction: rows and ids up; as many rows down, in training. Accelerators share it equally."""
        if not self.setup.hbm_bytes:
            return ResourceLoad("pcie", 0.0, 0.0, "bytes")
        moved = sum(pool.hbm_misses * pool.layout.row_bytes + pool.lookups * ID_BYTES for pool in self.pools)
        speed = sum(each.pcie.bytes_per_s for each in self.setup.host.accelerators)
        return ResourceLoad("pcie", moved / speed + self.pcie_latency_s(), moved, "bytes")

    def pcie_latency_s(self) -> float:
        return max(each.pcie.latency_us for each in self.setup.host.accelerators) * 1e-6

    # Drives

    def ssd_reads(self) -> ResourceLoad:
        """Pages and segments, or their bytes, whichever take longer; all drives together."""
        pools, drives = self.pools, self.setup.host.storage
        reads = sum(pool.pages_read + pool.segments_cleaned for pool in pools)
        if not reads:
            return ResourceLoad("ssd reads", 0.0, 0.0, "reads")
        size = sum(
            pool.pages_read * pool.layout.page_bytes + pool.segments_cleaned * segment_bytes(pool.layout)
            for pool in pools
        )
        by_count = reads / sum(drive.reads_per_s for drive in drives)
        by_bytes = size / sum(drive.read_bytes_per_s for drive in drives)
        return ResourceLoad("ssd reads", max(by_count, by_bytes) + self.read_latency_s(), reads, "reads")

    def read_latency_s(self) -> float:
        """Of the last page, which nothing hides, if there is one."""
        pages = sum(pool.pages_read for pool in self.pools)
        return min(1.0, pages) * max((drive.read_latency_us for drive in self.setup.host.storage), default=0.0) * 1e-6

    def ssd_writes(self) -> ResourceLoad:
        """Segments, which are large."""
        size = written_bytes(self.pools)
        speed = sum(drive.write_bytes_per_s for drive in self.setup.host.storage)
        return ResourceLoad("ssd writes", size / speed if size else 0.0, size, "bytes")

    # What all share

    def ddr(self) -> ResourceLoad:
        """Rows that the cores read and write, at random."""
        memory = self.setup.host.ddr
        moved = sum(self._ddr_rows(pool) * pool.layout.row_bytes for pool in self.pools)
        speed = memory.row_bytes_per_s or memory.bytes_per_s
        return ResourceLoad("ddr", moved / speed if speed else 0.0, moved, "bytes")

    def _ddr_rows(self, pool: PoolLoad) -> float:
        if self.setup.hbm_bytes:
            return pool.hbm_misses * self.directions + pool.misses
        return pool.lookups + pool.misses + (2 * pool.unique if self.is_training else 0.0)

    def cores(self, seconds: Mapping[str, float]) -> tuple[ResourceLoad, ...]:
        """The work of all threads, over the cores, and how long threads wait for one; a dense part without accelerator
        takes all of them.

        A thread finds its core taken for as long as an equal share of the others' work takes.
        """
        cores = self.setup.host.processor.cores
        computing = seconds["batch"] + seconds["lookups"] * self.threads
        computing += 0.0 if self.setup.hbm_bytes else seconds["model"] * cores
        ahead = seconds["cold rows"] + seconds["write-back"]
        waiting, waiting_ahead = (ahead / cores, computing / cores) if self.is_ahead else (0.0, 0.0)
        return (
            ResourceLoad("wait for a core", waiting, waiting, "seconds"),
            ResourceLoad("wait ahead", waiting_ahead, waiting_ahead, "seconds"),
            ResourceLoad("cores", (computing + ahead) / cores, computing + ahead, "core-seconds"),
        )
