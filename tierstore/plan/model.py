"""The prediction: what a setup would do with a demand, and with a tenth more of each resource. docs/planning/model.md
has the formulas.

Latency of queries is by simulation of a worker's queue: they come at random times (a Poisson process) and wait in
order; the worker takes what waits, as far as a batch holds it. Workers share a port, not a queue: each has an equal
part of the queries.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..cache.ddr import resolve_policy
from ..io.log import DEFAULT_SLACK
from ..io.places import NARROW, place_type
from ..io.segments import geometry
from ..kernels.arrays import Float64s
from ..kernels.jit import kernel
from ..layout import RowLayout
from ..system.checks import excerpt
from ..system.sizes import format_size
from .demand import FILE_SHARE, ID_LAYOUT, Demand, PoolLoad, pool_loads, pool_rows, segment_bytes
from .host import LIBRARY_BYTES, PARENT_BYTES, PROCESS_BYTES, Price, Pricing, Setup, Wear, price_of, times, wear_of
from .loads import (
    DRIVES,
    SHARED,
    Lane,
    ResourceLoad,
    bottleneck_of,
    dense_s,
    lanes_of,
    loads_of,
    read_latency_s,
    weight_bytes,
    written_bytes,
)

NUM_QUERIES: Final = 100_000
_WARM_SHARE: Final = 0.1  # of the queries, the first, which meet an emptier queue; they do not count
_SELDOM: Final = 1e-6  # of the most that could be answered: of fewer none waits
SEGMENT_BYTES: Final = 50  # of the map of rows, for each segment
_STEP: Final = 0.1
TierName = Literal["hbm", "ddr", "ssd"]


class Latency(NamedTuple):
    """Of queries at a rate, waiting included, in seconds; infinite where they come faster than they are answered."""

    queries_per_s: float
    p50_s: float
    p99_s: float


class Queue(NamedTuple):
    """Of one worker: the time that it needs."""

    batch_s: float  # of a batch, whatever its queries
    query_s: float  # of each of its queries
    batch_queries: int  # at most

    @property
    def alone_s(self) -> float:
        """Of a query that meets no other."""
        return self.batch_s + self.query_s

    @property
    def rate_max(self) -> float:
        """Queries a second that could be answered were there always some waiting."""
        return 1 / (self.batch_s / self.batch_queries + self.query_s)


class TierLoad(NamedTuple):
    """One tier of one host, of all of its workers or drives together. ``lookups``: rows asked of it, each once a batch;
    ``hit_rate``: of the ssd, the share whose page the system had in memory."""

    tier: TierName
    capacity_bytes: float
    rows: float
    lookups: float
    hit_rate: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a setup."""

    setup: Setup
    step_s: float  # of training, or a query served alone
    samples_per_s: float  # of all hosts; of serving while queries wait, so that batches are full
    tiers: tuple[TierLoad, ...]
    loads: tuple[ResourceLoad, ...]
    lanes: tuple[Lane, ...]  # the longest first; a step takes as long as that
    bottleneck: str
    wear: Wear
    price: Price
    is_in_memory: bool = False  # every row has a place in DDR or HBM, and the drives are not read
    latency: Latency | None = None  # None for training, and where no rate is asked for
    queue: Queue | None = None  # of each worker that serves; None for training

    @property
    def rate_max(self) -> float:
        """Steps a second of all hosts, or queries that they could answer."""
        return self.samples_per_s / self.setup.workload.batch_samples


