"""Where tables go: the strategies.

The four without SSD are those of B. Acun et al., Understanding Training Efficiency of Deep Learning Recommendation
Models at Scale (HPCA 2021): in GPU memory, in the host's memory, in that of remote servers, or the hottest in GPU
memory and the rest in the host's. By the last, tierstore's own, all rows are on SSD, and those in use in memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from ...config import require_choice, require_int
from ...settings.options import option
from ..demand import Demand
from ..host import Checked, Host
from ..model import predict
from ..prediction import Prediction, Setup, TierName
from ..tiers import file_of
from ..workload import TableShape, Workload
from .spread import Piece, spread
from .steps import Demands, Step, expected_demand, step

Strategy = Literal["gpu", "host", "remote", "hybrid", "ssd"]
_TIERS: Final[dict[Strategy, tuple[TierName, ...]]] = {
    "gpu": ("hbm",),
    "host": ("ddr",),
    "remote": ("remote",),
    "hybrid": ("hbm", "ddr"),
    "ssd": ("hbm", "ddr", "ssd"),
}
"""Which memory a strategy uses, fastest first."""
STRATEGIES: Final = tuple(_TIERS)
StoreModel = Callable[[float, float], Prediction]
"""A step through tierstore's own tiers, by the budgets of a host's memory and of an accelerator's; each host has an
equal part of the rows. ValueError: it cannot be, and why."""
_HOSTS_MAX: Final = 1 << 12
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Room(Checked):
    """Which share of each memory may hold rows; the rest is the model's, the system's, and for batches under way."""

    hbm_share: float = option(0.8, "of an accelerator's memory", low=0, high=1)
    ddr_share: float = option(0.8, "of a host's memory", low=0, high=1)
    ssd_share: float = option(0.95, "of the drives; files are reckoned at their largest", low=0, high=1)


class PlacedPart(NamedTuple):
    """Rows and columns of a table, and where they are.

    Attributes:
        place: of the tier: the number of the accelerator, host or server, over all hosts.
    """

    table: str
    tier: TierName
    place: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    size_bytes: int


class TierUse(NamedTuple):
    """Bytes of one tier, of all hosts together.

    Attributes:
        capacity_bytes: that rows may take.
        free_bytes: below 0 if they do not fit.
    """

    tier: TierName
    capacity_bytes: float
    used_bytes: float
    free_bytes: float

    @classmethod
    def of(cls, tier: TierName, capacity_bytes: float, used_bytes: float) -> "TierUse":
        return cls(tier, capacity_bytes, used_bytes, capacity_bytes - used_bytes)


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """One strategy.

    Attributes:
        workload, host: their names.
        hosts: machines that compute. servers: others of the same make that hold tables, with "remote".
        parts: what is where; as it would be with enough memory, if it does not fit.
        tiers: how full each memory is.
        fits: whether every device and host has room.
        missing_bytes: by how much rows exceed the room; 0 if they do not.
        hosts_needed: how many hosts (with "remote", servers) would do, by bytes; None if no number.
        step: as it would be with enough memory, if it does not fit; None if it cannot run at all.
        why: what is in the way, if something is.
    """

    strategy: Strategy
    workload: str
    host: str
    hosts: int
    servers: int = 0
    parts: tuple[PlacedPart, ...] = ()
    tiers: tuple[TierUse, ...] = ()
    fits: bool = False
    missing_bytes: float = 0.0
    hosts_needed: int | None = None
    step: Step | None = None
    why: str = ""


def compare(
    workload: Workload,
    host: Host,
    *,
    hosts: int = 1,
    strategies: Sequence[Strategy] = STRATEGIES,
    demand: Demands | None = None,
    servers: int | None = None,
    room: Room = Room(),
    store_model: StoreModel | None = None,
) -> list[PlacementPlan]:
    """Plans by time a sample, the fastest first; those that do not fit after those that do, then those that cannot run.

    Arguments and errors are as of ``place``.
    """
    demand = expected_demand(workload) if demand is None else demand
    plans = [
        place(
            workload, host, hosts=hosts, strategy=each, demand=demand, servers=servers, room=room,
            store_model=store_model,
        )
        for each in strategies
    ]  # fmt: skip
    return sorted(plans, key=_rank)


def _rank(plan: PlacementPlan) -> tuple[bool, bool, float]:
    return not plan.fits, plan.step is None, 0.0 if plan.step is None else -plan.step.samples_per_s


def place(
    workload: Workload,
    host: Host,
    *,
    hosts: int = 1,
    strategy: Strategy,
    demand: Demands | None = None,
    servers: int | None = None,
    room: Room = Room(),
    store_model: StoreModel | None = None,
) -> PlacementPlan:
    """Place a workload's tables on hosts of one kind.

    Args:
        hosts: that compute; the batch of a step is divided among them.
        demand: ids and distinct rows of each table in a step; default: by Zipf's law (``expected_demand``).
        servers: with "remote", further hosts that hold the tables; default: the fewest that do.
        store_model: with "ssd", what a step through the tiers takes; default: ``planned_store``.

    Raises:
        ValueError: a wrong argument; a host without a rate that is needed. Tables that do not fit are no error: the
            plan says so.
    """
    require_choice(strategy, STRATEGIES, "strategy")
    require_int(hosts, "hosts", 1, _HOSTS_MAX)
    if servers is not None:
        require_int(servers, "servers", 1, _HOSTS_MAX)
    cluster = _Cluster(workload, host, hosts, strategy, room, servers or 0)
    if strategy == "ssd":
        return _on_ssd(cluster, planned_store(workload, host, hosts) if store_model is None else store_model)
    return _in_memory(cluster, expected_demand(workload) if demand is None else demand)


class _Cluster(NamedTuple):
    """What a strategy has; ``servers`` is 0 if they are to be as few as do."""

    workload: Workload
    host: Host
    hosts: int
    strategy: Strategy
    room: Room
    servers: int

    def plan(self) -> PlacementPlan:
        """That nothing is known of yet."""
        return PlacementPlan(
            strategy=self.strategy, workload=self.workload.name, host=self.host.name, hosts=self.hosts,
            servers=self.servers,
        )  # fmt: skip

    def room_bytes(self, tier: TierName) -> float:
        """For rows, of one place."""
        if tier == "hbm":
            smallest = min((each.hbm.capacity_bytes for each in self.host.accelerators), default=0.0)
            return self.room.hbm_share * smallest
        return self.room.ddr_share * self.host.ddr.capacity_bytes

    def places(self, tier: TierName) -> int:
        return {"hbm": self.hosts * len(self.host.accelerators), "ddr": self.hosts, "remote": self.servers}[tier]

    def hosts_needed(self) -> int | None:
        """By bytes alone."""
        of_devices = len(self.host.accelerators) * int(self.room_bytes("hbm"))
        of_host = int(self.room_bytes("ddr"))
        each = {"gpu": of_devices, "hybrid": of_devices + of_host}.get(self.strategy, of_host)
        return max(1, -(-self.workload.table_bytes // each)) if each else None


# In memory


class _Held(NamedTuple):
    """One tier's tables on its places."""

    by_place: list[list[Piece]]
    use: TierUse
    is_crowded: bool


