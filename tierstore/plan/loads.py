"""What one step or query keeps busy on one host: a term for each resource, and how they make up a step.

Lanes work side by side, the resources of one lane one after another, so a step takes as long as its longest lane.
``SERIAL`` resources work for the batch that is computed; if rows are fetched ahead, those of ``AHEAD`` work for later
batches meanwhile, and so do ``LINKS`` and ``DRIVES``. ``SHARED`` ones limit what all others take of them. ``WAITS`` are
for a core that another thread has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..kernels.threads import MIN_WORK
from .demand import PoolLoad, segment_bytes
from .host import AHEAD_BATCHES, HANDED_OVER_BATCHES, ID_BYTES, REQUEST_BATCHES, SERVED_BATCHES, TRAINING_FLOPS, Setup
from .workload import Workload

SERIAL: Final = ("requests", "batch", "lookups", "hbm", "model", "network", "wait for a core")
AHEAD: Final = ("id exchange", "cold rows", "write-back", "wait ahead")
LINKS: Final = ("pcie",)
DRIVES: Final = ("ssd reads", "ssd writes")
SHARED: Final = ("cores", "ddr")
WAITS: Final = ("wait for a core", "wait ahead")

_IN_WORDS: Final = {
    "requests": "HTTP and protocol",
    "batch": "fixed work of a batch",
    "lookups": "work on cached rows",
    "hbm": "HBM bandwidth",
    "model": "dense model",
    "cold rows": "bringing rows in",
    "id exchange": "exchanging ids",
    "write-back": "writing rows back",
    "wait for a core": "waiting for a core",
    "wait ahead": "waiting for a core",
    "ddr": "DDR bandwidth",
    "ssd reads": "SSD reads",
    "ssd writes": "SSD writes",
    "pcie": "PCIe",
    "computing": "computing the batch",
    "in turn": "everything in turn",
    "fetching": "fetching later batches",
    "drives": "SSDs",
}
_FLOAT_BYTES: Final = 4
_TOGETHER: Final = 3  # exchanges of a pool with every batch, and as many before them, of ids
_MOVED_AS: Final = 3
"""Rows appended: one that cleaning moves is read and checked, too; measured, of rows of 72 bytes to 1 KiB: 1 to 5."""
_WAKES: Final = 1.7  # times that lookups, or updates, of a pool wake other threads; a product is started, too
_FLOPS_PER_WEIGHT: Final = 2  # of a dense layer, forward, a sample
_CACHED_BYTES: Final = 4 << 20  # of a core's part of its processor's caches


class ResourceLoad(NamedTuple):
    """What keeps a resource busy, were all else infinitely fast; ``amount``: of work, in ``unit``."""

    resource: str
    seconds: float
    amount: float
    unit: str


class Lane(NamedTuple):
    """Work that goes on one after another, alongside that of other lanes; ``resources``: names of loads."""

    name: str
    seconds: float
    resources: tuple[str, ...]


def in_words(name: str) -> str:
    """A load's or lane's name as people read it."""
    return _IN_WORDS.get(name, name)


def loads_of(setup: Setup, pools: Sequence[PoolLoad], *, is_ahead: bool) -> tuple[ResourceLoad, ...]:
    """Of all resources, idle ones too, in the order in which a batch meets them."""
    own = [*_computing(setup, pools, is_ahead), *_fetching(setup, pools, is_ahead), *_devices(setup, pools)]
    seconds = {load.resource: load.seconds for load in own}
    if setup.rank_costs is not None:
        seconds |= _of_ranks(setup, pools, seconds, is_ahead=is_ahead)
        own = [load._replace(seconds=seconds[load.resource]) for load in own]
    return (*own, *_cores(setup, pools, seconds, is_ahead))


def _computing(setup: Setup, pools: Sequence[PoolLoad], is_ahead: bool) -> Iterator[ResourceLoad]:
    """What is done for the batch that is computed. Lookups are pooling, and in training backward and optimizer, by the
    main thread and those it has. On a GPU rows are read to be pooled, each id's; distinct ones are read and written
    again; and the dense part is computed there."""
    workload, costs = setup.workload, setup.host.costs
    steps, batches, requests = (TRAINING_FLOPS, 3, 0) if workload.is_training else (1, SERVED_BATCHES, 1)
    yield ResourceLoad("requests", 1e-6 * requests * REQUEST_BATCHES * costs.batch_us, requests, "requests")
    # Of ranks a step is in what was measured, but for taking over what was prefetched.
    times = (0 if setup.rank_costs else batches) + (HANDED_OVER_BATCHES if is_ahead else 0)
    yield ResourceLoad("batch", 1e-6 * times * costs.batch_us, 1.0, "batches")
    nanoseconds, in_hbm = 0.0, bool(setup.hbm_bytes)
    for amounts in (each for pool in pools for each in _amounts(setup, pool)):
        nanoseconds += costs.lookup_ns(**amounts) + (costs.update_ns(**amounts) if workload.is_training else 0.0)
    threads, sharing_s = _sharing(setup, pools)
    lookups_s = 0.0 if in_hbm else nanoseconds * 1e-9 / threads + sharing_s
    yield ResourceLoad("lookups", lookups_s, sum(pool.lookups for pool in pools), "ids")
    flops = workload.dense_flops * workload.batch_samples / setup.parts * steps
    moved = sum((pool.lookups + 2 * pool.unique) * pool.layout.row_bytes for pool in pools) if in_hbm else 0.0
    yield ResourceLoad("hbm", moved / setup.gpu.hbm.row_bytes_per_s if in_hbm else 0.0, moved, "bytes")
    yield ResourceLoad("model", flops / setup.gpu.flops if in_hbm else sum(dense_s(setup)), flops, "flops")
    # Each distinct row of a host's batch once, its gradient back, and the dense weights' in a ring.
    values, weights = sum(pool.sent_rows * pool.layout.dim * _FLOAT_BYTES for pool in pools), weight_bytes(workload)
    rounds = 2 * (setup.parts - 1) if weights else 0
    yield _sent(setup, "network", 2 * (values + weights), _TOGETHER * len(pools) + rounds)


def _amounts(setup: Setup, pool: PoolLoad) -> Iterator[dict[str, Any]]:
    """Ids, rows and bags that a host works on. Where rows cross, it pools what owners send; as an owner it looks up and
    updates each that it is asked for, as a bag of one id."""
    if setup.parts > 1:
        yield {"ids": pool.lookups, "rows": pool.sent_rows, "bags": pool.bags, "layout": pool.layout}
        yield {"ids": pool.sent_rows, "rows": pool.unique, "bags": pool.sent_rows, "layout": pool.layout}
    else:
        yield {"ids": pool.lookups, "rows": pool.unique, "bags": pool.bags, "layout": pool.layout}


def _sharing(setup: Setup, pools: Sequence[PoolLoad]) -> tuple[int, float]:
    """Threads that share lookups and updates, one for few ids; and seconds of sharing, in which one of them is busy."""
    enough = max(1, int(sum(pool.lookups for pool in pools)) // MIN_WORK)
    threads = min(setup.threads, setup.host.processor.cores, enough)
    if threads == 1 or setup.hbm_bytes:
        return threads, 0.0
    passes = 2 if setup.workload.is_training else 1
    return threads, 1e-6 * _WAKES * setup.host.costs.wake_us * passes * len(pools)


def dense_s(setup: Setup) -> tuple[float, float, float]:
    """Seconds of a dense part on the cores: of starting its products; of reading the weights that caches do not hold,
    with its cores' share of the bandwidth; of its samples. The first two are of a batch, whatever its samples."""
    workload, host, threads = setup.workload, setup.host, _dense_threads(setup)
    part, is_training = threads / host.processor.cores, workload.is_training
    samples = workload.batch_samples / setup.parts
    starts, values = host.costs.dense_ns(workload.dense, samples=samples, threads=threads, is_training=is_training)
    flops = samples * workload.dense_flops * (TRAINING_FLOPS if is_training else 1)
    read = 0.0 if is_training else max(0.0, weight_bytes(workload) - threads * _CACHED_BYTES)
    return 1e-9 * starts, read / host.ddr.bytes_per_s / part, 1e-9 * values + flops / host.processor.flops / part