def predict(setup: Setup, demand: Demand, *, pricing: Pricing | None = None) -> Prediction:
    """What one host's parts, or one rank's share of them, do in a step or query, and what follows for all hosts.
    Layouts are the setup's, so that another dtype needs no other demand. ValueError: the setup does not fit its host,
    or the demand is not of its policy and tables."""
    if resolve_policy(demand.policy) != resolve_policy(setup.policy):
        raise ValueError(f"the demand's curves are of {demand.policy}, the setup's policy is {setup.policy}")
    rank = setup.of_a_rank
    if reason := misfit(rank, demand):
        raise ValueError(reason)
    pools = pool_loads(rank, demand)
    # Rows of later batches come in meanwhile only if they can stay pinned until they are used.
    is_training = setup.workload.is_training
    is_ahead = is_training and setup.prefetch_depth > 0 and all(pool.keeps_two for pool in pools)
    loads = loads_of(rank, pools, is_ahead=is_ahead)
    seconds = {load.resource: load.seconds for load in loads}
    lanes = lanes_of(seconds, is_ahead=is_ahead)
    step_s, samples = lanes[0].seconds, setup.workload.batch_samples
    if not step_s:
        raise ValueError(f"nothing takes time on host {excerpt(setup.host.name)}: its costs are 0; measure them")
    queue, batches_per_s = None, 1 / step_s
    if not is_training:
        # A query keeps its worker busy while all workers are, and wait for drives and cores that they share.
        starts_s, latency_s = sum(dense_s(setup)[:2]), read_latency_s(setup, pools)
        shared = (sum(seconds[name] for name in DRIVES) - latency_s, *(seconds[name] for name in SHARED))
        busy_s, fixed = max(step_s, setup.workers * max(shared)), seconds["batch"] + starts_s + latency_s
        together = max(1, setup.batch_samples_max // samples)
        queue = Queue(fixed, busy_s - fixed, together)
        batches_per_s = setup.hosts * setup.workers * queue.rate_max
        # Queries that wait share what a batch takes whatever its queries.
        seconds["batch"] /= together
        seconds["model"] -= (1 - 1 / together) * starts_s
    return Prediction(
        setup=setup,
        step_s=step_s,
        samples_per_s=batches_per_s * samples,
        tiers=_tiers(rank, pools),
        loads=loads,
        lanes=lanes,
        bottleneck=bottleneck_of(lanes, seconds),
        wear=wear_of(rank.host, written_bytes(pools) / step_s),
        price=price_of(setup.host, setup.hosts, pricing or Pricing()),
        is_in_memory=all(pool.is_in_memory for pool in pools),
        queue=queue,
    )


def at_rate(found: Prediction, queries_per_s: float) -> Prediction:
    """With the latency of so many queries to all hosts; of training, or none of them, itself."""
    if found.queue is None or not queries_per_s:
        return found
    own = latency_at(found.queue, queries_per_s / found.setup.hosts / found.setup.workers)
    return replace(found, latency=own._replace(queries_per_s=queries_per_s))


def why_no_gpu(setup: Setup) -> str:
    """Why no rows can be in device memory, or ""."""
    gpus = len(setup.host.accelerators)
    if not setup.workload.is_training:
        return "tierstore serve has rows in DDR and computes on cores"
    if setup.hosts > 1:
        return f"tables over {setup.hosts} hosts or ranks are in DDR, as they are not sharded over GPUs"
    if gpus != 1:
        return f"a store uses one GPU, host {excerpt(setup.host.name)} has {gpus}: give a host file with one"
    return ""


def misfit(setup: Setup, demand: Demand) -> str:
    """Why the setup does not fit its host, or "". ``pool_loads`` says what a budget cannot hold."""
    host = setup.host
    if setup.hbm_bytes:
        if reason := why_no_gpu(setup):
            return f"rows in device memory (setup.hbm): {reason}; or leave it out"
        if setup.hbm_bytes > setup.gpu.hbm.capacity_bytes:
            return _too_little("memory of an accelerator", setup.hbm_bytes, setup.gpu.hbm.capacity_bytes)
    memory = setup.ddr_bytes + setup.page_cache_bytes + processes_bytes(setup, demand)
    if memory > host.ddr.capacity_bytes:
        return _too_little("memory for rows, page cache and processes", memory, host.ddr.capacity_bytes)
    stored = sum(FILE_SHARE * segments * segment_bytes(layout) for layout, _, segments in _segments(setup, demand))
    capacity = sum(drive.capacity_bytes for drive in host.storage)
    if stored > capacity:
        return _too_little("SSD", stored, capacity)
    return ""


def _segments(setup: Setup, demand: Demand) -> list[tuple[RowLayout, int, float]]:
    """Rows that a host has of each layout, and segments of them: in training of two versions, each with its slack."""
    kinds = [*pool_rows(setup, demand), (ID_LAYOUT, -(-setup.workload.id_rows // setup.parts))]
    versions = 2 * DEFAULT_SLACK if setup.workload.is_training else 1
    return [(layout, count, versions * count / layout.rows_per_segment) for layout, count in kinds if count]


def processes_bytes(setup: Setup, demand: Demand) -> float:
    """Memory of a host's processes beside cached rows: the libraries; in each process itself, the dense weights, and
    the map of all rows, in which each takes as many bytes as the widest place; and the parent of several workers. Of a
    rank, its part of the libraries that the ranks of its host share."""
    kinds = _segments(setup, demand)
    wide = max(place_type(geometry(layout, 0), [math.ceil(each)], NARROW).itemsize for layout, _, each in kinds)
    maps = sum(wide * count + SEGMENT_BYTES * math.ceil(segments) for _, count, segments in kinds)
    processes = setup.workers * (PROCESS_BYTES + weight_bytes(setup.workload) + maps)
    libraries = LIBRARY_BYTES / (setup.rank_costs.local_world_size if setup.rank_costs else 1)
    return libraries + processes + (PARENT_BYTES if setup.workers > 1 else 0)


def _too_little(what: str, wanted: float, found: float) -> str:
    return f"{what}: {format_size(int(wanted))} of a host are wanted, {format_size(int(found))} are there"


def _tiers(setup: Setup, pools: Sequence[PoolLoad]) -> tuple[TierLoad, ...]:
    asked, hbm_missed = sum(pool.asked for pool in pools), sum(pool.hbm_misses for pool in pools)
    missed, from_device = sum(pool.misses for pool in pools), sum(pool.device_misses for pool in pools)
    hbm_rows, ddr_rows = sum(pool.hbm_rows for pool in pools), sum(pool.ddr_rows for pool in pools)
    stored = sum(drive.capacity_bytes for drive in setup.host.storage)
    ddr_lookups = hbm_missed if setup.hbm_bytes else asked

    def hit_rate(lookups: float, missed: float) -> float:
        return 1 - missed / lookups if lookups else 1.0

    hbm = TierLoad("hbm", setup.hbm_bytes, hbm_rows, asked, hit_rate(asked, hbm_missed))
    return (
        *((hbm,) if setup.hbm_bytes else ()),
        TierLoad("ddr", setup.ddr_bytes, ddr_rows * setup.workers, ddr_lookups, hit_rate(ddr_lookups, missed)),
        TierLoad("ssd", stored, sum(pool.num_rows for pool in pools), missed, hit_rate(missed, from_device)),
    )


class Marginal(NamedTuple):
    """``samples_per_s``: more than without, of all hosts."""

    resource: str
    change: str
    samples_per_s: float


def marginal_values(setup: Setup, demand: Demand) -> tuple[Marginal, ...]:
    """Of a tenth more of each resource, and of a core more, all else staying; the best first. More memory is used, by
    rows or as page cache, and so are more cores of serving, by another worker, which brings its memory. Raises: as
    ``predict``."""
    before = predict(setup, demand).samples_per_s
    found = []
    for resource, changed in _changes(setup):
        added = changed.host.processor.cores - setup.host.processor.cores
        with contextlib.suppress(ValueError):  # more HBM may leave DDR too little
            more = (predict(changed, demand).samples_per_s - before) / max(1, added)
            found.append(Marginal(resource, "+1" if resource == "cores" else "+10 %", more))
    return tuple(sorted(found, key=lambda each: -each.samples_per_s))


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """(resource, setup with more of it)."""
    host, processor = setup.host, setup.host.processor

    more = partial(times, setup, 1 + _STEP)
    for resource, field in (("DDR", "ddr_bytes"), ("page cache", "page_cache_bytes")):
        if size := _STEP * getattr(setup, field):
            larger = replace(host, ddr=replace(host.ddr, capacity_bytes=host.ddr.capacity_bytes + size))
            yield resource, replace(more(field), host=larger)
    yield "SSD reads", more("host.storage.reads_per_s", "host.storage.read_bytes_per_s")
    yield "SSD writes", more("host.storage.write_bytes_per_s")
    yield "DDR bandwidth", more("host.ddr.bytes_per_s", "host.ddr.row_bytes_per_s")
    if setup.parts > 1:
        yield "network", more("host.network.bytes_per_s")
    if setup.hbm_bytes:
        hbm = "host.accelerators.hbm"
        yield "HBM", more("hbm_bytes", f"{hbm}.capacity_bytes")
        yield "HBM bandwidth", more(f"{hbm}.bytes_per_s", f"{hbm}.row_bytes_per_s")
        yield "PCIe", more("host.accelerators.pcie.bytes_per_s")
    yield "flops", more("host.accelerators.flops" if setup.hbm_bytes else "host.processor.flops")
    # A core, with its share of the flops; lookups use it if they used all there were. A worker takes cores of its own.
    cores, is_training = processor.cores, setup.workload.is_training
    added = 1 if is_training else setup.threads
    grown = replace(processor, cores=cores + added, flops=processor.flops * (cores + added) / cores)
    larger = replace(times(host, 2, "ddr.capacity_bytes"), processor=grown)
    threads, workers = setup.threads + (is_training and setup.threads >= cores), setup.workers + (not is_training)
    ddr = setup.ddr_bytes * workers / setup.workers
    yield "cores", replace(setup, host=larger, threads=threads, workers=workers, ddr_bytes=ddr)


def latencies(queue: Queue, queries_per_s: float, *, num_queries: int = NUM_QUERIES) -> Float64s:
    """Seconds from arrival to answer of simulated queries, float64 [num_queries], in order of arrival: the same gaps at
    every rate, but for their scale. ValueError: the rate is not more than 0."""
    if not queries_per_s > 0 or not math.isfinite(queries_per_s):
        raise ValueError(f"queries_per_s={queries_per_s!r}: expected more than 0")
    waited = np.empty(num_queries)
    _serve(_arrivals(num_queries) / queries_per_s, *queue, waited)
    return waited


@lru_cache(maxsize=2)
def _arrivals(num_queries: int) -> Float64s:
    """At one query a second."""
    return np.cumsum(np.random.default_rng(0).standard_exponential(num_queries))


@kernel
def _serve(arrivals: Any, batch_s: float, query_s: float, batch_queries: int, waited: Any) -> None:
    first, free = 0, 0.0
    while first < arrivals.size:
        start = max(free, arrivals[first])
        stop = first + 1
        while stop < arrivals.size and arrivals[stop] <= start and stop - first < batch_queries:
            stop += 1
        free = start + batch_s + query_s * (stop - first)
        for query in range(first, stop):
            waited[query] = free - arrivals[query]
        first = stop


def latency_at(queue: Queue, queries_per_s: float, *, num_queries: int = NUM_QUERIES) -> Latency:
    """Percentiles, without the first tenth of the queries; all infinite at a rate that no queue can carry."""
    if queries_per_s >= queue.rate_max:
        return Latency(queries_per_s, math.inf, math.inf)
    found = latencies(queue, max(queries_per_s, _SELDOM * queue.rate_max), num_queries=num_queries)
    settled = found[int(num_queries * _WARM_SHARE) :]
    return Latency(queries_per_s, *np.quantile(settled, (0.5, 0.99), method="higher").tolist())
