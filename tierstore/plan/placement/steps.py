"""What a step takes where tables lie in the memories of devices, hosts and servers: bytes over rates.
docs/planning/placement.md draws it together.

The lookups of a batch, the transfers of their results and the model follow one another, as each needs what the one
before gives; lookups in different memories go on side by side.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..accesses import Accesses, of_tables, once_a_batch
from ..analytic import popularity
from ..host import Host, Memory
from ..loads import FLOAT_BYTES, FLOPS_PER_WEIGHT, ID_BYTES, TRAINING_FLOPS
from ..prediction import ResourceLoad, TierName
from ..workload import Workload
from .spread import Piece

_LOOKUPS = ("hbm", "ddr", "cores")


class TableDemand(NamedTuple):
    """Of one table in a step: ids, and distinct rows that they name."""

    lookups: float
    distinct: float


Demands = Mapping[str, TableDemand]


class Step(NamedTuple):
    """What a step of one batch takes.

    Attributes:
        loads: of the busiest device, link or host; amounts are of it too.
        step_s: lookups, transfers and model one after another.
        overlapped_s: were all resources busy at a time with several batches: the largest load.
        samples_per_s: of all hosts, a step after the other.
        bottleneck: the resource of the largest load.
    """

    loads: tuple[ResourceLoad, ...]
    step_s: float
    overlapped_s: float
    samples_per_s: float
    bottleneck: str


def expected_demand(workload: Workload) -> dict[str, TableDemand]:
    """By each table's pooling factor and Zipf's law of its exponent."""
    found = {}
    for table in workload.tables:
        lookups = workload.batch_samples * table.pooling_factor
        distinct = popularity([(table.num_embeddings, table.exponent, lookups)]).unique
        found[table.name] = TableDemand(lookups, distinct)
    return found


def measured_demand(workload: Workload, accesses: Accesses) -> dict[str, TableDemand]:
    """Means over the batches of accesses, which are taken to be of the workload's size; of a table that is not in them
    nothing is looked up."""
    batches, rate = accesses.all_batches, accesses.sampling_rate
    found = {table.name: TableDemand(0.0, 0.0) for table in workload.tables}
    for index, name in enumerate(accesses.tables):
        if name in found:
            own = of_tables(accesses, [index])
            lookups = len(own.keys) / rate if own.all_lookups is None else sum(own.all_lookups)
            distinct = min(lookups, len(once_a_batch(own).keys) / rate)
            found[name] = TableDemand(lookups / batches, distinct / batches)
    return found


class _Traffic(NamedTuple):
    """Of the pieces of one place in a step.

    Attributes:
        row_bytes: read and written by rows, in the memory where the pieces are.
        ids: that are sent to them.
        output_bytes: of the pooled rows that they send, in float32; as much again comes back as gradients in training.
        core_ns: of lookups and, in training, updates, on one core.
    """

    row_bytes: float
    ids: float
    output_bytes: float
    core_ns: float


def _traffic(workload: Workload, host: Host, demand: Demands, pieces: Sequence[Piece]) -> _Traffic:
    """Each id's weights are read and each bag written; in training each id's gradient is read, and each distinct row
    with its state is read and written. Ids go to each piece that has their rows, results come from each piece: of a
    table divided by rows every part sends partial sums of all its bags."""
    rows = ids = outputs = nanoseconds = 0.0
    costs = host.costs
    for piece in pieces:
        lookups, distinct = (amount * piece.row_share for amount in demand[piece.table.name])
        size, dim = piece.weight_bytes, piece.table.embedding_dim
        output = float(FLOAT_BYTES * dim * workload.batch_samples)
        moved = lookups * size + output
        nanoseconds += lookups * (costs.pool_ns + costs.pool_ns_per_byte * size)
        if workload.is_training:
            moved += lookups * FLOAT_BYTES * dim
            moved += 2 * distinct * piece.layout.row_bytes
            nanoseconds += lookups * (costs.update_ns + costs.update_ns_per_byte * size)
        rows, ids, outputs = rows + moved, ids + lookups, outputs + output
    return _Traffic(rows, ids, outputs, nanoseconds)


def step(
    workload: Workload, host: Host, hosts: int, demand: Demands, placed: Mapping[TierName, Sequence[Sequence[Piece]]]
) -> Step:
    """Of one batch.

    Args:
        hosts: that compute; the samples are divided among their accelerators, or among them if they have none.
        placed: pieces by tier, and in it by device ("hbm"; those of a host are neighbours), host ("ddr") or server
            ("remote").

    Raises:
        ValueError: the host does not say a rate that is needed.
    """
    own = len(host.accelerators)
    devices, passes = hosts * own, 2 if workload.is_training else 1  # results one way, gradients the other
    loads: list[ResourceLoad] = []
    network, peer = _of_dense_gradients(workload, hosts, max(1, own))
    pcie, pcie_turns = 0.0, 0
    for tier, by_place in placed.items():
        if not any(by_place):
            continue
        traffics = [_traffic(workload, host, demand, pieces) for pieces in by_place]
        exchanged = [ID_BYTES * each.ids + passes * each.output_bytes for each in traffics]
        loads += _lookups(tier, host, traffics)
        if tier == "hbm":
            # All to all: of what a device has for all samples, the others of its host take a part over peer links, and
            # those of other hosts over the network. Ids come from the host that has the samples.
            of_hosts = [sum(exchanged[first : first + own]) for first in range(0, devices, own)]
            pcie += sum(ID_BYTES * each.ids for each in traffics) / devices
            peer += max(exchanged) * (own - 1) / devices
            network += max(of_hosts) * (devices - own) / devices
            pcie_turns += 1
            continue
        # Between hosts all to all. From servers everything: the busier of a server's link and a host's counts.
        of_servers = max(*exchanged, sum(exchanged) / hosts)
        network += max(exchanged) * (hosts - 1) / hosts if tier == "ddr" else of_servers
        if devices:  # to which results go once partial sums are added: 4 bytes a sample and column
            columns = sum({piece.number: piece.table.embedding_dim for pieces in by_place for piece in pieces}.values())
            pcie += passes * (float(FLOAT_BYTES) * workload.batch_samples * columns) / devices
            pcie_turns += passes
    links = [("network", host.network, network, 1 + passes)]
    if own:
        first = host.accelerators[0]
        links += [("pcie", first.pcie, pcie, pcie_turns), ("peer", first.peer, peer, 1 + passes)]
    for name, link, size, turns in links:
        if size:
            seconds = size / link.bytes_per_s + turns * link.latency_us * 1e-6
            loads.append(ResourceLoad(name, seconds, size, "bytes"))
    flops = workload.batch_samples * workload.dense_flops * (TRAINING_FLOPS if workload.is_training else 1)
    if flops:
        speed = host.accelerators[0].flops if own else host.processor.flops
        flops /= devices or hosts
        loads.append(ResourceLoad("model", flops / speed, flops, "flops"))
    return _in_all(workload, loads)


def _of_dense_gradients(workload: Workload, hosts: int, devices: int) -> tuple[float, float]:
    """Bytes between hosts and within one: summed around a ring, twice (n - 1) / n of their bytes."""
    size = FLOAT_BYTES * workload.dense_flops / FLOPS_PER_WEIGHT if workload.is_training else 0.0
    return 2 * size * (hosts - 1) / hosts, 2 * size * (devices - 1) / devices


def _lookups(tier: TierName, host: Host, traffics: Sequence[_Traffic]) -> list[ResourceLoad]:
    """Of the busiest device, host or server."""
    row_bytes = max(each.row_bytes for each in traffics)
    if tier == "hbm":
        return [ResourceLoad("hbm", row_bytes / _row_rate(host.accelerators[0].hbm, "hbm"), row_bytes, "bytes")]
    found = [ResourceLoad("ddr", row_bytes / _row_rate(host.ddr, "ddr"), row_bytes, "bytes")]
    busiest = max(traffics, key=lambda each: each.core_ns)
    seconds = (busiest.core_ns * 1e-9 + host.costs.batch_us * 1e-6) / host.processor.cores
    return [*found, ResourceLoad("cores", seconds, busiest.ids, "lookups")] if seconds else found


def _row_rate(memory: Memory, name: str) -> float:
    """Bytes a second by rows at random, or in order where that is all that is known."""
    rate = memory.row_bytes_per_s or memory.bytes_per_s
    if not rate:
        raise ValueError(f"{name} has no row_bytes_per_s and no bytes_per_s; give one")
    return rate


def _in_all(workload: Workload, loads: Sequence[ResourceLoad]) -> Step:
    seconds = {load.resource: load.seconds for load in loads}
    lookups = max((seconds.pop(name) for name in _LOOKUPS if name in seconds), default=0.0)
    step_s = lookups + sum(seconds.values())
    largest = max(loads, key=lambda load: load.seconds)
    return Step(tuple(loads), step_s, largest.seconds, workload.batch_samples / step_s, largest.resource)
