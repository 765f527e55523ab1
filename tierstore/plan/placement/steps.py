"""What a step takes where tables lie in the memories of devices, hosts and servers: bytes over rates.

The lookups of a batch, the transfers of their results and the model follow one another, as each needs what the one
before gives; lookups in different memories go on side by side.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..host import Host, Link
from ..prediction import ResourceLoad
from .plan import PlacedTier, Step
from .shapes import Piece, Shapes
from .traffic import TableDemand, Traffic, core_seconds, dense_bytes, dense_flops, row_rate, traffic

__all__ = ["Cluster", "step"]

_LOOKUPS = ("hbm", "ddr", "cores")
ByPlace = Sequence[Sequence[Piece]]


class Cluster(NamedTuple):
    """Machines of one kind.

    Attributes:
        hosts: that compute, a step's samples being divided among their accelerators, or among them if they have none.
        servers: others that hold tables.
    """

    host: Host
    hosts: int
    servers: int

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

    def __add__(self, other: "_Transfers") -> "_Transfers":  # type: ignore[override]
        return _Transfers(
            self.pcie + other.pcie, self.peer + other.peer, self.network + other.network,
            self.pcie_turns + other.pcie_turns, max(self.turns, other.turns),
        )  # fmt: skip


class _Work(NamedTuple):
    """Of one tier: by place, what a step moves."""

    shapes: Shapes
    demand: Mapping[str, TableDemand]
    by_place: ByPlace

    @property
    def traffics(self) -> list[Traffic]:
        return [traffic(self.shapes, pieces, self.demand) for pieces in self.by_place]

    @property
    def passes(self) -> int:
        """Results go one way, and in training gradients the other."""
        return 2 if self.shapes.workload.is_training else 1

    def exchanged(self) -> list[float]:
        """Bytes, by place: ids, results and gradients."""
        return [each.id_bytes + self.passes * each.output_bytes for each in self.traffics]

    def pooled_bytes(self) -> float:
        """Of the results once partial sums are added: 4 bytes a sample and column."""
        tables = {piece.table for pieces in self.by_place for piece in pieces}
        workload = self.shapes.workload
        return 4.0 * workload.batch_samples * sum(workload.tables[index].embedding_dim for index in tables)


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
    works = {tier: _Work(shapes, demand, by_place) for tier, by_place in placed.items() if any(by_place)}
    loads: list[ResourceLoad] = []
    moved = _model_transfers(shapes, cluster)
    for tier, work in works.items():
        loads += _lookup_loads(tier, work, cluster)
        moved += _TRANSFERS[tier](work, cluster)
    loads += _transfer_loads(moved, cluster)
    loads += _model_load(shapes, cluster)
    return _in_turn(loads, shapes.workload.batch_samples)


def _in_turn(loads: Sequence[ResourceLoad], batch_samples: int) -> Step:
    seconds = {load.resource: load.seconds for load in loads}
    lookups = max((seconds.pop(name) for name in _LOOKUPS if name in seconds), default=0.0)
    step_s = lookups + sum(seconds.values())
    largest = max(loads, key=lambda load: load.seconds)
    return Step(tuple(loads), step_s, largest.seconds, batch_samples / step_s, largest.resource)


def _lookup_loads(tier: PlacedTier, work: _Work, cluster: Cluster) -> list[ResourceLoad]:
    host = cluster.host
    row_bytes = max(each.row_bytes for each in work.traffics)
    if tier == "hbm":
        return [ResourceLoad("hbm", row_bytes / row_rate(host.accelerators[0].hbm, "hbm"), row_bytes, "bytes")]
    seconds = [core_seconds(host, work.shapes, pieces, work.demand) for pieces in work.by_place]
    busiest = seconds.index(max(seconds))
    found = [ResourceLoad("ddr", row_bytes / row_rate(host.ddr, "ddr"), row_bytes, "bytes")]
    if seconds[busiest]:
        lookups = work.traffics[busiest].id_bytes / 8
        found.append(ResourceLoad("cores", seconds[busiest], lookups, "lookups"))
    return found


def _from_devices(work: _Work, cluster: Cluster) -> _Transfers:
    """All to all: of what a device has for all samples, the others of its host take a part over peer links, and those
    of other hosts over the network. Ids come from the host that has the samples."""
    devices, own = cluster.devices, cluster.accelerators
    exchanged = work.exchanged()
    of_hosts = [sum(exchanged[first : first + own]) for first in range(0, devices, own)]
    return _Transfers(
        pcie=sum(each.id_bytes for each in work.traffics) / devices,
        peer=max(exchanged) * (own - 1) / devices,
        network=max(of_hosts) * (devices - own) / devices,
        pcie_turns=1,
        turns=1 + work.passes,
    )


def _from_hosts(work: _Work, cluster: Cluster) -> _Transfers:
    """All to all between hosts; what the samples of an accelerator need goes to it."""
    hosts = cluster.hosts
    return _Transfers(network=max(work.exchanged()) * (hosts - 1) / hosts, turns=1 + work.passes) + _to_accelerators(
        work, cluster
    )


def _from_servers(work: _Work, cluster: Cluster) -> _Transfers:
    """Everything over the network; the busier of a server's link and a host's counts."""
    exchanged = work.exchanged()
    network = max(*exchanged, sum(exchanged) / cluster.hosts)
    return _Transfers(network=network, turns=1 + work.passes) + _to_accelerators(work, cluster)


def _to_accelerators(work: _Work, cluster: Cluster) -> _Transfers:
    if not cluster.devices:
        return _Transfers()
    return _Transfers(pcie=work.passes * work.pooled_bytes() / cluster.devices, pcie_turns=work.passes)


_TRANSFERS = {"hbm": _from_devices, "ddr": _from_hosts, "remote": _from_servers}


def _model_transfers(shapes: Shapes, cluster: Cluster) -> _Transfers:
    """Dense gradients are summed around a ring, within a host and between hosts: twice (n - 1) / n of their bytes."""
    if not shapes.workload.is_training:
        return _Transfers()
    size, own = dense_bytes(shapes.workload), max(1, cluster.accelerators)
    return _Transfers(peer=2 * size * (own - 1) / own, network=2 * size * (cluster.hosts - 1) / cluster.hosts)


def _transfer_loads(moved: _Transfers, cluster: Cluster) -> list[ResourceLoad]:
    host = cluster.host
    links: list[tuple[str, Link, float, int]] = [("network", host.network, moved.network, moved.turns)]
    if host.accelerators:
        first = host.accelerators[0]
        links += [("pcie", first.pcie, moved.pcie, moved.pcie_turns), ("peer", first.peer, moved.peer, moved.turns)]
    return [
        ResourceLoad(name, size / link.bytes_per_s + turns * link.latency_us * 1e-6, size, "bytes")
        for name, link, size, turns in links
        if size
    ]


def _model_load(shapes: Shapes, cluster: Cluster) -> list[ResourceLoad]:
    flops, host = dense_flops(shapes.workload), cluster.host
    if not flops:
        return []
    if cluster.devices:
        own = flops / cluster.devices
        return [ResourceLoad("model", own / host.accelerators[0].flops, own, "flops")]
    own = flops / cluster.hosts
    return [ResourceLoad("model", own / host.processor.flops, own, "flops")]
