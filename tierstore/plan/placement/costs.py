"""What a step over ranks takes, by what its lookups do; measured (``measure``), and predicted for any plan.

Tables that one lookup serves make a *group*: those of one kind of exchange, one number of columns and one number of
column ranges. Groups follow one another, and in a group the ranks wait for each other: ids go to the owners, owners
look rows up, the askers pool, gradients go to the owners, owners update. So a step takes the sum over groups of what an
asker's work takes and of what the busiest owner's takes. Ranks that share a host's cores take turns: owners take at
least the work of all of a host over its cores.

Each amount below costs so many seconds, found by non-negative least squares over timed steps.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ...dist.plan import Plan, Sharding
from ...kernels.arrays import Float64s
from ...settings.options import check_ranges, option
from ...settings.sections import converted
from ..json_file import plain, write_json
from ..measure.fit import solve_nonnegative
from ..workload import OptimizerName, TableShape, Workload
from .demand import Demands, TableDemand, shares_of

Kind = Literal["rows", "pooled", "data_parallel"]
KINDS: Final[tuple[Kind, ...]] = ("rows", "pooled", "data_parallel")
_VERSION: Final = 1

ASKER: Final = {
    "groups": "each group of tables, whatever its ids",
    "split_groups": "each whose rows are in several ranges of columns",
    "tables": "each table",
    "ids": "ids of a rank's batch",
    "id_columns": "the same, times columns",
    "rows": "distinct rows of a rank's batch",
    "row_columns": "the same, times columns",
    "split_rows": "distinct rows of a rank's batch, times ranges of columns, where there are several",
    "bag_columns": "bags that a rank gets from owners, times columns",
}
OF_GROUPS: Final = 2
"""The first amounts of an asker; a group has them as its tables do, and the sums of others."""
OWNER: Final = {
    "served": "rows that an owner looks up for all ranks; ids, where owners pool",
    "served_columns": "the same, times columns",
    "given_columns": "bags that an owner gives, times columns",
    "updated": "distinct rows that an owner updates",
    "updated_columns": "the same, times columns",
}


class Amounts(NamedTuple):
    """Of a group, or of one table in one.

    Attributes:
        asker: float64 [len(ASKER)], alike in all ranks.
        owners: float64 [ranks, len(OWNER)].
    """

    asker: Float64s
    owners: Float64s

    @classmethod
    def of_group(cls, tables: Iterable["Amounts"]) -> "Amounts":
        """Of all its tables."""
        asker, owners = zip(*tables, strict=True)
        found = np.sum(asker, axis=0)
        found[:OF_GROUPS] = np.max(asker, axis=0)[:OF_GROUPS]
        return cls(found, np.sum(owners, axis=0))


def kind_of(sharding: Sharding) -> Kind:
    """Of the lookups in a table that is sharded so."""
    return "data_parallel" if sharding.sharding_type == "data_parallel" else sharding.exchange


def group_of(table: TableShape, sharding: Sharding) -> tuple[Kind, int, int]:
    """Equal of tables that one lookup serves."""
    return kind_of(sharding), table.embedding_dim, _column_parts(sharding)


def _column_parts(sharding: Sharding) -> int:
    return len(sharding.ranks) if sharding.sharding_type == "column_wise" else 1


def _shares(sharding: Sharding, hot: Float64s, ranks: int) -> Float64s:
    """float64 [ranks], of what is asked of the table, that each rank owns."""
    found, owners = np.zeros(ranks), list(sharding.ranks)
    found[owners] = shares_of(hot, len(owners)) if sharding.sharding_type in ("row_wise", "table_row_wise") else 1.0
    return found


def amounts_of(table: TableShape, sharding: Sharding, demand: TableDemand, *, bags: float, ranks: int) -> Amounts:
    """Of one table.

    Args:
        bags: of a rank's batch.
    """
    kind, dim, parts = kind_of(sharding), table.embedding_dim, _column_parts(sharding)
    width, (ids, rows, all_rows, hot_ids, hot_rows) = dim // parts, demand
    served, given = np.zeros(ranks), np.zeros(ranks)
    asker = {"groups": 1.0, "tables": 1.0, "ids": ids}
    if kind == "pooled":
        served = ranks * ids * _shares(sharding, hot_ids, ranks)
        given[list(sharding.ranks)] = ranks * bags * width
        asker |= {"ids": ids * parts, "bag_columns": bags * width * len(sharding.ranks)}
    else:
        asker |= {"id_columns": ids * dim, "rows": rows, "row_columns": rows * dim}
        if parts > 1:
            asker |= {"split_groups": 1.0, "split_rows": rows * parts}
        if kind == "rows":
            served = ranks * rows * _shares(sharding, hot_rows, ranks)
    updated = all_rows * _shares(sharding, hot_rows, ranks)
    owners = np.stack([served, served * width, given, updated, updated * width], axis=1)
    return Amounts(np.array([asker.get(name, 0.0) for name in ASKER]), owners)


def amounts_evenly(*, dim: int, tables: float, bags: float, demand: TableDemand, ranks: int) -> Amounts:
    """Of a group of tables whose rows are over all ranks, and cross as rows.

    Args:
        bags: of a rank's batch, of all these tables, as the demand is.
    """
    shape = TableShape(name="all", embedding_dim=dim)
    found = amounts_of(shape, Sharding("row_wise", tuple(range(ranks))), demand, bags=bags, ranks=ranks)
    found.asker[list(ASKER).index("tables")] = tables
    return found


def busiest(work: Float64s, cores: int, local_ranks: int) -> Float64s:
    """float64 [...]: of work [ranks, ...], what the busiest rank has, and no less than a host's over its cores."""
    hosts = [work[first : first + local_ranks].sum(0) for first in range(0, len(work), local_ranks)]
    found: Float64s = np.maximum(work.max(0), np.stack(hosts).max(0) / cores)
    return found


