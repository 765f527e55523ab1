"""What one step or query keeps busy: a term for each resource, and how they make up a step.

Everything is of one host. Lanes work side by side, the resources of one lane one after another, so a step takes as
long as its longest lane. ``SERIAL`` resources work for the batch that is computed. If rows are brought in ahead, those
of ``AHEAD`` work for later batches meanwhile, one after another, as whoever brings in a row has to make room for it
first; and so do ``LINKS`` and ``DRIVES``. ``SHARED`` ones limit what all others take of them.
``WAITS`` are for a core that another thread has: of few cores each is taken for its share of what the others do.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..dist.wire import Precision
from ..kernels.threads import MIN_WORK
from .host import TRAINING_FLOPS, dense_work, pooling_work, updating_work
from .prediction import FLOAT_BYTES, Lane, ResourceLoad, Setup
from .tiers import PoolLoad, segment_bytes

SERIAL: Final = ("batch", "lookups", "hbm", "model", "network", "wait for a core")
AHEAD: Final = ("id exchange", "cold rows", "write-back", "wait ahead")
LINKS: Final = ("pcie",)
DRIVES: Final = ("ssd reads", "ssd writes")
SHARED: Final = ("cores", "ddr")
WAITS: Final = ("wait for a core", "wait ahead")

ID_BYTES: Final = 8
_WIRE_BYTES: Final[dict[Precision, int]] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_WIRE_SCALE_BYTES: Final = 4
"""Of a row or bag as int8."""
_TOGETHER: Final = 3
"""Exchanges of a group of tables with every batch: of forward and backward, and as many before them, of ids."""
FLOPS_PER_WEIGHT: Final = 2
"""Of a dense layer, forward, a sample: by which its weights are told from its work."""


def loads_of(setup: Setup, pools: Sequence[PoolLoad], *, is_ahead: bool) -> tuple[ResourceLoad, ...]:
    """Of all resources, idle ones too, in the order in which a batch meets them.

    Args:
        is_ahead: rows of later batches come in while a batch is computed.
    """
    work = (_Work if setup.rank_costs is None else _RankWork)(setup, pools, is_ahead)
    own = (ResourceLoad("batch", work.batch_s(), 1.0, "batches"), work.lookups(), work.hbm(), work.model())
    others = (
        work.id_exchange(),
        work.cold_rows(),
        work.write_back(),
        work.pcie(),
        work.ssd_reads(),
        work.ssd_writes(),
        work.ddr(),
    )
    seconds = {load.resource: load.seconds for load in (*own, *others)}
    return (*own, work.network(seconds), *others, *work.cores(seconds))


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


def bottleneck_of(seconds: Mapping[str, float], *, is_ahead: bool) -> str:
    """The resource that takes longest in the longest lane. Waits for a core are the cores'."""
    longest = max(lanes_of(seconds, is_ahead=is_ahead)[0].resources, key=lambda name: seconds[name])
    return "cores" if longest in WAITS else longest


