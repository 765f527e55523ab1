"""What one step or query keeps busy on one host: a term for each resource, and how they make up a step.

Lanes work side by side, the resources of one lane one after another, so a step takes as long as its longest lane.
``SERIAL`` resources work for the batch that is computed; if rows are fetched ahead, those of ``AHEAD`` work for later
batches meanwhile, and so do ``LINKS`` and ``DRIVES``. ``SHARED`` ones limit what all others take of them. ``WAITS`` are
for a core that another thread has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..dist.ranks import Precision
from ..kernels.threads import MIN_WORK
from .host import AHEAD_BATCHES, HANDED_OVER_BATCHES, ID_BYTES, TRAINING_FLOPS
from .prediction import FLOAT_BYTES, Lane, ResourceLoad, Setup
from .tiers import PoolLoad, segment_bytes

SERIAL: Final = ("batch", "lookups", "hbm", "model", "network", "wait for a core")
AHEAD: Final = ("id exchange", "cold rows", "write-back", "wait ahead")
LINKS: Final = ("pcie",)
DRIVES: Final = ("ssd reads", "ssd writes")
SHARED: Final = ("cores", "ddr")
WAITS: Final = ("wait for a core", "wait ahead")

_WIRE_BYTES: Final[dict[Precision, int]] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_WIRE_SCALE_BYTES: Final = 4  # of a row or bag as int8
_TOGETHER: Final = 3  # exchanges of a pool with every batch, and as many before them, of ids
_MOVED_AS: Final = 3
"""Rows appended: one that cleaning moves is read and checked, too; measured, of rows of 72 bytes to 1 KiB: 1 to 5."""
_WAKES: Final = 1.7
"""Times that lookups, or updates, of a pool wake other threads; a product is started, too."""
_FLOPS_PER_WEIGHT: Final = 2  # of a dense layer, forward, a sample


def loads_of(setup: Setup, pools: Sequence[PoolLoad], *, is_ahead: bool) -> tuple[ResourceLoad, ...]:
    """Of all resources, idle ones too, in the order in which a batch meets them."""
    work = _Work(setup, pools, is_ahead)
    own = [work.batch(), work.lookups(), work.hbm(), work.model(), work.network(), work.id_exchange()]
    own += [work.cold_rows(), work.write_back(), work.pcie(), *work.drives(), work.ddr()]
    seconds = {load.resource: load.seconds for load in own}
    if setup.rank_costs is not None:
        seconds |= _of_ranks(setup, pools, seconds, is_ahead=is_ahead)
        own = [load._replace(seconds=seconds[load.resource]) for load in own]
    return (*own, *work.cores(seconds))


def _of_ranks(
    setup: Setup, pools: Sequence[PoolLoad], seconds: Mapping[str, float], *, is_ahead: bool
) -> dict[str, float]:
    """Of one of several ranks that share a host: fixed work, lookups, updates and exchanges as they were measured
    together. Dense gradients are averaged by a thread that, when woken, finds its core taken as often as rows are
    fetched there."""
    from ..dist.placement import TableDemand
    from ..dist.placement.costs import amounts_of, group_of
    from ..dist.plan import Sharding

    costs, ranks, lookups_s, network_s = setup.rank_costs, setup.hosts, 0.0, 0.0
    assert costs is not None
    over_all = Sharding("row_wise", tuple(range(ranks)))
    for pool in pools:
        dim, demand = pool.layout.dim, TableDemand(pool.lookups, pool.sent_rows, ranks * pool.unique)
        tables = pool.bags / (setup.workload.batch_samples / ranks)
        amounts = amounts_of(over_all, dim, demand, bags=pool.bags, ranks=ranks, tables=tables)
        lookups_s += costs.group_s(group_of(over_all, dim), amounts)
    if ranks > 1 and setup.workload.dense_flops:
        ahead = seconds["cold rows"] + seconds["write-back"] if is_ahead else 0.0
        share = ahead / (ahead + lookups_s + seconds["model"])
        network_s = 1e-6 * (costs.reduce_us + share * (costs.reduce_busy_us - costs.reduce_us))
    return {"lookups": lookups_s, "network": network_s, "id exchange": 0.0}


def lanes_of(seconds: Mapping[str, float], *, is_ahead: bool) -> tuple[Lane, ...]:
    """What works side by side, the longest first; of equal ones in the order in which a batch meets them."""
    if is_ahead:
        groups = {"computing": SERIAL, "fetching": AHEAD, "pcie": LINKS, "drives": DRIVES}
    else:
        groups = {"in turn": (*SERIAL, *AHEAD, *LINKS, *DRIVES)}
    groups |= {name: (name,) for name in SHARED}
    lanes = [Lane(name, sum(seconds[each] for each in own), own) for name, own in groups.items()]
    return tuple(sorted(lanes, key=lambda lane: -lane.seconds))


def bottleneck_of(seconds: Mapping[str, float], *, is_ahead: bool) -> str:
    """The resource that takes longest in the longest lane. Waits for a core are the cores'."""
    longest = max(lanes_of(seconds, is_ahead=is_ahead)[0].resources, key=lambda name: seconds[name])
    return "cores" if longest in WAITS else longest