def _table(*columns: tuple[str, Any, Any]) -> Any:
    """Of a file, whose figures are in their ranges."""
    return make_dataclass("table", columns, kw_only=True, namespace={"__post_init__": check_ranges})


def _figures(*names: str) -> Any:
    return _table(*((name, float, option(0.0, "", low=0)) for name in names))


_FILE: Final = _table(
    ("version", int, option(_VERSION, "", low=_VERSION, high=_VERSION)),
    ("optimizer", OptimizerName, "none"),
    ("seconds", _table(*((kind, _figures(*ASKER, *OWNER), None) for kind in KINDS)), None),
    ("errors", _figures(*KINDS), None),
    ("source", str, ""),
    *((name, int, option(1, "", low=1)) for name in ("world_size", "local_world_size", "cores")),
    *((name, float, option(0.0, "", low=0)) for name in ("reduce_us", "reduce_busy_us")),
)


class Probe(NamedTuple):
    """A step that was timed: its one group's kind and amounts, and seconds."""

    kind: Kind
    amounts: Amounts
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """Of steps over so many ranks.

    Attributes:
        world_size, local_world_size: ranks, and those of a host, as torchrun calls them. cores: of a host.
        optimizer: of the tables.
        seconds: by kind of exchange, then by amount (``ASKER``, ``OWNER``).
        errors: by kind, the mean relative error of the steps that they were found from.
        reduce_us: of averaging the gradients of a dense model over the ranks, beyond its own backward.
        reduce_busy_us: the same beside a thread that fetches rows all the time.
        source: where they come from.
    """

    world_size: int
    local_world_size: int
    cores: int
    optimizer: OptimizerName
    seconds: Mapping[Kind, Mapping[str, float]]
    errors: Mapping[Kind, float]
    source: str = ""
    reduce_us: float = 0.0
    reduce_busy_us: float = 0.0

    @classmethod
    def fitted(
        cls,
        probes: Sequence[Probe],
        *,
        cores: int,
        local_world_size: int,
        **others: Any,
    ) -> "RankCosts":
        """From steps of one group each; ``others``: fields as they are."""
        seconds, errors = dict[Kind, dict[str, float]](), dict[Kind, float]()
        for kind in KINDS:
            own = [probe for probe in probes if probe.kind == kind]
            times = np.array([probe.seconds for probe in own])
            amounts = np.stack(
                [np.append(each.amounts.asker, busiest(each.amounts.owners, cores, local_world_size)) for each in own]
            )
            matrix = amounts / times[:, None]  # relative errors count
            found = solve_nonnegative(matrix, np.ones(len(own)))
            seconds[kind] = dict(zip((*ASKER, *OWNER), found.tolist(), strict=True))
            errors[kind] = float(np.abs(matrix @ found - 1).mean())
        return cls(cores=cores, local_world_size=local_world_size, seconds=seconds, errors=errors, **others)

    def asker(self, kind: Kind) -> Float64s:
        """float64 [len(ASKER)]."""
        return np.array([self.seconds[kind][name] for name in ASKER])

    def owner(self, kind: Kind) -> Float64s:
        """float64 [len(OWNER)]."""
        return np.array([self.seconds[kind][name] for name in OWNER])

    def group_s(self, kind: Kind, amounts: Amounts) -> float:
        """Of a step's lookups and updates in a group."""
        owners = busiest(amounts.owners @ self.owner(kind), self.cores, self.local_world_size)
        return float(amounts.asker @ self.asker(kind) + owners)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write them as JSON; errors as of ``write_json``."""
        write_json({"version": _VERSION, **plain(self)}, path, force=force)

    @classmethod
    def load(cls, path: str | Path) -> "RankCosts":
        """Read what ``save`` wrote.

        Raises:
            OSError: it cannot be read. ValueError: it is something else; names the key and what is accepted.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            found: Any = converted(fields, _FILE, "costs of ranks", is_whole=True)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; tierstore plan measure-ranks writes costs of ranks") from None
        return cls(**{name: value for name, value in plain(found).items() if name != "version"})


