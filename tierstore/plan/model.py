"""The prediction: what a setup would do with a demand. docs/planning/model.md has the formulas."""

from collections.abc import Sequence
from typing import Final

from ..cache.ddr import POLICIES, resolve_policy
from ..system.checks import excerpt
from ..system.sizes import format_size
from .demand import Demand
from .loads import DRIVES, SHARED, bottleneck_of, fixed_seconds, lanes_of, loads_of, written_bytes
from .prediction import Prediction, Pricing, Setup, TierLoad, drive_writes_a_day, price_of
from .queueing import Queue, latency_at
from .tiers import ID_LAYOUT, PoolLoad, file_of, pool_loads

SEGMENT_BYTES: Final = 50
"""Of the map of rows, for each segment."""


def predict(
    setup: Setup,
    demand: Demand,
    *,
    query_sizes: Sequence[float] | None = None,
    queries_per_s: float | None = None,
    pricing: Pricing | None = None,
) -> Prediction:
    """What one host's parts, or one rank's share of them, do in a step or query, and what follows for all hosts.

    Args:
        demand: of the workload; layouts are taken from the setup, so that another dtype needs no other demand.
        query_sizes: of serving: samples of a query, each as likely as any other; default: the workload's batch.
        queries_per_s: of serving, to all replicas: for the latency.

    Raises:
        ValueError: the setup does not fit its host, or the demand is not of its policy and tables.
    """
    if demand.policy in POLICIES and resolve_policy(demand.policy) != resolve_policy(setup.policy):
        raise ValueError(f"the demand's curves are of {demand.policy}, the setup's policy is {setup.policy}")
    own = demand.laid_out(setup.workload)
    rank = setup.of_a_rank
    if reason := misfit(rank, own):
        raise ValueError(reason)
    pools = pool_loads(rank, own)
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
        shared = (sum(seconds[name] for name in DRIVES), *(seconds[name] for name in SHARED))
        busy_s, fixed = max(step_s, setup.workers * max(shared)), fixed_seconds(setup, pools)
        queue = Queue(
            base_s=fixed,
            sample_s=(busy_s - fixed) / samples,
            sizes=tuple(query_sizes) if query_sizes is not None else (float(samples),),
            executors=setup.workers,
            batch_samples=float(setup.batch_samples_max),
        )
        batches_per_s = setup.replicas * setup.workers / busy_s
    latency = None
    if queue is not None and queries_per_s is not None:
        latency = latency_at(queue, queries_per_s / setup.replicas)._replace(queries_per_s=queries_per_s)
    prices = pricing or Pricing()
    return Prediction(
        setup=setup,
        step_s=step_s,
        samples_per_s=batches_per_s * samples,
        tiers=_tiers(rank, pools),
        loads=loads,
        lanes=lanes,
        bottleneck=bottleneck_of(seconds, is_ahead=is_ahead),
        drive_writes_a_day=drive_writes_a_day(rank.host, written_bytes(pools) / step_s, prices),
        price=price_of(setup.host, setup.num_hosts, prices),
        is_in_memory=all(pool.is_in_memory for pool in pools),
        latency=latency,
        queue=queue,
    )


def misfit(setup: Setup, demand: Demand) -> str:
    """Why the setup does not fit its host, or "". ``pool_loads`` says what a budget cannot hold."""
    host = setup.host
    if setup.hbm_bytes:
        reason = _unsupported(setup)
        if reason:
            return f"rows in device memory (setup.hbm): {reason}"
        if setup.hbm_bytes > setup.gpu.hbm.capacity_bytes:
            return _too_little("memory of an accelerator", setup.hbm_bytes, setup.gpu.hbm.capacity_bytes)
    rows = [*((pool.layout, pool.num_rows) for pool in demand.pools), (ID_LAYOUT, setup.workload.id_rows)]
    files = [file_of(layout, -(-count // setup.hosts), setup.workload) for layout, count in rows if count]
    wide = max((file.place_bytes for file in files), default=0)
    maps = sum(wide * file.rows + SEGMENT_BYTES * file.segments for file in files)
    memory = setup.ddr_bytes + setup.page_cache_bytes + setup.workers * maps
    if memory > host.ddr.capacity_bytes:
        return _too_little("memory", memory, host.ddr.capacity_bytes)
    stored = sum(file.bytes for file in files)
    capacity = sum(drive.capacity_bytes for drive in host.storage)
    if stored > capacity:
        return _too_little("SSD", stored, capacity)
    if any(not drive.capacity_bytes for drive in host.storage):
        return f"a drive of host {excerpt(host.name)} has a capacity of 0 bytes"
    return ""


def _unsupported(setup: Setup) -> str:
    """Why tierstore has no such rows in device memory; "" if it has."""
    gpus = len(setup.host.accelerators)
    if not setup.workload.is_training:
        return "tierstore serve has rows in DDR and computes on cores; leave it out"
    if setup.hosts > 1:
        return f"tables over {setup.hosts} hosts or ranks are in DDR, as they are not sharded over GPUs; leave it out"
    if gpus != 1:
        host = excerpt(setup.host.name)
        return (
            f"a store uses one GPU, host {host} has {gpus}; {'give host.accelerators = 1' if gpus else 'leave it out'}"
        )
    return ""


def _too_little(what: str, wanted: float, found: float) -> str:
    return f"{what}: {format_size(int(wanted))} of a host are wanted, {format_size(int(found))} are there"


def _tiers(setup: Setup, pools: Sequence[PoolLoad]) -> tuple[TierLoad, ...]:
    asked, hbm_missed = sum(pool.asked for pool in pools), sum(pool.hbm_misses for pool in pools)
    missed, from_device = sum(pool.misses for pool in pools), sum(pool.device_misses for pool in pools)
    hbm_rows, ddr_rows = sum(pool.hbm_rows for pool in pools), sum(pool.ddr_rows for pool in pools)
    stored = sum(drive.capacity_bytes for drive in setup.host.storage)
    hbm = TierLoad("hbm", setup.hbm_bytes, hbm_rows, asked, _hit_rate(asked, hbm_missed))
    ddr_lookups = hbm_missed if setup.hbm_bytes else asked
    return (
        *((hbm,) if setup.hbm_bytes else ()),
        TierLoad("ddr", setup.ddr_bytes, ddr_rows * setup.workers, ddr_lookups, _hit_rate(ddr_lookups, missed)),
        TierLoad("ssd", stored, sum(pool.num_rows for pool in pools), missed, _hit_rate(missed, from_device)),
    )


def _hit_rate(lookups: float, missed: float) -> float:
    return 1 - missed / lookups if lookups else 1.0