def _dense_threads(setup: Setup) -> int:
    """In training all cores; a worker that serves has threads of its own."""
    cores = setup.host.processor.cores
    return cores if setup.workload.is_training else min(cores, setup.threads)


def weight_bytes(workload: Workload) -> float:
    """Of the dense part, estimated."""
    return workload.dense_flops / _FLOPS_PER_WEIGHT * _FLOAT_BYTES


def _sent(setup: Setup, name: str, size_bytes: float, exchanges: int) -> ResourceLoad:
    """Of so many bytes what goes to other hosts, if there are any."""
    hosts, network = setup.parts, setup.host.network
    sent = (hosts - 1) / hosts * size_bytes
    seconds = sent / network.bytes_per_s + exchanges * network.latency_us * 1e-6 if hosts > 1 else 0.0
    return ResourceLoad(name, seconds, sent, "bytes")


def _fetching(setup: Setup, pools: Sequence[PoolLoad], is_ahead: bool) -> Iterator[ResourceLoad]:
    """What brings rows in. Over hosts ids are sent first. One thread looks ids up in the cache, fetches rows, hands
    them to the tier above, if any; one writes back, as LMDB has one writer."""
    costs, sent = setup.host.costs, sum(ID_BYTES * pool.sent_rows for pool in pools)
    yield _sent(setup, "id exchange", sent, _TOGETHER * len(pools))
    nanoseconds = sum(_admitting_ns(setup, pool) + pool.misses * costs.miss_row_ns(pool.layout) for pool in pools)
    nanoseconds += sum(pool.pages_read * costs.read_ns for pool in pools)
    nanoseconds += 1e3 * AHEAD_BATCHES * costs.batch_us if is_ahead else 0.0
    yield ResourceLoad("cold rows", nanoseconds * 1e-9, sum(pool.misses for pool in pools), "rows")
    nanoseconds = 1e3 * costs.transaction_us * sum(pool.transactions for pool in pools)
    for pool in pools:
        nanoseconds += (pool.rows_written + _MOVED_AS * pool.rows_moved) * costs.append_row_ns(pool.layout)
    yield ResourceLoad("write-back", nanoseconds * 1e-9, sum(pool.rows_written for pool in pools), "rows")