def _in_memory(cluster: _Cluster, demand: Demands) -> PlacementPlan:
    tiers = _TIERS[cluster.strategy]
    if "hbm" in tiers and not cluster.host.accelerators:
        missing = float(cluster.workload.table_bytes)
        return replace(cluster.plan(), missing_bytes=missing, why="the host has no accelerator")
    if cluster.strategy == "remote" and not cluster.servers:
        cluster = cluster._replace(servers=_fewest_servers(cluster))
    held = {tier: _hold(cluster, tier, tables) for tier, tables in _divided(cluster, demand).items()}
    by_tier = {tier: held[tier].by_place for tier in tiers}
    crowded = [tier for tier in tiers if held[tier].is_crowded]
    return replace(
        cluster.plan(),
        parts=tuple(
            PlacedPart(
                piece.table.name, tier, place, piece.first_row, piece.num_rows, 0, piece.table.embedding_dim,
                piece.size_bytes,
            )
            for tier, by_place in by_tier.items()
            for place, pieces in enumerate(by_place)
            for piece in pieces
        ),
        tiers=tuple(held[tier].use for tier in tiers),
        fits=not crowded,
        missing_bytes=-sum(min(0.0, held[tier].use.free_bytes) for tier in tiers),
        hosts_needed=cluster.hosts_needed(),
        step=step(cluster.workload, cluster.host, cluster.hosts, demand, by_tier),
        why=f"no room in {' and '.join(crowded)}" if crowded else "",
    )  # fmt: skip


def _fewest_servers(cluster: _Cluster) -> int:
    needed = cluster.hosts_needed()
    if needed is None or needed > _HOSTS_MAX:
        return 1
    # A server's rest may be less than a row.
    counts = range(needed, _HOSTS_MAX)
    held = (_hold(cluster._replace(servers=count), "remote", cluster.workload.tables) for count in counts)
    return next((len(each.by_place) for each in held if not each.is_crowded), needed)


