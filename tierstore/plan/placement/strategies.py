"""Where tables go: the strategies.

The four without SSD are those of B. Acun et al., Understanding Training Efficiency of Deep Learning Recommendation
Models at Scale (HPCA 2021): in GPU memory, in the host's memory, in that of remote servers, or the hottest in GPU
memory and the rest in the host's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ...config import require_choice, require_int
from ..host import Host
from ..workload import TableShape, Workload
from .on_ssd import place_on_ssd
from .plan import STRATEGIES, TIERS, PlacedPart, PlacedTier, PlacementPlan, Room, StoreModel, Strategy, TierUse
from .spread import Piece, Shapes, spread
from .steps import Cluster, TableDemand, expected_demand, step

__all__ = ["HOSTS_MAX", "compare", "hottest", "place"]

HOSTS_MAX: Final = 1 << 12
_UNLIMITED: Final = 1 << 62


def place(
    workload: Workload,
    host: Host,
    *,
    hosts: int = 1,
    strategy: Strategy,
    demand: Mapping[str, TableDemand] | None = None,
    servers: int | None = None,
    room: Room = Room(),  # noqa: B008 - frozen
    store_model: StoreModel | None = None,
) -> PlacementPlan:
    """Place a workload's tables on hosts of one kind.

    Args:
        hosts: that compute; the batch of a step is divided among them.
        demand: ids and distinct rows of each table in a step; default: by Zipf's law (``expected_demand``).
        servers: with "remote", further hosts that hold the tables; default: the fewest that do.
        store_model: what a step through tierstore's tiers takes; "ssd" needs it.

    Raises:
        ValueError: a wrong argument; a host without a rate that is needed. Tables that do not fit are no error: the
            plan says so.
    """
    require_choice(strategy, STRATEGIES, "strategy")
    require_int(hosts, "hosts", 1, HOSTS_MAX)
    if servers is not None:
        require_int(servers, "servers", 1, HOSTS_MAX)
    if strategy == "ssd":
        return place_on_ssd(workload, host, hosts=hosts, room=room, store_model=store_model)
    demand = expected_demand(workload) if demand is None else demand
    missing = next((table.name for table in workload.tables if table.name not in demand), None)
    if missing is not None:
        raise ValueError(f"demand says nothing of table {missing!r}")
    return _place(_Request(workload, host, hosts, strategy, demand, room, servers or 0))


def compare(
    workload: Workload,
    host: Host,
    *,
    hosts: int = 1,
    strategies: Sequence[Strategy] | None = None,
    demand: Mapping[str, TableDemand] | None = None,
    servers: int | None = None,
    room: Room = Room(),  # noqa: B008 - frozen
    store_model: StoreModel | None = None,
) -> list[PlacementPlan]:
    """Plans by time a sample, the fastest first; those that do not fit after those that do, then those that cannot run.

    Args:
        strategies: default: all, without "ssd" if there is no ``store_model``.
    """
    if strategies is None:
        strategies = [each for each in STRATEGIES if each != "ssd" or store_model is not None]
    demand = expected_demand(workload) if demand is None else demand
    shared = {"hosts": hosts, "demand": demand, "servers": servers, "room": room, "store_model": store_model}
    plans = [place(workload, host, strategy=each, **shared) for each in strategies]  # type: ignore[arg-type]
    return sorted(plans, key=_rank)


def _rank(plan: PlacementPlan) -> tuple[bool, bool, float]:
    return not plan.fits, plan.step is None, 0.0 if plan.step is None else -plan.step.samples_per_s


def hottest(workload: Workload, demand: Mapping[str, TableDemand], room_bytes: float) -> tuple[TableShape, ...]:
    """The tables that go to the faster memory: by ids a byte, each that still has room; in the workload's order."""
    sizes = {table.name: table.num_embeddings * workload.layout(table).row_bytes for table in workload.tables}
    chosen, left = set(), room_bytes
    for name in sorted(sizes, key=lambda name: -demand[name].lookups / sizes[name]):
        if sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    return tuple(table for table in workload.tables if table.name in chosen)