class Predicted(NamedTuple):
    """Of a plan.

    Attributes:
        seconds: of a step of the tables: forward, backward and update.
        served: float64 [ranks], what each looks up in its own part: rows for all ranks; ids, where owners pool; of
            copied tables its own ids, and all ranks' rows to update them.
        size_bytes: float64 [ranks], of rows with their optimizer state.
        groups: seconds of each, by (kind, columns, column ranges).
    """

    seconds: float
    served: Float64s
    size_bytes: Float64s
    groups: Mapping[tuple[Kind, int, int], float]


def predict(workload: Workload, plan: Plan, demand: Demands, costs: RankCosts) -> Predicted:
    """What a step takes, without prefetch and with all rows in memory.

    Raises:
        ValueError: the plan lacks a table, or is for another number of ranks than the costs.
    """
    ranks = costs.world_size
    if plan.world_size != ranks:
        raise ValueError(f"the plan is for {plan.world_size} ranks and the costs are of {ranks}; measure them again")
    groups = dict[tuple[Kind, int, int], list[Amounts]]()
    served, size_bytes = np.zeros(ranks), np.zeros(ranks)
    for table, sharding in _planned(workload, plan):
        own = demand[table.name]
        one = amounts_of(table, sharding, own, bags=workload.batch_samples / ranks, ranks=ranks)
        group = group_of(table, sharding)
        groups.setdefault(group, []).append(one)
        served += own.ids + ranks * own.rows if group[0] == "data_parallel" else one.owners[:, 0]
        size_bytes += bytes_of(workload, table, sharding, ranks)
    seconds = {group: costs.group_s(group[0], Amounts.of_group(tables)) for group, tables in groups.items()}
    return Predicted(sum(seconds.values()), served, size_bytes, seconds)


def bytes_of(workload: Workload, table: TableShape, sharding: Sharding, ranks: int) -> Float64s:
    """float64 [ranks], of a table's rows with their optimizer state."""
    found = np.zeros(ranks)
    row_bytes = workload.layout(table).row_bytes
    for shard in sharding.shards(table.num_embeddings, table.embedding_dim):
        found[shard.rank] += shard.num_rows * row_bytes * shard.num_columns / table.embedding_dim
    return found


def _planned(workload: Workload, plan: Plan) -> Iterator[tuple[TableShape, Sharding]]:
    for table in workload.tables:
        if table.name not in plan.tables:
            raise ValueError(f"the plan has no table {table.name!r}")
        yield table, plan.tables[table.name]
