"""What one step or query keeps busy: a term for each resource, and how they make up a step.

Everything is of one host. ``SERIAL`` resources work one after another, for the batch that is computed. If rows are
brought in ahead, those of ``AHEAD`` work for later batches meanwhile, one after another, as whoever brings in a row has
to make room for it first; and so do ``LINKS`` and ``DRIVES``. ``SHARED`` ones limit what all others take of them.
``WAITS`` are for a core that another thread has: of few cores each is taken for its share of what the others do.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from .host import Host
from .prediction import ResourceLoad, Setup
from .tiers import PoolLoad, segment_bytes
from .workload import Workload

__all__ = [
    "AHEAD",
    "DRIVES",
    "LINKS",
    "SERIAL",
    "SHARED",
    "WAITS",
    "bottleneck_of",
    "fixed_seconds",
    "loads_of",
    "step_seconds",
    "written_bytes",
]

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
    work = [
        _batch(setup, is_ahead=is_ahead),
        _lookups(setup, pools),
        _hbm(setup, pools),
        _model(setup),
        _network(setup, pools),
        _cold_rows(setup, pools, is_ahead=is_ahead),
        _write_back(setup, pools),
        _pcie(setup, pools),
        _ssd_reads(setup, pools),
        _ssd_writes(setup, pools),
        _ddr(setup, pools),
    ]
    seconds = {load.resource: load.seconds for load in work}
    return (*work, *_of_cores(setup, seconds, is_ahead=is_ahead))


def step_seconds(seconds: Mapping[str, float], *, is_ahead: bool) -> float:
    """Of a step, from what it keeps each resource busy.

    Args:
        is_ahead: as of ``loads_of``; else everything waits for everything.
    """
    serial = sum(seconds[name] for name in SERIAL)
    ahead = sum(seconds[name] for name in AHEAD)
    links = sum(seconds[name] for name in LINKS)
    drives = sum(seconds[name] for name in DRIVES)
    shared = [seconds[name] for name in SHARED]
    if is_ahead:
        return max(serial, ahead, links, drives, *shared)
    return max(serial + ahead + links + drives, *shared)


def bottleneck_of(loads: Sequence[ResourceLoad], *, is_ahead: bool) -> str:
    """The resource without which a step would be fastest; of equal ones that which is busy longest.

    Waits for a core are the cores'.
    """
    seconds = {load.resource: load.seconds for load in loads}

    def without(load: ResourceLoad) -> tuple[float, float]:
        gone = ("cores", *WAITS) if load.resource == "cores" else (load.resource,)
        return step_seconds(seconds | dict.fromkeys(gone, 0.0), is_ahead=is_ahead), -load.seconds

    return min((load for load in loads if load.resource not in WAITS), key=without).resource


def fixed_seconds(setup: Setup, pools: Sequence[PoolLoad]) -> float:
    """Of a query, whatever its samples."""
    latencies = _read_latency_s(setup.host, pools) + _network_latency_s(setup)
    return _batch_s(setup, is_ahead=False) + latencies + (_pcie_latency_s(setup) if setup.hbm_bytes else 0.0)


# The batch that is computed


def _batch(setup: Setup, *, is_ahead: bool) -> ResourceLoad:
    """What a batch takes whatever is in it."""
    return ResourceLoad("batch", _batch_s(setup, is_ahead=is_ahead), 1.0, "batches")


def _batch_s(setup: Setup, *, is_ahead: bool) -> float:
    costs, more = setup.host.costs, len(setup.workload.tables) - 1
    microseconds = costs.batch_us + more * costs.table_us
    if setup.workload.is_training:
        microseconds += costs.step_us + more * costs.step_table_us
    return (microseconds + (costs.hand_over_us if is_ahead else 0.0)) * 1e-6


def _lookups(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """Pooling, and in training backward and optimizer, by the main thread and those it has; on a GPU neither."""
    ids = sum(pool.lookups for pool in pools)
    nanoseconds = 0.0 if setup.hbm_bytes else sum(_lookup_ns(setup, pool) for pool in pools)
    threads = min(setup.threads, setup.host.processor.cores)
    return ResourceLoad("lookups", nanoseconds * 1e-9 / threads, ids, "ids")


def _lookup_ns(setup: Setup, pool: PoolLoad) -> float:
    of_pool = {"ids": pool.lookups, "rows": pool.unique, "bags": pool.bags, "row_bytes": pool.layout.row_bytes}
    costs = setup.host.costs
    return costs.lookup_ns(**of_pool) + (costs.training_ns(**of_pool) if setup.workload.is_training else 0.0)


def _hbm(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """Rows that are read to be pooled, each id's; in training distinct ones are read and written again."""
    again = 2 if setup.workload.is_training else 0
    moved = (
        sum((pool.lookups + again * pool.unique) * pool.layout.row_bytes for pool in pools) if setup.hbm_bytes else 0
    )
    speed = sum(each.hbm.row_bytes_per_s or each.hbm.bytes_per_s for each in setup.host.accelerators)
    return ResourceLoad("hbm", moved / speed if moved else 0.0, moved, "bytes")