class _Request(NamedTuple):
    """A strategy without SSD, to be carried out; ``servers`` is 0 if they are to be as few as do."""

    workload: Workload
    host: Host
    hosts: int
    strategy: Strategy
    demand: Mapping[str, TableDemand]
    room: Room
    servers: int

    def budget(self, tier: PlacedTier) -> int:
        """Bytes for rows of one place."""
        if tier == "hbm":
            smallest = min((each.hbm.capacity_bytes for each in self.host.accelerators), default=0.0)
            return int(self.room.hbm_share * smallest)
        return int(self.room.ddr_share * self.host.ddr.capacity_bytes)

    def places(self, tier: PlacedTier) -> int:
        return {"hbm": self.hosts * len(self.host.accelerators), "ddr": self.hosts, "remote": self.servers}[tier]

    def hosts_needed(self) -> int | None:
        """By bytes alone."""
        of_devices = len(self.host.accelerators) * self.budget("hbm")
        of_host = self.budget("ddr")
        each = {"gpu": of_devices, "hybrid": of_devices + of_host}.get(self.strategy, of_host)
        return max(1, -(-self.workload.table_bytes // each)) if each else None


class _Held(NamedTuple):
    """One tier's tables on its places."""

    by_place: list[list[Piece]]
    use: TierUse
    is_crowded: bool


def _place(request: _Request) -> PlacementPlan:
    tiers = TIERS[request.strategy]
    plan = PlacementPlan(
        strategy=request.strategy, workload=request.workload.name, host=request.host.name, hosts=request.hosts,
        servers=request.servers, missing_bytes=float(request.workload.table_bytes),
    )  # fmt: skip
    if "hbm" in tiers and not request.host.accelerators:
        return dataclasses.replace(plan, why="the host has no accelerator")
    if request.strategy == "remote" and not request.servers:
        request = request._replace(servers=_fewest_servers(request))
    shapes = Shapes(request.workload)
    held = {tier: _hold(request, shapes, tier, tables) for tier, tables in _divided(request).items()}
    cluster = Cluster(request.host, request.hosts)
    crowded = [tier for tier in tiers if held[tier].is_crowded]
    return dataclasses.replace(
        plan,
        servers=request.servers,
        parts=tuple(part for tier in tiers for part in _parts(shapes, tier, held[tier])),
        tiers=tuple(held[tier].use for tier in tiers),
        fits=not crowded,
        missing_bytes=-sum(min(0.0, held[tier].use.free_bytes) for tier in tiers),
        hosts_needed=request.hosts_needed(),
        step=step(shapes, request.demand, cluster, {tier: held[tier].by_place for tier in tiers}),
        why=f"no room in {' and '.join(crowded)}" if crowded else "",
    )


def _fewest_servers(request: _Request) -> int:
    needed = request.hosts_needed()
    if needed is None or needed > HOSTS_MAX:
        return 1
    shapes, tables = Shapes(request.workload), request.workload.tables
    # A server's rest may be less than a row.
    counts = range(needed, HOSTS_MAX)
    held = (_hold(request._replace(servers=count), shapes, "remote", tables) for count in counts)
    return next((len(each.by_place) for each in held if not each.is_crowded), needed)


def _divided(request: _Request) -> dict[PlacedTier, tuple[TableShape, ...]]:
    """Which tables go to which tier."""
    tables = request.workload.tables
    if request.strategy != "hybrid":
        return {TIERS[request.strategy][0]: tables}
    hot = hottest(request.workload, request.demand, request.places("hbm") * request.budget("hbm"))
    return {"hbm": hot, "ddr": tuple(table for table in tables if table not in hot)}


def _hold(request: _Request, shapes: Shapes, tier: PlacedTier, tables: tuple[TableShape, ...]) -> _Held:
    """Tables over the places of a tier; as if there were room, where there is none."""
    places, budget = request.places(tier), request.budget(tier)
    indexes = [index for index, table in enumerate(request.workload.tables) if table in tables]
    used = sum(table.num_embeddings * request.workload.layout(table).row_bytes for table in tables)
    by_place = spread(shapes, indexes, places, budget) if used <= places * budget else None
    is_crowded = by_place is None
    by_place = by_place or spread(shapes, indexes, places, _UNLIMITED) or []
    return _Held(by_place, TierUse(tier, float(places) * budget, float(used)), is_crowded)


def _parts(shapes: Shapes, tier: PlacedTier, held: _Held) -> list[PlacedPart]:
    return [
        PlacedPart(
            shapes.table(piece).name, tier, place, piece.first_row, piece.num_rows, 0,
            shapes.table(piece).embedding_dim, shapes.size_bytes(piece),
        )
        for place, pieces in enumerate(held.by_place)
        for piece in pieces
    ]  # fmt: skip
