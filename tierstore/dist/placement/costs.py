"""What a step over ranks takes, by the work in it; each amount of work costs what ``measure`` found.

Tables of one kind of exchange, one number of columns and one of column ranges make a *group*, which one lookup serves.
Groups run one after another, and in a group the ranks wait for each other. So a step takes, summed over groups, the
work of the busiest rank: what it requests, which is alike on all ranks, and what it owns. Ranks of one host share its
cores, so a group takes at least what a host's owners do in total over its cores.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ...config import TableConfig
from ...kernels.arrays import Float64s
from ...optim.configs import RuleName
from ...settings.sections import Checked, described, option
from ...system.checks import excerpt
from ...system.files import write_text
from ...trace import Trace
from ..plan import Sharding

_RANGES: Final = 64
_EVENLY: Final = np.ones(1)
_SOLVER_STEPS: Final = 100
Kind = Literal["rows", "pooled", "data_parallel"]
KINDS: Final[tuple[Kind, ...]] = ("rows", "pooled", "data_parallel")


class TableDemand(NamedTuple):
    """Of one table in a step, on average: ids of a rank's batch, distinct ones of it, and of all ranks' batches; and
    how the first two are divided among equal ranges of the table's rows, float64 [ranges] of any sum."""

    ids: float = 0.0
    rows: float = 0.0
    all_rows: float = 0.0
    hot_ids: Float64s = _EVENLY
    hot_rows: Float64s = _EVENLY


class Demand(NamedTuple):
    """Of a step over several ranks: samples of a rank's batch, and by name the tables that are looked up."""

    samples: float
    tables: Mapping[str, TableDemand]


def shares_of(hot: Float64s, count: int) -> Float64s:
    """float64 [count]: the shares of the first, second... of ``count`` equal ranges of a table's rows."""
    known = np.append(0.0, hot.cumsum())
    places = np.linspace(0, len(hot), count + 1)
    found: Float64s = np.diff(np.interp(places, np.arange(len(known)), known)) / max(known[-1], 1e-300)
    return found


