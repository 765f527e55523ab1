"""A plan for tables over ranks, by beam search.

A table's *form* is its sharding type, its exchange and the number of its ranks. Tables whose forms are chosen are dealt
out: those that cost their owners most first, each to the ranks with free space that have the least to do in its group
(R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 17, 1969).

The search over forms follows D. Zha et al., Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained
Neural Cost Models (MLSys 2023): it keeps the best few plans and changes the forms of the costliest tables, halves of
columns among them. It begins with plans whose tables all have one form, or the smallest of them data-parallel, and with
each table in the form that costs least were it alone. Costs are measured (``costs``), not learnt.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple, get_args

import numpy as np

from ...config import TableConfig
from ...kernels.arrays import Float64s
from ...system.sizes import format_size
from ..plan import Exchange, Plan, Sharding
from .costs import AMOUNTS, Demand, Group, RankCosts, TableDemand, amounts_of, group_of

_BEAM: Final = 4
_CHANGED: Final = 10
"""Tables whose forms a round changes: the costliest."""
_MOST_ROUNDS: Final = 200
_LEAST_COLUMNS: Final = 4
"""Of a range."""
_PAGE_BYTES: Final = 4096

Forms = tuple[Sharding, ...]
"""Of each table, in order; each over the first ranks, wherever the table will be."""


class Prediction(NamedTuple):
    """Of a plan.

    Attributes:
        seconds: of a step of the tables: forward, backward and update, without prefetch, all rows in memory.
        served: float64 [ranks], what each rank looks up in its own part: rows for all ranks; ids, where owners pool; of
            data-parallel tables its own ids, and all ranks' rows to update them.
        size_bytes: float64 [ranks], of rows with their optimizer state.
    """

    plan: Plan
    seconds: float
    served: Float64s
    size_bytes: Float64s


def predict(tables: Sequence[TableConfig], plan: Plan, demand: Demand, costs: RankCosts) -> Prediction:
    """What a step of a plan takes.

    Raises:
        ValueError: the plan lacks a table, or is for another number of ranks than the costs.
    """
    if plan.world_size != costs.world_size:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks and the costs are of {costs.world_size}; measure them again"
        )
    missing = next((table.name for table in tables if table.name not in plan.tables), None)
    if missing is not None:
        raise ValueError(f"the plan has no table {missing!r}")
    work_s, served, size_bytes = dict[Group, Float64s](), np.zeros(costs.world_size), np.zeros(costs.world_size)
    for table in tables:
        sharding, own = plan.tables[table.name], demand.tables.get(table.name, TableDemand())
        group, amounts = group_of(sharding, table.embedding_dim), _amounts(table, sharding, demand, costs)
        work_s[group] = work_s.get(group, 0.0) + costs.work_s(group, amounts)
        is_copied = group.kind == "data_parallel"
        served += own.ids + costs.world_size * own.rows if is_copied else amounts[:, AMOUNTS.index("served")]
        size_bytes += _size_bytes(table, sharding, costs)
    seconds = sum(costs.group_s(group, own_s) for group, own_s in work_s.items())
    return Prediction(plan, seconds, served, size_bytes)


def _amounts(table: TableConfig, sharding: Sharding, demand: Demand, costs: RankCosts) -> Float64s:
    own = demand.tables.get(table.name, TableDemand())
    return amounts_of(sharding, table.embedding_dim, own, bags=demand.samples, ranks=costs.world_size)


def _size_bytes(table: TableConfig, sharding: Sharding, costs: RankCosts) -> Float64s:
    """float64 [ranks], of the rows that each has, with their optimizer state."""
    found, column_bytes = np.zeros(costs.world_size), table.layout(_PAGE_BYTES).row_bytes / table.embedding_dim
    for shard in sharding.shards(table.num_embeddings, table.embedding_dim):
        found[shard.rank] += shard.num_rows * shard.num_columns * column_bytes
    return found


class _Work(NamedTuple):
    """Of one table in a step: seconds, float64 [ranks, 2], as of ``RankCosts.work_s``; bytes, float64 [ranks]."""

    group: Group
    seconds: Float64s
    size_bytes: Float64s


class Search:
    """For the plan of least step time over the ranks that the costs were measured on.

    Args:
        rank_bytes: limit of each rank's rows with their optimizer state.

    Raises:
        ValueError: the costs are of another optimizer.
    """

    def __init__(
        self, tables: Sequence[TableConfig], demand: Demand, costs: RankCosts, *, rank_bytes: float = float("inf")
    ) -> None:
        other = next((each for each in tables if each.optimizer.kind != costs.optimizer), None)
        if other is not None:
            raise ValueError(
                f"table {other.name!r} has optimizer {other.optimizer.kind}, and the costs are of {costs.optimizer}; "
                f"measure them again: tierstore shard measure --optimizer {other.optimizer.kind}"
            )
        self._tables, self._demand, self._costs, self._rank_bytes = tables, demand, costs, rank_bytes
        self._forms = [list(self._forms_of(table)) for table in tables]
        self._work, self._placed = cache(self._work_of), cache(self._place)

    def best(self, progress: Callable[[int, int], None] | None = None) -> Prediction:
        """The best plan found; ValueError if the tables exceed the ranks' limits.

        Args:
            progress: is given the rounds done, and how many there may be.
        """
        best = self._fastest(self._starts())
        for done in range(_MOST_ROUNDS):
            if progress is not None:
                progress(done + 1, _MOST_ROUNDS)
            changed = self._fastest(itertools.chain(best, *map(self._changes, best)))
            if changed == best:
                break
            best = changed
        if not best:
            size_bytes = sum(table.size_bytes(_PAGE_BYTES) for table in self._tables)
            raise ValueError(
                f"the tables take {format_size(size_bytes)}, more than {self._costs.world_size} ranks of "
                f"{format_size(self._rank_bytes)} hold; raise the limit, or have more ranks"
            )
        return predict(self._tables, self._placed(best[0])[1], self._demand, self._costs)

    def _forms_of(self, table: TableConfig) -> Iterator[Sharding]:
        ranks, dim = self._costs.world_size, table.embedding_dim
        every = tuple(range(ranks))
        yield Sharding("data_parallel", every)
        for exchange in get_args(Exchange):
            yield Sharding("table_wise", (0,), exchange)
            yield Sharding("row_wise", every, exchange)
            if exchange == "rows" or self._costs.optimizer != "rowwise_adagrad":  # which needs whole rows
                for size in _powers(ranks):
                    if dim % size == 0 and dim // size >= _LEAST_COLUMNS:
                        yield Sharding("column_wise", every[:size], exchange)

    def _work_of(self, index: int, sharding: Sharding) -> _Work:
        table, costs = self._tables[index], self._costs
        group = group_of(sharding, table.embedding_dim)
        seconds = costs.work_s(group, _amounts(table, sharding, self._demand, costs))
        return _Work(group, seconds, _size_bytes(table, sharding, costs))

    def _place(self, forms: Forms) -> tuple[float, Plan]:
        """Seconds of a step, and the plan, of tables of these forms; infinity where ranks lack the space."""
        ranks = self._costs.world_size
        free, in_all, in_group = np.full(ranks, float(self._rank_bytes)), np.zeros((ranks, 2)), dict[Group, Float64s]()
        works, shardings = [self._work(index, form) for index, form in enumerate(forms)], list(forms)
        owned = [float(work.seconds[:, 1].sum()) for work in works]
        for index in sorted(range(len(forms)), key=lambda index: (len(forms[index].ranks) < ranks, -owned[index])):
            own, bytes_each, size = works[index].group, works[index].size_bytes.max(), len(forms[index].ranks)
            busy = in_group.setdefault(own, np.zeros((ranks, 2)))
            fitting = [rank for rank in range(ranks) if free[rank] >= bytes_each]
            if len(fitting) < size:
                return float("inf"), Plan(ranks, {})
            fitting.sort(key=lambda rank: (busy[rank, 1], in_all[rank, 1], -free[rank]))
            shardings[index] = forms[index]._replace(ranks=tuple(sorted(fitting[:size])))
            work = self._work(index, shardings[index])
            busy += work.seconds
            in_all += work.seconds
            free -= work.size_bytes
        seconds = sum(self._costs.group_s(group, busy) for group, busy in in_group.items())
        return seconds, Plan(ranks, {table.name: each for table, each in zip(self._tables, shardings, strict=True)})

    def _fastest(self, candidates: Iterable[Forms]) -> list[Forms]:
        seconds = {forms: self._placed(forms)[0] for forms in candidates}
        return sorted((forms for forms in seconds if seconds[forms] < float("inf")), key=seconds.__getitem__)[:_BEAM]

    def _alone_s(self, index: int, form: Sharding) -> float:
        """Of a table, were its work evenly spread."""
        return float(self._work(index, form).seconds.sum())

    def _starts(self) -> Iterator[Forms]:
        yield tuple(min(known, key=lambda form: self._alone_s(index, form)) for index, known in enumerate(self._forms))
        count = len(self._tables)
        by_size = sorted(range(count), key=lambda index: self._tables[index].num_embeddings)
        for base in dict.fromkeys(itertools.chain.from_iterable(self._forms)):
            for small in (set(by_size[:number]) for number in (0, *_powers(count), count)):
                yield tuple(
                    known[0] if index in small else base if base in known else known[1]
                    for index, known in enumerate(self._forms)
                )

    def _changes(self, forms: Forms) -> Iterator[Forms]:
        """Those where one of the costliest tables has another form, or all tables of one form have."""
        costly = sorted(range(len(forms)), key=lambda index: -self._alone_s(index, forms[index]))
        for index in costly[:_CHANGED]:
            for form in self._forms[index]:
                yield (*forms[:index], form, *forms[index + 1 :])
        others = dict.fromkeys(itertools.chain.from_iterable(self._forms))
        for old, new in itertools.product(dict.fromkeys(forms), others):
            yield tuple(
                new if form == old and new in known else form for known, form in zip(self._forms, forms, strict=True)
            )


def _powers(most: int) -> Iterator[int]:
    """2, 4, 8... up to ``most``."""
    count = 2
    while count <= most:
        yield count
        count *= 2