def _model(setup: Setup) -> ResourceLoad:
    """The dense part: on the accelerators where rows are there, else on the cores."""
    workload, host = setup.workload, setup.host
    flops = workload.dense_flops * workload.batch_samples / setup.hosts
    flops *= TRAINING_FLOPS if workload.is_training else 1
    speed = sum(each.flops for each in host.accelerators) if setup.hbm_bytes else host.processor.flops
    return ResourceLoad("model", flops / speed, flops, "flops")


def _network(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """What a host sends: ids to the hosts that have their rows, pooled rows back, in training their gradients, and the
    dense weights' in a ring."""
    if setup.hosts == 1:
        return ResourceLoad("network", 0.0, 0.0, "bytes")
    sent = _sent_bytes(setup.workload, setup.hosts, sum(pool.lookups for pool in pools))
    link = setup.host.network
    return ResourceLoad("network", sent / link.bytes_per_s + _network_latency_s(setup), sent, "bytes")


def _sent_bytes(workload: Workload, hosts: int, lookups: float) -> float:
    """Of one host, one direction. ``lookups``: of its rows, as many as it asks others and itself for."""
    others = (hosts - 1) / hosts
    columns = sum(table.embedding_dim for table in workload.tables)
    pooled = others * workload.batch_samples / hosts * columns * FLOAT_BYTES
    ids = others * lookups * ID_BYTES
    if not workload.is_training:
        return ids + pooled
    weights = workload.dense_flops / FLOPS_PER_WEIGHT
    return ids + 2 * pooled + 2 * others * weights * FLOAT_BYTES


def _network_latency_s(setup: Setup) -> float:
    """Of the exchanges of a step: ids, pooled rows; gradients, and two for each other host of the ring."""
    if setup.hosts == 1:
        return 0.0
    exchanges = 2 + (1 + 2 * (setup.hosts - 1) if setup.workload.is_training else 0)
    return exchanges * setup.host.network.latency_us * 1e-6


# Rows on their way


def _cold_rows(setup: Setup, pools: Sequence[PoolLoad], *, is_ahead: bool) -> ResourceLoad:
    """One thread: ids are looked for in the cache, rows brought in, and handed to the tier above if there is one."""
    nanoseconds = sum(_admitting_ns(setup, pool) + _bringing_ns(setup, pool) for pool in pools)
    nanoseconds += 1e3 * setup.host.costs.ahead_us if is_ahead else 0.0
    return ResourceLoad("cold rows", nanoseconds * 1e-9, sum(pool.misses for pool in pools), "rows")


def _admitting_ns(setup: Setup, pool: PoolLoad) -> float:
    costs = setup.host.costs
    if setup.hbm_bytes:
        per_byte = costs.pool_ns_per_byte + costs.pool_row_ns_per_byte
        copying = costs.pool_ns + costs.pool_row_ns + per_byte * pool.layout.row_bytes
        return pool.hbm_misses * _directions(setup) * (costs.admit_ns + costs.admit_row_ns + copying)
    if pool.is_full or not pool.lookups:
        return 0.0
    return pool.asked / pool.unique * costs.admission_ns(ids=pool.lookups, rows=pool.unique)


def _directions(setup: Setup) -> int:
    """Each row that comes up makes another leave, which in training has to go down."""
    return 2 if setup.workload.is_training else 1


def _bringing_ns(setup: Setup, pool: PoolLoad) -> float:
    costs = setup.host.costs
    a_row = costs.miss_ns + costs.miss_ns_per_byte * pool.layout.row_bytes
    return pool.misses * a_row + pool.pages_read * costs.read_ns


def _write_back(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """One thread, as LMDB has one writer."""
    nanoseconds = sum(_writing_ns(setup, pool) for pool in pools)
    return ResourceLoad("write-back", nanoseconds * 1e-9, sum(pool.rows_written for pool in pools), "rows")


def _writing_ns(setup: Setup, pool: PoolLoad) -> float:
    costs, row_bytes = setup.host.costs, pool.layout.row_bytes
    appending = pool.rows_written * (costs.append_ns + costs.append_ns_per_byte * row_bytes)
    moving = pool.rows_moved * (costs.move_ns + costs.move_ns_per_byte * row_bytes)
    return appending + moving + 1e3 * pool.transactions * costs.transaction_us


def _pcie(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """The fuller direction: rows and ids up; as many rows down, in training. Accelerators share it equally."""
    if not setup.hbm_bytes:
        return ResourceLoad("pcie", 0.0, 0.0, "bytes")
    moved = sum(pool.hbm_misses * pool.layout.row_bytes + pool.lookups * ID_BYTES for pool in pools)
    speed = sum(each.pcie.bytes_per_s for each in setup.host.accelerators)
    return ResourceLoad("pcie", moved / speed + _pcie_latency_s(setup), moved, "bytes")


def _pcie_latency_s(setup: Setup) -> float:
    return max(each.pcie.latency_us for each in setup.host.accelerators) * 1e-6


# Drives


def _ssd_reads(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """Pages and segments, or their bytes, whichever take longer; all drives together."""
    reads = sum(pool.pages_read + pool.segments_cleaned for pool in pools)
    if not reads:
        return ResourceLoad("ssd reads", 0.0, 0.0, "reads")
    size = sum(
        pool.pages_read * pool.layout.page_bytes + pool.segments_cleaned * segment_bytes(pool.layout) for pool in pools
    )
    drives = setup.host.storage
    by_count = reads / sum(drive.reads_per_s for drive in drives)
    by_bytes = size / sum(drive.read_bytes_per_s for drive in drives)
    return ResourceLoad("ssd reads", max(by_count, by_bytes) + _read_latency_s(setup.host, pools), reads, "reads")


def _read_latency_s(host: Host, pools: Sequence[PoolLoad]) -> float:
    """Of the last page, which nothing hides, if there is one."""
    pages = sum(pool.pages_read for pool in pools)
    return min(1.0, pages) * max((drive.read_latency_us for drive in host.storage), default=0.0) * 1e-6


def _ssd_writes(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """Segments, which are large."""
    size = written_bytes(pools)
    speed = sum(drive.write_bytes_per_s for drive in setup.host.storage)
    return ResourceLoad("ssd writes", size / speed if size else 0.0, size, "bytes")


def written_bytes(pools: Sequence[PoolLoad]) -> float:
    """To the drives of a host."""
    return sum(pool.pages_written * pool.layout.page_bytes for pool in pools)


# What all share


def _ddr(setup: Setup, pools: Sequence[PoolLoad]) -> ResourceLoad:
    """Rows that the cores read and write, at random."""
    memory = setup.host.ddr
    moved = sum(_ddr_rows(setup, pool) * pool.layout.row_bytes for pool in pools)
    speed = memory.row_bytes_per_s or memory.bytes_per_s
    return ResourceLoad("ddr", moved / speed if speed else 0.0, moved, "bytes")


def _ddr_rows(setup: Setup, pool: PoolLoad) -> float:
    if setup.hbm_bytes:
        return pool.hbm_misses * _directions(setup) + pool.misses
    return pool.lookups + pool.misses + (2 * pool.unique if setup.workload.is_training else 0.0)


def _of_cores(setup: Setup, seconds: Mapping[str, float], *, is_ahead: bool) -> tuple[ResourceLoad, ...]:
    """The work of all threads, over the cores, and how long threads wait for one; a dense part without accelerator
    takes all of them.

    A thread finds its core taken for as long as an equal share of the others' work takes.
    """
    cores, threads = setup.host.processor.cores, min(setup.threads, setup.host.processor.cores)
    computing = seconds["batch"] + seconds["lookups"] * threads
    computing += 0.0 if setup.hbm_bytes else seconds["model"] * cores
    ahead = seconds["cold rows"] + seconds["write-back"]
    busy = computing + ahead
    waiting, waiting_ahead = (ahead / cores, computing / cores) if is_ahead else (0.0, 0.0)
    return (
        ResourceLoad("wait for a core", waiting, waiting, "seconds"),
        ResourceLoad("wait ahead", waiting_ahead, waiting_ahead, "seconds"),
        ResourceLoad("cores", busy / cores, busy, "core-seconds"),
    )