def _divided(cluster: _Cluster, demand: Demands) -> dict[TierName, tuple[TableShape, ...]]:
    """Which tables go to which tier. With two, to the faster one by ids a byte, each that still has room."""
    workload, (first, *_) = cluster.workload, _TIERS[cluster.strategy]
    if cluster.strategy != "hybrid":
        return {first: workload.tables}
    sizes = {table: table.num_embeddings * workload.layout(table).row_bytes for table in workload.tables}
    hot, left = set(), cluster.places("hbm") * int(cluster.room_bytes("hbm"))
    for table in sorted(sizes, key=lambda table: -demand[table.name].lookups / sizes[table]):
        if sizes[table] <= left:
            hot.add(table)
            left -= sizes[table]
    return {
        "hbm": tuple(table for table in workload.tables if table in hot),
        "ddr": tuple(table for table in workload.tables if table not in hot),
    }


def _hold(cluster: _Cluster, tier: TierName, tables: tuple[TableShape, ...]) -> _Held:
    """Tables over the places of a tier; as if there were room, where there is none."""
    workload, places, budget = cluster.workload, cluster.places(tier), int(cluster.room_bytes(tier))
    indexes = [index for index, table in enumerate(workload.tables) if table in tables]
    used = sum(table.num_embeddings * workload.layout(table).row_bytes for table in tables)
    by_place = spread(workload, indexes, places, budget) if used <= places * budget else None
    is_crowded = by_place is None
    by_place = by_place or spread(workload, indexes, places, _UNLIMITED) or []
    return _Held(by_place, TierUse.of(tier, float(places) * budget, float(used)), is_crowded)


# On SSD


def planned_store(workload: Workload, host: Host, hosts: int, policy: str = "auto") -> StoreModel:
    """``predict`` with the demand that follows from the workload alone."""

    def model(ddr_bytes: float, hbm_bytes: float) -> Prediction:
        setup = Setup(
            workload=workload, host=host, hosts=hosts, ddr_bytes=ddr_bytes, hbm_bytes=hbm_bytes, policy=policy,
            threads=host.processor.cores,
        )  # fmt: skip
        return predict(setup, Demand.analytic(workload, policy))

    return model


def _on_ssd(cluster: _Cluster, store_model: StoreModel) -> PlacementPlan:
    """Each host has an equal part of the rows of every table on its drives, and caches in its memories."""
    workload, host, hosts = cluster.workload, cluster.host, cluster.hosts
    drives = cluster.room.ssd_share * sum(each.capacity_bytes for each in host.storage)
    used = float(hosts * stored_bytes(workload, hosts))
    on_drives = TierUse.of("ssd", hosts * drives, used)
    plan = replace(
        cluster.plan(),
        servers=0,
        parts=tuple(_equal_parts(workload, hosts)),
        tiers=(on_drives,),
        missing_bytes=max(0.0, -on_drives.free_bytes),
        hosts_needed=int(-(-stored_bytes(workload, 1) // drives)) if drives else None,
    )
    if plan.missing_bytes:
        return replace(plan, why="no room in ssd" if drives else "the host has no drive")
    ddr, hbm = cluster.room_bytes("ddr"), cluster.room_bytes("hbm")
    try:
        prediction = store_model(ddr, hbm)
    except ValueError as error:
        return replace(plan, why=str(error))
    whole, on_devices = float(workload.table_bytes), hosts * len(host.accelerators) * hbm
    caches = [TierUse.of("hbm", on_devices, min(on_devices, whole))] if on_devices else []
    caches.append(TierUse.of("ddr", hosts * ddr, min(hosts * ddr, whole)))
    overlapped = max((load.seconds for load in prediction.loads), default=prediction.step_s)
    found = Step(prediction.loads, prediction.step_s, overlapped, prediction.samples_per_s, prediction.bottleneck)
    return replace(plan, fits=True, tiers=(*caches, on_drives), step=found)


def stored_bytes(workload: Workload, hosts: int) -> int:
    """What the file of one host's rows takes at most."""
    files = (file_of(workload.layout(table), -(-table.num_embeddings // hosts), workload) for table in workload.tables)
    return math.ceil(sum(file.bytes for file in files))


def _equal_parts(workload: Workload, hosts: int) -> Iterator[PlacedPart]:
    for table in workload.tables:
        row_bytes, total = workload.layout(table).row_bytes, table.num_embeddings
        for host in range(hosts):
            begin, end = total * host // hosts, total * (host + 1) // hosts
            if end > begin:
                size = (end - begin) * row_bytes
                yield PlacedPart(table.name, "ssd", host, begin, end - begin, 0, table.embedding_dim, size)