def _admitting_ns(setup: Setup, pool: PoolLoad) -> float:
    costs, is_sharded = setup.host.costs, setup.parts > 1
    if setup.hbm_bytes:  # a row that comes up, and in training one that goes down
        copying = costs.admission_ns(ids=1, rows=1) + 2 * costs.byte_ns * pool.layout.row_bytes
        return pool.hbm_misses * 2 * copying
    # The distinct rows of a batch are found before they are sent for; ranks were measured with it.
    sends_for = is_sharded and setup.rank_costs is None
    sent_for = costs.admission_ns(ids=pool.lookups, rows=pool.sent_rows) if sends_for else 0.0
    asked = pool.sent_rows if is_sharded else pool.lookups
    if pool.is_full or not asked:
        return sent_for
    return sent_for + pool.asked / pool.unique * costs.admission_ns(ids=asked, rows=pool.unique)


def _devices(setup: Setup, pools: Sequence[PoolLoad]) -> Iterator[ResourceLoad]:
    """PCIe in its fuller direction: rows and ids up. All drives together: reads of pages and segments, by count or
    their bytes, whichever take longer, and writes of segments. DDR: rows that the cores read and write, at random."""
    moved, in_hbm, passes = 0.0, bool(setup.hbm_bytes), 2 * setup.workload.is_training
    if in_hbm:
        moved = sum(pool.hbm_misses * pool.layout.row_bytes + pool.lookups * ID_BYTES for pool in pools)
    link = setup.gpu.pcie if in_hbm else None
    yield ResourceLoad("pcie", moved / link.bytes_per_s + 1e-6 * link.latency_us if link else 0.0, moved, "bytes")
    drives, written = setup.host.storage, written_bytes(pools)
    pages, segments = sum(pool.pages_read for pool in pools), sum(pool.segments_cleaned for pool in pools)
    seconds = 0.0
    if pages + segments:
        size = sum(pool.pages_read * pool.layout.page_bytes for pool in pools)
        size += sum(pool.segments_cleaned * segment_bytes(pool.layout) for pool in pools)
        by_count = (pages + segments) / sum(drive.reads_per_s for drive in drives)
        seconds = max(by_count, size / sum(drive.read_bytes_per_s for drive in drives)) + read_latency_s(setup, pools)
    yield ResourceLoad("ssd reads", seconds, pages + segments, "reads")
    writes_s = written / sum(drive.write_bytes_per_s for drive in drives) if written else 0.0
    yield ResourceLoad("ssd writes", writes_s, written, "bytes")
    moved = 0.0
    for pool in pools:
        own = 2 * pool.hbm_misses if in_hbm else pool.lookups + passes * pool.unique
        moved += (own + pool.misses) * pool.layout.row_bytes
    yield ResourceLoad("ddr", moved / setup.host.ddr.row_bytes_per_s, moved, "bytes")