def fixed_seconds(setup: Setup, pools: Sequence[PoolLoad]) -> float:
    """Of a query, whatever its samples."""
    work = _Work(setup, pools, is_ahead=False)
    return work.batch().seconds + work.read_latency_s() + work.latency_s(work.exchanges)


def written_bytes(pools: Sequence[PoolLoad]) -> float:
    """To the drives of a host."""
    return sum(pool.pages_written * pool.layout.page_bytes for pool in pools)


class _Work(NamedTuple):
    """A step or query of one host."""

    setup: Setup
    pools: Sequence[PoolLoad]
    is_ahead: bool

    def _sum(self, of: Any) -> float:
        return float(sum(map(of, self.pools)))

    @property
    def is_training(self) -> bool:
        return self.setup.workload.is_training

    @property
    def directions(self) -> int:
        """In training each row or bag that arrives makes one go back: an evicted row, a gradient."""
        return 2 if self.is_training else 1

    @property
    def crosses_by_row(self) -> bool:
        """Over hosts that train, each distinct row of a host's batch crosses once; where they serve, bags and ids."""
        return self.setup.hosts > 1 and self.is_training

    def batch(self) -> ResourceLoad:
        """Fixed work of the computing thread; of ranks only taking over what was prefetched."""
        costs = self.setup.host.costs
        times = 0 if self.setup.rank_costs else TRAINING_FLOPS if self.is_training else 1
        times += HANDED_OVER_BATCHES if self.is_ahead else 0
        return ResourceLoad("batch", 1e-6 * times * costs.batch_us, 1.0, "batches")

    def lookups(self) -> ResourceLoad:
        """Pooling, and in training backward and optimizer, by the main thread and those it has; on a GPU neither."""
        costs, nanoseconds = self.setup.host.costs, 0.0
        for share in (share for pool in self.pools for share in self._shares_of(pool)):
            nanoseconds += costs.lookup_ns(**share) + (costs.update_ns(**share) if self.is_training else 0.0)
        seconds = 0.0 if self.setup.hbm_bytes else nanoseconds * 1e-9 / self.threads + self._sharing_s
        return ResourceLoad("lookups", seconds, self._sum(lambda pool: pool.lookups), "ids")

    @property
    def _sharing_s(self) -> float:
        """Of lookups, and of updates, between threads; one of them is busy then."""
        is_shared = self.threads > 1 and not self.setup.hbm_bytes
        return 1e-6 * _WAKES * self.setup.host.costs.wake_us * self.directions * len(self.pools) if is_shared else 0.0

    def _shares_of(self, pool: PoolLoad) -> Iterator[dict[str, Any]]:
        """Ids, rows and bags that a host works on. Where rows cross, it pools what owners send; as an owner it looks up
        and updates each that it is asked for, as a bag of one id."""
        if self.crosses_by_row:
            yield {"ids": pool.lookups, "rows": pool.sent_rows, "bags": pool.bags, "layout": pool.layout}
            yield {"ids": pool.sent_rows, "rows": pool.unique, "bags": pool.sent_rows, "layout": pool.layout}
        else:
            yield {"ids": pool.lookups, "rows": pool.unique, "bags": pool.bags, "layout": pool.layout}

    @property
    def threads(self) -> int:
        """That share lookups and updates: one for few ids."""
        enough = max(1, int(self._sum(lambda pool: pool.lookups)) // MIN_WORK)
        return min(self.setup.threads, self.setup.host.processor.cores, enough)

    def hbm(self) -> ResourceLoad:
        """Rows that are read to be pooled, each id's; distinct ones are read and written again."""
        if not self.setup.hbm_bytes:
            return ResourceLoad("hbm", 0.0, 0.0, "bytes")
        moved = self._sum(lambda pool: (pool.lookups + 2 * pool.unique) * pool.layout.row_bytes)
        memory = self.setup.gpu.hbm
        return ResourceLoad("hbm", moved / (memory.row_bytes_per_s or memory.bytes_per_s), moved, "bytes")

    def model(self) -> ResourceLoad:
        """The dense part: on the GPU where rows are there, else on the cores, with what its products and values take
        beyond their flops."""
        workload, host = self.setup.workload, self.setup.host
        flops = workload.dense_flops * workload.batch_samples / self.setup.hosts
        flops *= TRAINING_FLOPS if self.is_training else 1
        if self.setup.hbm_bytes:
            return ResourceLoad("model", flops / self.setup.gpu.flops, flops, "flops")
        return ResourceLoad("model", flops / host.processor.flops + 1e-9 * sum(self._dense_ns()), flops, "flops")

    def _dense_ns(self) -> tuple[float, float]:
        workload, host = self.setup.workload, self.setup.host
        samples, threads = workload.batch_samples / self.setup.hosts, host.processor.cores
        return host.costs.dense_ns(workload.dense, samples=samples, threads=threads, is_training=self.is_training)

    def network(self) -> ResourceLoad:
        """What a host sends while it computes: rows and gradients, and the dense weights' in a ring; in serving ids and
        bags."""
        hosts = self.setup.hosts
        others = (hosts - 1) / hosts
        sent = others * self.directions * self._sum(self._values_bytes)
        if self.is_training:
            sent += 2 * others * (self.setup.workload.dense_flops / _FLOPS_PER_WEIGHT) * FLOAT_BYTES
        else:
            sent += others * self._sum(self._id_bytes)
        return ResourceLoad("network", self._sent_s(sent, self.exchanges), sent, "bytes")

    def id_exchange(self) -> ResourceLoad:
        """What a host sends before it computes, in training."""
        if not self.crosses_by_row:
            return ResourceLoad("id exchange", 0.0, 0.0, "bytes")
        sent = (self.setup.hosts - 1) / self.setup.hosts * self._sum(self._id_bytes)
        return ResourceLoad("id exchange", self._sent_s(sent, _TOGETHER * len(self.pools)), sent, "bytes")

    def _values_bytes(self, pool: PoolLoad) -> float:
        wire = self.setup.wire
        each = pool.layout.dim * _WIRE_BYTES[wire] + (_WIRE_SCALE_BYTES if wire == "int8" else 0)
        return (pool.sent_rows if self.crosses_by_row else pool.bags) * each

    def _id_bytes(self, pool: PoolLoad) -> float:
        """Where bags cross, their sizes too."""
        return ID_BYTES * (pool.sent_rows if self.crosses_by_row else pool.lookups + pool.bags)

    def _sent_s(self, sent_bytes: float, exchanges: int) -> float:
        return sent_bytes / self.setup.host.network.bytes_per_s + self.latency_s(exchanges)

    @property
    def exchanges(self) -> int:
        """Of a batch that is computed: those of each pool, and of training two for each other host of the ring."""
        hosts = self.setup.hosts
        if hosts == 1:
            return 0
        if not self.is_training:
            return 2 * len(self.pools)
        return _TOGETHER * len(self.pools) + (2 * (hosts - 1) if self.setup.workload.dense_flops else 0)

    def latency_s(self, exchanges: int) -> float:
        return exchanges * self.setup.host.network.latency_us * 1e-6

    def cold_rows(self) -> ResourceLoad:
        """One thread: ids are looked for in the cache, rows fetched, and handed to the tier above, if any."""
        costs = self.setup.host.costs
        nanoseconds = self._sum(lambda pool: self._admitting_ns(pool) + pool.misses * costs.miss_row_ns(pool.layout))
        nanoseconds += self._sum(lambda pool: pool.pages_read * costs.read_ns)
        nanoseconds += 1e3 * AHEAD_BATCHES * costs.batch_us if self.is_ahead else 0.0
        return ResourceLoad("cold rows", nanoseconds * 1e-9, self._sum(lambda pool: pool.misses), "rows")

    def _admitting_ns(self, pool: PoolLoad) -> float:
        costs = self.setup.host.costs
        if self.setup.hbm_bytes:
            copying = costs.admission_ns(ids=1, rows=1) + 2 * costs.byte_ns * pool.layout.row_bytes
            return pool.hbm_misses * self.directions * copying
        # The distinct rows of a batch are found before they are sent for; ranks were measured with it.
        sends_for = self.crosses_by_row and self.setup.rank_costs is None
        sent_for = costs.admission_ns(ids=pool.lookups, rows=pool.sent_rows) if sends_for else 0.0
        asked = pool.sent_rows if self.crosses_by_row else pool.lookups
        if pool.is_full or not asked:
            return sent_for
        return sent_for + pool.asked / pool.unique * costs.admission_ns(ids=asked, rows=pool.unique)

    def write_back(self) -> ResourceLoad:
        """One thread, as LMDB has one writer."""
        costs = self.setup.host.costs
        nanoseconds = 1e3 * costs.transaction_us * self._sum(lambda pool: pool.transactions)
        for pool in self.pools:
            nanoseconds += (pool.rows_written + _MOVED_AS * pool.rows_moved) * costs.append_row_ns(pool.layout)
        return ResourceLoad("write-back", nanoseconds * 1e-9, self._sum(lambda pool: pool.rows_written), "rows")

    def pcie(self) -> ResourceLoad:
        """The fuller direction: rows and ids up; as many rows down, in training."""
        if not self.setup.hbm_bytes:
            return ResourceLoad("pcie", 0.0, 0.0, "bytes")
        moved = self._sum(lambda pool: pool.hbm_misses * pool.layout.row_bytes + pool.lookups * ID_BYTES)
        link = self.setup.gpu.pcie
        return ResourceLoad("pcie", moved / link.bytes_per_s + 1e-6 * link.latency_us, moved, "bytes")

    def drives(self) -> tuple[ResourceLoad, ResourceLoad]:
        """Reads of pages and segments, by their count or their bytes, whichever take longer; and writes of segments.
        All drives together."""
        drives, written = self.setup.host.storage, written_bytes(self.pools)
        writes_s = written / sum(drive.write_bytes_per_s for drive in drives) if written else 0.0
        writes = ResourceLoad("ssd writes", writes_s, written, "bytes")
        pages, segments = self._sum(lambda pool: pool.pages_read), self._sum(lambda pool: pool.segments_cleaned)
        if not pages + segments:
            return ResourceLoad("ssd reads", 0.0, 0.0, "reads"), writes
        size = self._sum(
            lambda pool: pool.pages_read * pool.layout.page_bytes + pool.segments_cleaned * segment_bytes(pool.layout)
        )
        by_count = (pages + segments) / sum(drive.reads_per_s for drive in drives)
        by_bytes = size / sum(drive.read_bytes_per_s for drive in drives)
        seconds = max(by_count, by_bytes) + self.read_latency_s()
        return ResourceLoad("ssd reads", seconds, pages + segments, "reads"), writes

    def read_latency_s(self) -> float:
        """Of the last page, which nothing hides, if there is one."""
        pages = min(1.0, self._sum(lambda pool: pool.pages_read))
        return pages * max((drive.read_latency_us for drive in self.setup.host.storage), default=0.0) * 1e-6

    def ddr(self) -> ResourceLoad:
        """Rows that the cores read and write, at random."""
        memory = self.setup.host.ddr
        moved = self._sum(lambda pool: self._ddr_rows(pool) * pool.layout.row_bytes)
        speed = memory.row_bytes_per_s or memory.bytes_per_s
        return ResourceLoad("ddr", moved / speed if speed else 0.0, moved, "bytes")

    def _ddr_rows(self, pool: PoolLoad) -> float:
        if self.setup.hbm_bytes:
            return pool.hbm_misses * self.directions + pool.misses
        return pool.lookups + pool.misses + (2 * pool.unique if self.is_training else 0.0)

    def cores(self, seconds: Mapping[str, float]) -> tuple[ResourceLoad, ...]:
        """The work of all threads, over the cores, and how long threads wait for one: as long as an equal share of the
        others' work takes. A dense part on the cores takes all of them, but for starting its products."""
        cores = self.setup.host.processor.cores
        computing = seconds["batch"] + (seconds["lookups"] - self._sharing_s) * self.threads + self._sharing_s
        if not self.setup.hbm_bytes:
            starts = 1e-9 * self._dense_ns()[0]
            computing += starts + (seconds["model"] - starts) * cores
        ahead = seconds["cold rows"] + seconds["write-back"]
        waiting, waiting_ahead = (ahead / cores, computing / cores) if self.is_ahead else (0.0, 0.0)
        return (
            ResourceLoad("wait for a core", waiting, waiting, "seconds"),
            ResourceLoad("wait ahead", waiting_ahead, waiting_ahead, "seconds"),
            ResourceLoad("cores", (computing + ahead) / cores, computing + ahead, "core-seconds"),
        )