def demand_of(trace: Trace, tables: Sequence[TableConfig], ranks: int) -> Demand:
    """Means over a trace's batches, each the batch of all ranks: rank r has its r-th equal part.

    Tables are found by name; others of the trace are left out. ValueError: a row that its table lacks.
    """
    bounds, num_rows = trace.batch_bounds, {table.name: table.num_embeddings for table in tables}
    # A recording of sampled rows leaves out batches of which it has none.
    batches = trace.all_batches or max(len(bounds) - 1, round(trace.num_samples / trace.batch_samples), 1)
    weight, found = batches * trace.sampling_rate, dict[str, TableDemand]()
    for index, (name, table) in enumerate(trace.tables.items()):
        if name not in num_rows:
            continue
        if table.ids.max(initial=-1) >= num_rows[name]:
            raise ValueError(
                f"table {excerpt(name)} has {num_rows[name]:,} rows, and the trace looks up row {table.ids.max():,}; "
                "give the tables that the trace is of"
            )
        ids = len(table.ids) / weight if trace.all_lookups is None else trace.all_lookups[index] / batches
        hot_ids, hot_rows = np.zeros(_RANGES), np.zeros(_RANGES)
        all_rows = 0
        for first, last in itertools.pairwise(bounds.tolist()):
            all_rows += len(np.unique(table.ids[table.offsets[first] : table.offsets[last]]))
            # A rank has an equal part of the samples; of the ids, where an entry is a whole batch.
            if last - first >= ranks:
                cuts = table.offsets[np.arange(ranks + 1) * (last - first) // ranks + first]
            else:
                start, stop = table.offsets[[first, last]]
                cuts = np.arange(ranks + 1) * (stop - start) // ranks + start
            for own in np.split(table.ids, cuts)[1:-1]:
                for hot, rows in ((hot_ids, own), (hot_rows, np.unique(own))):
                    hot += np.bincount(rows * _RANGES // num_rows[name], minlength=_RANGES)
        rows_of_ranks = min(ids, hot_rows.sum() / weight)
        found[name] = TableDemand(ids / ranks, rows_of_ranks / ranks, min(ids, all_rows / weight), hot_ids, hot_rows)
    return Demand(trace.batch_samples / ranks, found)


def _work(text: str) -> Any:
    return option(0.0, text, low=0)


@dataclass(frozen=True, kw_only=True)
class Seconds(Checked):
    """Of each amount of work of one kind of exchange."""

    groups: float = _work("each group of tables, whatever its ids")
    split_groups: float = _work("each group whose rows are in several ranges of columns")
    tables: float = _work("each table")
    ids: float = _work("ids of a rank's batch")
    id_columns: float = _work("the same, times columns")
    rows: float = _work("distinct rows of a rank's batch")
    row_columns: float = _work("the same, times columns")
    split_rows: float = _work("distinct rows times ranges of columns, where there are several")
    bag_columns: float = _work("bags that a rank gets from owners, times columns")
    served: float = _work("owner: rows that it looks up for all ranks; ids, where owners pool")
    served_columns: float = _work("the same, times columns")
    given_columns: float = _work("owner: bags that it gives, times columns")
    updated: float = _work("owner: distinct rows that it updates")
    updated_columns: float = _work("the same, times columns")


_NAMES: Final = tuple(each.name for each in fields(Seconds))
AMOUNTS: Final = _NAMES[2:]
"""Names of what a rank does for a table; the first two costs are a group's."""
_OWNED: Final = AMOUNTS.index("served")
"""Amounts from here on are an owner's; those before are a requester's, alike on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """By kind of exchange."""

    rows: Seconds
    pooled: Seconds
    data_parallel: Seconds


@dataclass(frozen=True, kw_only=True)
class Errors(Checked):
    """Mean relative errors of the time of steps, by kind of exchange."""

    rows: float = _work("where rows cross")
    pooled: float = _work("where pooled bags cross")
    data_parallel: float = _work("where all ranks have all rows")


class Group(NamedTuple):
    """What tables have in common that one lookup serves: kind of exchange, columns, and ranges of columns."""

    kind: Kind
    dim: int
    parts: int


def group_of(sharding: Sharding, dim: int) -> Group:
    """Of a table with so many columns."""
    kind: Kind = "data_parallel" if sharding.sharding_type == "data_parallel" else sharding.exchange
    return Group(kind, dim, sharding.parts)


def amounts_of(
    sharding: Sharding, dim: int, demand: TableDemand, *, bags: float, ranks: int, tables: float = 1.0
) -> Float64s:
    """Work of each rank for one table, or several alike, whose demand is of all: float64 [ranks, 12], in the order of
    ``AMOUNTS``. ``bags``: of a rank's batch."""
    (kind, _, parts), owners = group_of(sharding, dim), list(sharding.ranks)
    width, ranges = dim // parts, 1 if kind == "data_parallel" else len(owners) // parts
    of_ids, of_rows = (
        np.tile(shares_of(hot, ranges), len(owners) // ranges) for hot in (demand.hot_ids, demand.hot_rows)
    )
    found = dict.fromkeys(AMOUNTS, np.zeros(ranks))

    def of_owners(amount: Float64s | float) -> Float64s:
        spread = np.zeros(ranks)
        spread[owners] = amount
        return spread

    found |= {"tables": np.full(ranks, tables), "ids": np.full(ranks, demand.ids * (parts if kind == "pooled" else 1))}
    if kind == "pooled":
        found["bag_columns"] = np.full(ranks, bags * width * len(owners))
        found["served"] = of_owners(ranks * demand.ids * of_ids)
        found["given_columns"] = of_owners(ranks * bags * width)
    else:
        found["id_columns"] = np.full(ranks, demand.ids * dim)
        found["rows"] = np.full(ranks, demand.rows)
        found["row_columns"] = dim * found["rows"]
        found["split_rows"] = (parts if parts > 1 else 0) * found["rows"]
        found["served"] = of_owners(ranks * demand.rows * of_rows if kind == "rows" else 0.0)
    found["updated"] = of_owners(demand.all_rows * of_rows)
    found |= {f"{name}_columns": width * found[name] for name in ("served", "updated")}
    return np.stack([found[name] for name in AMOUNTS], axis=1)


def busiest(work: Float64s, cores: int, local_ranks: int) -> Float64s:
    """float64 [...]: of work [ranks, ...], what the busiest rank has, and no less than a host's over its cores."""
    hosts = [work[first : first + local_ranks].sum(0) for first in range(0, len(work), local_ranks)]
    found: Float64s = np.maximum(work.max(0), np.stack(hosts).max(0) / cores)
    return found


class Probe(NamedTuple):
    """A step that was timed: its one group, the work of each rank as of ``amounts_of``, and seconds."""

    group: Group
    amounts: Float64s
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankCosts(Checked):
    """Of steps over several ranks."""

    version: int = option(1, "of the file", low=1, high=1)
    world_size: int = option(1, "ranks", low=1)
    local_world_size: int = option(1, "ranks of a host", low=1)
    cores: int = option(1, "of a host", low=1)
    optimizer: RuleName = "rowwise_adagrad"
    """Of the tables."""
    seconds: Kinds
    errors: Errors
    source: str = ""
    """Where the costs come from."""
    reduce_us: float = _work("of averaging the gradients of a dense model over the ranks, beyond its own backward")
    reduce_busy_us: float = _work("the same, while a thread fetches rows")

    @classmethod
    def fitted(
        cls,
        probes: Sequence[Probe],
        *,
        held_out: Sequence[Probe] = (),
        cores: int,
        local_world_size: int,
        **others: Any,
    ) -> "RankCosts":
        """From steps of one group each. Errors are of steps held out, else of ``probes``; ``others`` are fields."""
        seconds = dict[str, Seconds]()
        for kind in KINDS:
            own = [probe for probe in probes if probe.group.kind == kind]
            rows = [
                [1.0, group.parts > 1, *done[0, :_OWNED], *busiest(done[:, _OWNED:], cores, local_world_size)]
                for group, done, _ in own
            ]
            matrix = np.array(rows) / np.array([[probe.seconds] for probe in own])  # relative errors count
            found = solve_nonnegative(matrix, np.ones(len(own)))
            seconds[kind] = Seconds(**dict(zip(_NAMES, found.tolist(), strict=True)))
        others |= {"cores": cores, "local_world_size": local_world_size}
        costs, errors = cls(seconds=Kinds(**seconds), errors=Errors(), **others), dict[str, list[float]]()
        for group, amounts, taken in held_out or probes:
            errors.setdefault(group.kind, []).append(abs(costs.group_s(group, amounts) / taken - 1))
        return replace(costs, errors=Errors(**{kind: statistics.fmean(each) for kind, each in errors.items()}))

    def work_s(self, group: Group, amounts: Float64s) -> Float64s:
        """float64 [ranks, 2], of each rank's work: as a requester, alike on all ranks, and as an owner."""
        costs = getattr(self.seconds, group.kind)
        seconds = amounts * np.array([getattr(costs, name) for name in AMOUNTS])
        return np.stack([seconds[:, :_OWNED].sum(1), seconds[:, _OWNED:].sum(1)], axis=1)

    def group_s(self, group: Group, amounts: Float64s) -> float:
        """A group's part of a step; ``amounts``: float64 [ranks, 12], of all its tables."""
        asked_s, owned_s = self.work_s(group, amounts).T
        return float(self.fixed_s(group) + asked_s[0] + busiest(owned_s, self.cores, self.local_world_size))

    def fixed_s(self, group: Group) -> float:
        """Of a group, whatever its tables."""
        costs = getattr(self.seconds, group.kind)
        return float(costs.groups + (costs.split_groups if group.parts > 1 else 0.0))

    def save(self, path: str | Path, *, force: bool = False) -> None:
        write_text(Path(path), json.dumps(dataclasses.asdict(self), indent=2) + "\n", force=force)

    @classmethod
    def load(cls, path: str | Path) -> "RankCosts":
        """Read what ``save`` wrote; ValueError names the key of something else and what is accepted. OSError."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("expected a table")
            return described(cls, content, "costs of ranks", is_whole=True)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; tierstore shard measure writes costs of ranks") from None


def solve_nonnegative(matrix: Float64s, target: Float64s) -> Float64s:
    """The x >= 0 for which ``matrix @ x`` (float64 [equations, unknowns]) is nearest to ``target``.
    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23: unknowns are let off zero one by one, the one
    along which the error falls fastest first; those that would fall below zero go back."""
    unknowns = matrix.shape[1]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), np.finfo(np.float64).tiny)
    scaled = matrix / scale
    found, is_free = np.zeros(unknowns), np.zeros(unknowns, np.bool_)
    for _ in range(_SOLVER_STEPS):
        slopes = np.where(is_free, 0.0, scaled.T @ (target - scaled @ found))
        if slopes.max(initial=0.0) <= 1e-12:
            break
        is_free[int(np.argmax(slopes))] = True
        while True:
            wanted = np.zeros(unknowns)
            wanted[is_free] = np.linalg.lstsq(scaled[:, is_free], target, rcond=None)[0]
            if (wanted[is_free] > 0).all():
                found = wanted
                break
            falling: Any = is_free & (wanted <= 0)
            # As far as the first of them reaches zero.
            share = np.min(found[falling] / (found[falling] - wanted[falling]))
            found = found + share * (wanted - found)
            is_free &= found > 1e-15
            found[~is_free] = 0.0
    solution: Float64s = found / scale
    return solution