def read_latency_s(setup: Setup, pools: Sequence[PoolLoad]) -> float:
    """Of the last page that a batch reads, which nothing hides, if there is one."""
    pages = min(1.0, sum(pool.pages_read for pool in pools))
    return pages * max((drive.read_latency_us for drive in setup.host.storage), default=0.0) * 1e-6


def _cores(
    setup: Setup, pools: Sequence[PoolLoad], seconds: Mapping[str, float], is_ahead: bool
) -> tuple[ResourceLoad, ...]:
    """The work of all threads, over the cores, and how long threads wait for one: as long as an equal share of the
    others' work takes. A dense part on the cores takes all that it may, but for starting its products."""
    cores, (threads, sharing_s) = setup.host.processor.cores, _sharing(setup, pools)
    computing = seconds["requests"] + seconds["batch"] + (seconds["lookups"] - sharing_s) * threads + sharing_s
    if not setup.hbm_bytes:
        starts = dense_s(setup)[0]
        computing += starts + (seconds["model"] - starts) * _dense_threads(setup)
    ahead = seconds["cold rows"] + seconds["write-back"]
    waiting, waiting_ahead = (ahead / cores, computing / cores) if is_ahead else (0.0, 0.0)
    return (
        ResourceLoad("wait for a core", waiting, waiting, "seconds"),
        ResourceLoad("wait ahead", waiting_ahead, waiting_ahead, "seconds"),
        ResourceLoad("cores", (computing + ahead) / cores, computing + ahead, "core-seconds"),
    )


def _of_ranks(
    setup: Setup, pools: Sequence[PoolLoad], seconds: Mapping[str, float], *, is_ahead: bool
) -> dict[str, float]:
    """Of one of several ranks that share a host: lookups, updates and exchanges as they were measured together. Dense
    gradients are averaged by a thread that, when woken, finds its core taken as often as rows are fetched there."""
    from ..dist.placement import TableDemand
    from ..dist.placement.costs import amounts_of, group_of
    from ..dist.plan import Sharding

    costs, ranks, lookups_s, network_s = setup.rank_costs, setup.parts, 0.0, 0.0
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


def bottleneck_of(lanes: Sequence[Lane], seconds: Mapping[str, float]) -> str:
    """The resource that takes longest in the longest lane. Waits for a core are the cores'."""
    longest = max(lanes[0].resources, key=lambda name: seconds[name])
    return "cores" if longest in WAITS else longest


def written_bytes(pools: Sequence[PoolLoad]) -> float:
    """To the drives of a host."""
    return sum(pool.pages_written * pool.layout.page_bytes for pool in pools)
