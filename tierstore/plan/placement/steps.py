"""What a step takes where tables lie in the memories of devices, hosts and servers: bytes over rates.
docs/planning/placement.md draws it together.

The lookups of a batch, the transfers of their results and the model follow one another, as each needs what the one
before gives; lookups in different memories go on side by side.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..accesses import Accesses, of_table, once_a_batch
from ..analytic import expected_distinct
from ..host import Host, Memory
from ..loads import FLOAT_BYTES, FLOPS_PER_WEIGHT, ID_BYTES, TRAINING_FLOPS
from ..prediction import ResourceLoad
from ..workload import Workload
from .plan import PlacedTier, Step
from .spread import Piece, Shapes

__all__ = ["Cluster", "TableDemand", "expected_demand", "measured_demand", "step"]


class TableDemand(NamedTuple):
    """Of one table in a step: ids, and distinct rows that they name."""

    lookups: float
    distinct: float


class Traffic(NamedTuple):
    """Of some pieces in a step.

    Attributes:
        row_bytes: read and written by rows, in the memory where the pieces are.
        id_bytes: of the ids that are sent to them.
        output_bytes: of the pooled rows that they send, in float32; as much again comes back as gradients in training.
    """

    row_bytes: float
    id_bytes: float
    output_bytes: float


def expected_demand(workload: Workload) -> dict[str, TableDemand]:
    """By each table's pooling factor and Zipf's law of its exponent."""
    found = {}
    for table in workload.tables:
        lookups = workload.batch_samples * table.pooling_factor
        found[table.name] = TableDemand(lookups, expected_distinct(table.num_embeddings, lookups, table.exponent))
    return found


def measured_demand(workload: Workload, accesses: Accesses) -> dict[str, TableDemand]:
    """Means over the batches of accesses, which are taken to be of the workload's size.

    Raises:
        ValueError: no batch, or a table of the workload is not in them.
    """
    if not accesses.num_batches:
        raise ValueError("the accesses have no batch")
    missing = next((table.name for table in workload.tables if table.name not in accesses.tables), None)
    if missing is not None:
        raise ValueError(f"the accesses have no table {missing!r}; they have {', '.join(accesses.tables)}")
    batches, rate = accesses.all_batches, accesses.sampling_rate
    found = {}
    for table in workload.tables:
        own = of_table(accesses, accesses.tables.index(table.name))
        lookups = len(own.keys) / rate if own.all_lookups is None else sum(own.all_lookups)
        distinct = min(lookups, len(once_a_batch(own).keys) / rate)
        found[table.name] = TableDemand(lookups / batches, distinct / batches)
    return found


def traffic(shapes: Shapes, pieces: Sequence[Piece], demand: Mapping[str, TableDemand]) -> Traffic:
    """Of these pieces together.

    Rows: each id's weights are read and each bag written; in training each id's gradient is read, and each distinct
    row with its state is read and written. Ids go to each piece that has columns of their rows, results come from each
    piece: of a table divided by rows every part sends partial sums of all its bags.
    """
    rows = ids = outputs = 0.0
    for piece in pieces:
        lookups, distinct = (amount * shapes.row_share(piece) for amount in demand[shapes.table(piece).name])
        output = shapes.output_bytes(piece)
        moved = lookups * shapes.weight_bytes(piece) + output
        if shapes.workload.is_training:
            moved += lookups * FLOAT_BYTES * shapes.table(piece).embedding_dim
            moved += 2 * distinct * shapes.layout(piece).row_bytes
        rows, ids, outputs = rows + moved, ids + ID_BYTES * lookups, outputs + output
    return Traffic(rows, ids, outputs)


def row_rate(memory: Memory, name: str) -> float:
    """Bytes a second by rows at random, or in order where that is all that is known.

    Raises:
        ValueError: neither is.
    """
    rate = memory.row_bytes_per_s or memory.bytes_per_s
    if not rate:
        raise ValueError(f"{name} has no row_bytes_per_s and no bytes_per_s; give one")
    return rate


_LOOKUPS = ("hbm", "ddr", "cores")
ByPlace = Sequence[Sequence[Piece]]


class Cluster(NamedTuple):
    """Machines of one kind.

    Attributes:
        hosts: that compute, a step's samples being divided among their accelerators, or among them if they have none.
    """

    host: Host
    hosts: int

    @property
    def accelerators(self) -> int:
        """Of one host."""
        return len(self.host.accelerators)

    @property
    def devices(self) -> int:
        """Accelerators of all hosts."""
        return self.hosts * self.accelerators


class _Transfers(NamedTuple):
    """Bytes of the busiest link of each kind, both directions added, and how many transfers wait for another."""

    pcie: float = 0.0
    peer: float = 0.0
    network: float = 0.0
    pcie_turns: int = 0
    turns: int = 0

    def beside(self, other: "_Transfers") -> "_Transfers":
        return _Transfers(
            self.pcie + other.pcie, self.peer + other.peer, self.network + other.network,
            self.pcie_turns + other.pcie_turns, max(self.turns, other.turns),
        )  # fmt: skip


class _Work:
    """What a step moves of one tier, by place."""

    def __init__(self, shapes: Shapes, demand: Mapping[str, TableDemand], by_place: ByPlace, cluster: Cluster) -> None:
        self._shapes, self._demand, self._by_place, self._cluster = shapes, demand, by_place, cluster
        self._is_training = shapes.workload.is_training
        self._passes = 2 if self._is_training else 1
        """Results go one way, and in training gradients the other."""

    @functools.cached_property
    def _traffics(self) -> list[Traffic]:
        return [traffic(self._shapes, pieces, self._demand) for pieces in self._by_place]

    @functools.cached_property
    def _exchanged(self) -> list[float]:
        """Bytes, by place: ids, results and gradients."""
        return [each.id_bytes + self._passes * each.output_bytes for each in self._traffics]

    def lookups(self, tier: PlacedTier) -> list[ResourceLoad]:
        """Of the busiest device, host or server."""
        host = self._cluster.host
        row_bytes = max(each.row_bytes for each in self._traffics)
        if tier == "hbm":
            return [ResourceLoad("hbm", row_bytes / row_rate(host.accelerators[0].hbm, "hbm"), row_bytes, "bytes")]
        seconds = [self._core_seconds(pieces) for pieces in self._by_place]
        busiest = seconds.index(max(seconds))
        found = [ResourceLoad("ddr", row_bytes / row_rate(host.ddr, "ddr"), row_bytes, "bytes")]
        if seconds[busiest]:
            lookups = self._traffics[busiest].id_bytes / ID_BYTES
            found.append(ResourceLoad("cores", seconds[busiest], lookups, "lookups"))
        return found

    def _core_seconds(self, pieces: Sequence[Piece]) -> float:
        """Of all cores of a host, for lookups in these pieces and, in training, their updates."""
        shapes, host, nanoseconds = self._shapes, self._cluster.host, 0.0
        costs = host.costs
        for piece in pieces:
            lookups = self._demand[shapes.table(piece).name].lookups * shapes.row_share(piece)
            size = shapes.weight_bytes(piece)
            nanoseconds += lookups * (costs.pool_ns + costs.pool_ns_per_byte * size)
            if self._is_training:
                nanoseconds += lookups * (costs.update_ns + costs.update_ns_per_byte * size)
        return (nanoseconds * 1e-9 + costs.batch_us * 1e-6) / host.processor.cores

    def transfers(self, tier: PlacedTier) -> _Transfers:
        if tier == "hbm":
            return self._from_devices()
        hosts, exchanged = self._cluster.hosts, self._exchanged
        # Between hosts all to all. From servers everything: the busier of a server's link and a host's counts.
        network = max(exchanged) * (hosts - 1) / hosts if tier == "ddr" else max(*exchanged, sum(exchanged) / hosts)
        return _Transfers(network=network, turns=1 + self._passes).beside(self._to_accelerators())

    def _from_devices(self) -> _Transfers:
        """All to all: of what a device has for all samples, the others of its host take a part over peer links, and
        those of other hosts over the network. Ids come from the host that has the samples."""
        devices, own, exchanged = self._cluster.devices, self._cluster.accelerators, self._exchanged
        of_hosts = [sum(exchanged[first : first + own]) for first in range(0, devices, own)]
        return _Transfers(
            pcie=sum(each.id_bytes for each in self._traffics) / devices,
            peer=max(exchanged) * (own - 1) / devices,
            network=max(of_hosts) * (devices - own) / devices,
            pcie_turns=1,
            turns=1 + self._passes,
        )

    def _to_accelerators(self) -> _Transfers:
        """Results, once partial sums are added: 4 bytes a sample and column."""
        if not self._cluster.devices:
            return _Transfers()
        tables = {piece.table for pieces in self._by_place for piece in pieces}
        workload = self._shapes.workload
        columns = sum(workload.tables[index].embedding_dim for index in tables)
        pooled = float(FLOAT_BYTES) * workload.batch_samples * columns
        return _Transfers(pcie=self._passes * pooled / self._cluster.devices, pcie_turns=self._passes)


def step(
    shapes: Shapes, demand: Mapping[str, TableDemand], cluster: Cluster, placed: Mapping[PlacedTier, ByPlace]
) -> Step:
    """Of one batch.

    Args:
        placed: pieces by tier, and in it by device ("hbm"; those of a host are neighbours), host ("ddr") or server
            ("remote").

    Raises:
        ValueError: the host does not say a rate that is needed.
    """
    works = {tier: _Work(shapes, demand, by_place, cluster) for tier, by_place in placed.items() if any(by_place)}
    loads: list[ResourceLoad] = []
    moved = _model_transfers(shapes, cluster)
    for tier, work in works.items():
        loads += work.lookups(tier)
        moved = moved.beside(work.transfers(tier))
    loads += [*_transfer_loads(moved, cluster), *_model_load(shapes, cluster)]
    seconds = {load.resource: load.seconds for load in loads}
    lookups = max((seconds.pop(name) for name in _LOOKUPS if name in seconds), default=0.0)
    step_s = lookups + sum(seconds.values())
    largest = max(loads, key=lambda load: load.seconds)
    return Step(tuple(loads), step_s, largest.seconds, shapes.workload.batch_samples / step_s, largest.resource)


def _model_transfers(shapes: Shapes, cluster: Cluster) -> _Transfers:
    """Dense gradients are summed around a ring, within a host and between hosts: twice (n - 1) / n of their bytes."""
    if not shapes.workload.is_training:
        return _Transfers()
    size, own = FLOAT_BYTES * shapes.workload.dense_flops / FLOPS_PER_WEIGHT, max(1, cluster.accelerators)
    return _Transfers(peer=2 * size * (own - 1) / own, network=2 * size * (cluster.hosts - 1) / cluster.hosts)


def _transfer_loads(moved: _Transfers, cluster: Cluster) -> list[ResourceLoad]:
    host = cluster.host
    links = [("network", host.network, moved.network, moved.turns)]
    if host.accelerators:
        first = host.accelerators[0]
        links += [("pcie", first.pcie, moved.pcie, moved.pcie_turns), ("peer", first.peer, moved.peer, moved.turns)]
    return [
        ResourceLoad(name, size / link.bytes_per_s + turns * link.latency_us * 1e-6, size, "bytes")
        for name, link, size, turns in links
        if size
    ]


def _model_load(shapes: Shapes, cluster: Cluster) -> list[ResourceLoad]:
    workload, host = shapes.workload, cluster.host
    flops = workload.batch_samples * workload.dense_flops * (TRAINING_FLOPS if workload.is_training else 1)
    own = flops / (cluster.devices or cluster.hosts)
    speed = host.accelerators[0].flops if host.accelerators else host.processor.flops
    return [ResourceLoad("model", own / speed, own, "flops")] if flops else []