def fixed_seconds(setup: Setup, pools: Sequence[PoolLoad]) -> float:
    """Of a query, whatever its samples."""
    work = _Work(setup, pools, is_ahead=False)
    latencies = work.read_latency_s() + work.latency_s(work.exchanges)
    return work.batch_s() + latencies


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
        costs = self.setup.host.costs
        return (costs.batch_us + (costs.step_us if self.is_training else 0.0)) * 1e-6 + self.hand_over_s

    @property
    def hand_over_s(self) -> float:
        return self.setup.host.costs.hand_over_us * 1e-6 if self.is_ahead else 0.0

    @property
    def is_training(self) -> bool:
        return self.setup.workload.is_training

    @property
    def directions(self) -> int:
        """In training what comes, rows or pooled ones, makes something go back: rows that leave, gradients."""
        return 2 if self.is_training else 1

    def lookups(self) -> ResourceLoad:
        """Pooling, and in training backward and optimizer, by the main thread and those it has; on a GPU neither."""
        ids = sum(pool.lookups for pool in self.pools)
        copied = self._copied_s() if self.setup.is_deferred else 0.0
        return ResourceLoad("lookups", self._lookups_s() + copied, ids, "ids")

    def _lookups_s(self) -> float:
        if self.setup.hbm_bytes:
            return 0.0
        costs, nanoseconds = self.setup.host.costs, 0.0
        for share in (share for pool in self.pools for share in self._shares_of(pool)):
            nanoseconds += costs.ns_of(pooling_work(**share) | (updating_work(**share) if self.is_training else {}))
        return nanoseconds * 1e-9 / self.threads + self.sharing_s

    @property
    def sharing_s(self) -> float:
        """Of lookups, and of updates, between threads; one of them is busy then."""
        is_shared = self.threads > 1 and not self.setup.hbm_bytes
        return 1e-6 * self.setup.host.costs.share_us * self.directions * len(self.pools) if is_shared else 0.0

    def _shares_of(self, pool: PoolLoad) -> Iterator[dict[str, Any]]:
        """Ids, rows and bags that a host works on. Where distinct rows cross, it pools what owners send and merges what
        it sends them; and as an owner it looks up and updates each that it is asked for, as a bag of one id."""
        if self.crosses_by_row:
            yield {"ids": pool.lookups, "rows": pool.sent_rows, "bags": pool.bags, "layout": pool.layout}
            yield {"ids": pool.sent_rows, "rows": pool.unique, "bags": pool.sent_rows, "layout": pool.layout}
        else:
            yield {"ids": pool.lookups, "rows": pool.unique, "bags": pool.bags, "layout": pool.layout}

    @property
    def crosses_by_row(self) -> bool:
        """Over hosts that train each distinct row of a host's batch crosses once, as stores do unless they are told
        otherwise. Where hosts serve, bags and their ids cross, and owners pool."""
        return self.setup.hosts > 1 and self.is_training

    def _wire_bytes(self, pool: PoolLoad) -> float:
        """Of a row, or of a bag, between hosts."""
        wire = self.setup.wire
        return pool.layout.dim * _WIRE_BYTES[wire] + (_WIRE_SCALE_BYTES if wire == "int8" else 0)

    def _copied_s(self) -> float:
        """Of keeping a copy of the gradient of pooled rows until it is applied."""
        speed = self.setup.host.ddr.bytes_per_s
        return 2 * self.setup.gradient_bytes / speed if speed else 0.0

    @property
    def threads(self) -> int:
        """That share lookups and updates: one for few ids."""
        enough = max(1, int(sum(pool.lookups for pool in self.pools)) // MIN_WORK)
        return min(self.setup.threads, self.setup.host.processor.cores, enough)

    def hbm(self) -> ResourceLoad:
        """Rows that are read to be pooled, each id's; distinct ones are read and written again."""
        if not self.setup.hbm_bytes:
            return ResourceLoad("hbm", 0.0, 0.0, "bytes")
        moved = sum((pool.lookups + 2 * pool.unique) * pool.layout.row_bytes for pool in self.pools)
        memory = self.setup.gpu.hbm
        return ResourceLoad("hbm", moved / (memory.row_bytes_per_s or memory.bytes_per_s), moved, "bytes")

    def model(self) -> ResourceLoad:
        """The dense part: on the GPU where rows are there, else on the cores, with what its products take
        beside their flops."""
        workload, host = self.setup.workload, self.setup.host
        flops = workload.dense_flops * workload.batch_samples / self.setup.hosts
        flops *= TRAINING_FLOPS if self.is_training else 1
        speed = self.setup.gpu.flops if self.setup.hbm_bytes else host.processor.flops
        beside = 0.0 if self.setup.hbm_bytes else host.costs.ns_of(self._dense_work()) * 1e-9
        return ResourceLoad("model", flops / speed + beside, flops, "flops")

    def _dense_work(self) -> dict[str, float]:
        setup = self.setup
        samples, cores = setup.workload.batch_samples / setup.hosts, setup.host.processor.cores
        return dense_work(setup.workload.dense, samples=samples, threads=cores, is_training=self.is_training)

    def _model_core_s(self, seconds: float) -> float:
        """Of all cores, while the dense part takes so long: starting its products keeps one busy."""
        work, costs = self._dense_work(), self.setup.host.costs
        alone = 1e-9 * costs.ns_of({name: work[name] for name in ("dense_product_us", "dense_wake_us")})
        return alone + (seconds - alone) * self.setup.host.processor.cores

    def network(self, seconds: Mapping[str, float]) -> ResourceLoad:
        """What a host sends while it computes: rows, or bags, that others asked it for, in training their gradients,
        and the dense weights' in a ring. In serving it sends the ids before, too.

        Args:
            seconds: that other resources are busy.
        """
        workload, hosts = self.setup.workload, self.setup.hosts
        if hosts == 1:
            return ResourceLoad("network", 0.0, 0.0, "bytes")
        others = (hosts - 1) / hosts
        sent = others * self.directions * sum(map(self._values_bytes, self.pools))
        if self.is_training:
            sent += 2 * others * (workload.dense_flops / FLOPS_PER_WEIGHT) * FLOAT_BYTES
        else:
            sent += others * sum(map(self._id_bytes, self.pools))
        return ResourceLoad("network", self._network_s(sent, seconds), sent, "bytes")

    def _network_s(self, sent_bytes: float, _seconds: Mapping[str, float]) -> float:
        return self._sent_s(sent_bytes, self.exchanges)

    def id_exchange(self) -> ResourceLoad:
        """What a host sends before it computes, in training: ids, so that their owners bring the rows in."""
        if self.setup.hosts == 1 or not self.is_training:
            return ResourceLoad("id exchange", 0.0, 0.0, "bytes")
        sent = (self.setup.hosts - 1) / self.setup.hosts * sum(map(self._id_bytes, self.pools))
        return ResourceLoad("id exchange", self._id_exchange_s(sent), sent, "bytes")

    def _id_exchange_s(self, sent_bytes: float) -> float:
        return self._sent_s(sent_bytes, _TOGETHER * len(self.pools))

    def _values_bytes(self, pool: PoolLoad) -> float:
        return (pool.sent_rows if self.crosses_by_row else pool.bags) * self._wire_bytes(pool)

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
        asked = pool.sent_rows if self.crosses_by_row else pool.lookups
        sent_for = self._sending_for_ns(pool) if self.crosses_by_row else 0.0
        if pool.is_full or not asked:
            return sent_for
        return sent_for + pool.asked / pool.unique * costs.admission_ns(ids=asked, rows=pool.unique)

    def _sending_for_ns(self, pool: PoolLoad) -> float:
        """Of finding the distinct rows of a batch before they are sent for."""
        return self.setup.host.costs.admission_ns(ids=pool.lookups, rows=pool.sent_rows)

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
        """The fuller direction: rows and ids up; as many rows down, in training."""
        if not self.setup.hbm_bytes:
            return ResourceLoad("pcie", 0.0, 0.0, "bytes")
        moved = sum(pool.hbm_misses * pool.layout.row_bytes + pool.lookups * ID_BYTES for pool in self.pools)
        link = self.setup.gpu.pcie
        return ResourceLoad("pcie", moved / link.bytes_per_s + 1e-6 * link.latency_us, moved, "bytes")

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
        computing = seconds["batch"] + (seconds["lookups"] - self.sharing_s) * self.threads + self.sharing_s
        computing += 0.0 if self.setup.hbm_bytes else self._model_core_s(seconds["model"])
        ahead = seconds["cold rows"] + seconds["write-back"]
        waiting, waiting_ahead = (ahead / cores, computing / cores) if self.is_ahead else (0.0, 0.0)
        return (
            ResourceLoad("wait for a core", waiting, waiting, "seconds"),
            ResourceLoad("wait ahead", waiting_ahead, waiting_ahead, "seconds"),
            ResourceLoad("cores", (computing + ahead) / cores, computing + ahead, "core-seconds"),
        )


class _RankWork(_Work):
    """The same of one of several ranks that share a host: what they do together takes what was measured of steps over
    such ranks, fixed work, lookups, updates and exchanges in one."""

    def batch_s(self) -> float:
        return self.hand_over_s

    def _lookups_s(self) -> float:
        from ..dist.placement import TableDemand
        from ..dist.placement.costs import amounts_of, group_of
        from ..dist.plan import Sharding

        setup, seconds, over_all = self.setup, 0.0, Sharding("row_wise", tuple(range(self.setup.hosts)))
        assert setup.rank_costs is not None
        for pool in self.pools:
            group = group_of(over_all, pool.layout.dim)
            amounts = amounts_of(
                over_all,
                pool.layout.dim,
                TableDemand(pool.lookups, pool.sent_rows, setup.hosts * pool.unique),
                bags=pool.bags,
                ranks=setup.hosts,
                tables=pool.bags / (setup.workload.batch_samples / setup.hosts),
            )
            seconds += setup.rank_costs.group_s(group, setup.rank_costs.work_s(group, amounts))
        return seconds

    def _network_s(self, _sent_bytes: float, seconds: Mapping[str, float]) -> float:
        """Of averaging dense gradients: a thread that is woken finds its core taken as often as rows are fetched
        there."""
        costs = self.setup.rank_costs
        assert costs is not None
        if not self.setup.workload.dense_flops:
            return 0.0
        ahead = seconds["cold rows"] + seconds["write-back"] if self.is_ahead else 0.0
        share = ahead / (ahead + seconds["batch"] + seconds["lookups"] + seconds["model"])
        return 1e-6 * (costs.reduce_us + share * (costs.reduce_busy_us - costs.reduce_us))

    def _id_exchange_s(self, _sent_bytes: float) -> float:
        return 0.0

    def _sending_for_ns(self, _pool: PoolLoad) -> float:
        return 0.0
