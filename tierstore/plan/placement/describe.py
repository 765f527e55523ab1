"""Costs and plans as text for a terminal, in 100 columns."""

from typing import Final

from ...dist.plan import Plan, Sharding
from ...system.sizes import format_size
from ...system.terminal import columns_of
from ..report.words import duration, named
from ..workload import Workload
from .costs import ASKER, KINDS, OWNER, RankCosts, predict
from .demand import Demands
from .search import Found

_TABLES_SHOWN: Final = 40
_NAME_CHARACTERS: Final = 28


def describe_costs(costs: RankCosts) -> str:
    """What each amount of work costs, and how well that fits the steps that were timed."""
    rows = [("", *KINDS, "")]
    for name, meaning in (ASKER | OWNER).items():
        rows.append((f"  {name}", *(f"{1e9 * costs.seconds[kind][name]:,.3g}" for kind in KINDS), meaning))
    rows.append(("  mean error", *(f"{costs.errors[kind]:.0%}" for kind in KINDS), "of a step that was timed"))
    return "\n".join([costs.source, "", "Of a training step, ns by exchange", *columns_of(rows)])


def describe_placement(workload: Workload, found: Found, demand: Demands, costs: RankCosts) -> str:
    """What a step takes, what each rank has, and where each table is."""
    ranks = costs.world_size
    told, by_rows = (predict(workload, plan, demand, costs) for plan in (found.plan, _by_rows(workload, ranks)))
    lines = [
        f"{named(workload.name)} over {ranks} ranks: a step of its tables takes {duration(told.seconds)}, "
        f"{workload.batch_samples / told.seconds:,.0f} samples/s; {duration(by_rows.seconds)} without a plan, with all "
        "tables by rows"
    ]
    rows = [("  rank", "looks up", "room")]
    for rank, (served, size) in enumerate(zip(told.served, told.size_bytes, strict=True)):
        rows.append((f"  {rank}", f"{served:,.0f} rows", format_size(size)))
    lines += columns_of(rows, is_last_text=False)
    rows = [("  exchange", "columns", "takes")]
    for (kind, dim, parts), seconds in told.groups.items():
        rows.append((f"  {kind}", f"{dim}" if parts == 1 else f"{dim} / {parts}", duration(seconds)))
    lines += columns_of(rows, is_last_text=False)
    placed = [("  table", "rows", "columns", "size", "sharding", "exchange", "ranks")]
    for table in workload.tables[:_TABLES_SHOWN]:
        sharding = found.plan.tables[table.name]
        size = format_size(table.num_embeddings * workload.layout(table).row_bytes)
        shape = (f"{table.num_embeddings:,}", f"{table.embedding_dim}", size)
        where = (sharding.sharding_type, sharding.exchange, _ranks(sharding, ranks))
        placed.append((f"  {named(table.name, _NAME_CHARACTERS)}", *shape, *where))
    more = len(workload.tables) - _TABLES_SHOWN
    return "\n".join([*lines, *columns_of(placed), *([f"  and {more:,} more tables"] if more > 0 else [])])


def _by_rows(workload: Workload, ranks: int) -> Plan:
    """What ``open_sharded`` does without a plan."""
    return Plan(ranks, {table.name: Sharding("row_wise", tuple(range(ranks))) for table in workload.tables})


def _ranks(sharding: Sharding, ranks: int) -> str:
    return "all" if len(sharding.ranks) == ranks else ", ".join(map(str, sharding.ranks))
