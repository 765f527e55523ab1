"""Plans for a workload: greedy, and by beam search.

Both give each table a *form* (its sharding type, exchange, and of column-wise the number of ranges) and then deal the
tables out: those that cost their owners most first, each to the ranks with the least to do in its group that have room
(R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 17, 1969).

- Greedy: each table takes the form that costs least were it alone in its group, without what a group costs.
- Beam: as D. Zha et al., Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost Models
  (MLSys 2023), whose inner search is greedy under memory and whose outer one halves columns of the costliest tables,
  keeping the best few plans. Here the outer search changes forms, of which halves of columns are some. It begins with
  plans whose tables are all of one form, or the smallest of them data-parallel, and with the greedy plan. Costs are
  measured (``costs``), not learnt.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, get_args

import numpy as np

from ...dist.plan import Exchange, Plan, Sharding, ShardingType
from ...kernels.arrays import Float64s
from ...system.sizes import format_size
from ..workload import TableShape, Workload
from .costs import OF_GROUPS, Kind, RankCosts, amounts_of, busiest, bytes_of, group_of
from .demand import Demands

_BEAM: Final = 4
_CHANGED: Final = 10
"""Tables whose forms a step of the beam search changes: the costliest."""
_MOST_STEPS: Final = 200
_LEAST_COLUMNS: Final = 4
"""Of a range."""


class Form(NamedTuple):
    """How a table is sharded, whatever its ranks. ``size``: ranks that have parts."""

    sharding_type: ShardingType
    exchange: Exchange
    size: int


class Found(NamedTuple):
    """A plan, and seconds of its step."""

    plan: Plan
    seconds: float


Forms = tuple[Form, ...]
"""Of each table, in order."""


class _Part(NamedTuple):
    """A table in a form, wherever its ranks.

    Attributes:
        of_group: seconds, once for all tables of a group.
        asker: seconds. owner: seconds of all owners together. shares: float64 [size], of each owner.
        bytes_each: of each owner.
    """

    group: tuple[Kind, int, int]
    of_group: float
    asker: float
    owner: float
    shares: Float64s
    bytes_each: float


class Search:
    """Plans over the ranks that costs were measured on.

    Args:
        rank_bytes: room of each rank for rows with their optimizer state.

    Raises:
        ValueError: the costs are of another optimizer, or the rows take more than all ranks' room.
    """

    def __init__(
        self, workload: Workload, demand: Demands, costs: RankCosts, *, rank_bytes: float = float("inf")
    ) -> None:
        if workload.optimizer != costs.optimizer:
            raise ValueError(
                f"the workload has optimizer={workload.optimizer!r} and the costs are of {costs.optimizer!r}; measure "
                f"them again: tierstore plan measure-ranks --optimizer {workload.optimizer}"
            )
        lacking = workload.table_bytes - rank_bytes * costs.world_size
        if lacking > 0:
            raise ValueError(
                f"the tables take {format_size(workload.table_bytes)}, {format_size(lacking)} more than "
                f"{costs.world_size} ranks have room for; give each rank more, or have more ranks"
            )
        self._workload = workload
        self._demand = demand
        self._costs = costs
        self._rank_bytes = rank_bytes
        self._parts: list[dict[Form, _Part]] = [self._parts_of(table) for table in workload.tables]
        self._known: dict[Forms, Found | None] = {}

    # Forms

    def _forms_of(self, table: TableShape) -> Iterator[Form]:
        ranks, local = self._costs.world_size, self._costs.local_world_size
        yield Form("data_parallel", "rows", ranks)
        halved = [size for size in _powers(ranks) if self._is_halved(table, size)]
        for exchange in get_args(Exchange):
            yield Form("table_wise", exchange, 1)
            yield Form("row_wise", exchange, ranks)
            if 1 < local < ranks:
                yield Form("table_row_wise", exchange, local)
            if exchange == "rows" or self._workload.optimizer != "rowwise_adagrad":  # which needs whole rows
                yield from (Form("column_wise", exchange, size) for size in halved)

    @staticmethod
    def _is_halved(table: TableShape, count: int) -> bool:
        return table.embedding_dim % count == 0 and table.embedding_dim // count >= _LEAST_COLUMNS

    def _parts_of(self, table: TableShape) -> dict[Form, _Part]:
        costs, ranks = self._costs, self._costs.world_size
        found = {}
        for form in self._forms_of(table):
            sharding = Sharding(form.sharding_type, tuple(range(form.size)), form.exchange)
            bags = self._workload.batch_samples / ranks
            amounts = amounts_of(table, sharding, self._demand[table.name], bags=bags, ranks=ranks)
            group = group_of(table, sharding)
            own = amounts.owners @ costs.owner(group[0])
            sizes = bytes_of(self._workload, table, sharding, ranks)
            total = float(own.sum())
            shares = own[: form.size] / total if total else np.full(form.size, 1 / form.size)
            of_group, of_table = np.split(amounts.asker * costs.asker(group[0]), [OF_GROUPS])
            found[form] = _Part(group, float(of_group.sum()), float(of_table.sum()), total, shares, float(sizes.max()))
        return found

    def _alone(self, part: _Part) -> float:
        """Seconds of a table in its group, were owners' work evenly spread."""
        spread = part.owner * max(1 / self._costs.cores * self._costs.local_world_size, 1.0) / self._costs.world_size
        return part.asker + spread

    # Ranks

    def _placed(self, forms: Forms) -> Found | None:
        """The plan of these forms; None if there is no room."""
        if forms not in self._known:
            self._known[forms] = self._place(forms)
        return self._known[forms]

    def _place(self, forms: Forms) -> Found | None:
        ranks = self._costs.world_size
        parts = [known[form] for known, form in zip(self._parts, forms, strict=True)]
        is_fixed = [form.size == ranks for form in forms]
        order = sorted(range(len(forms)), key=lambda number: (not is_fixed[number], -parts[number].owner))
        free = np.full(ranks, float(self._rank_bytes))
        work = dict[tuple[Kind, int, int], Float64s]()
        all_work = np.zeros(ranks)
        shardings = dict[str, Sharding]()
        seconds = 0.0
        for number in order:
            form, part = forms[number], parts[number]
            if part.group not in work:
                work[part.group] = np.zeros(ranks)
                seconds += part.of_group
            own = work[part.group]
            chosen = self._choose(form, part, own, all_work, free)
            if chosen is None:
                return None
            places = list(chosen)
            own[places] += part.owner * part.shares
            all_work[places] += part.owner * part.shares
            free[places] -= part.bytes_each
            seconds += part.asker
            shardings[self._workload.tables[number].name] = Sharding(form.sharding_type, chosen, form.exchange)
        seconds += sum(float(busiest(own, self._costs.cores, self._costs.local_world_size)) for own in work.values())
        in_order = {table.name: shardings[table.name] for table in self._workload.tables}
        return Found(Plan(ranks, in_order), seconds)

    def _choose(
        self, form: Form, part: _Part, own: Float64s, all_work: Float64s, free: Float64s
    ) -> tuple[int, ...] | None:
        """The ranks with the least to do in the group, and then in all, that have room."""
        ranks, local = self._costs.world_size, self._costs.local_world_size
        if form.size == ranks:
            return tuple(range(ranks)) if (free >= part.bytes_each).all() else None
        if form.sharding_type == "table_row_wise":
            hosts = [range(first, first + local) for first in range(0, ranks, local)]
            open_hosts = [host for host in hosts if free[list(host)].min() >= part.bytes_each]
            if not open_hosts:
                return None
            return tuple(min(open_hosts, key=lambda host: (own[list(host)].sum(), all_work[list(host)].sum())))
        open_ranks = [rank for rank in range(ranks) if free[rank] >= part.bytes_each]
        if len(open_ranks) < form.size:
            return None
        open_ranks.sort(key=lambda rank: (own[rank], all_work[rank], -free[rank]))
        return tuple(sorted(open_ranks[: form.size]))

    # Searches

    def greedy(self) -> Found:
        """See the module's docstring.

        Raises:
            ValueError: no room.
        """
        return self._placed(self._cheapest()) or self._by_rows()

    def _cheapest(self) -> Forms:
        return tuple(min(known, key=lambda form: self._alone(known[form])) for known in self._parts)

    def _by_rows(self) -> Found:
        """What takes the least room; ValueError if there is not even so much."""
        found = self._placed((Form("row_wise", "rows", self._costs.world_size),) * len(self._parts))
        if found is None:
            raise ValueError(f"{format_size(self._rank_bytes)} a rank have no room for the tables, even row by row")
        return found

    def beam(self, progress: Callable[[int, int], None] | None = None) -> Found:
        """See the module's docstring.

        Args:
            progress: told of each step, and how many there may be.

        Raises:
            ValueError: no room.
        """
        best = self._best([*self._starts()])
        for step in range(_MOST_STEPS):
            if progress is not None:
                progress(step + 1, _MOST_STEPS)
            changed = self._best([*best, *itertools.chain.from_iterable(map(self._changes, best))])
            if changed == best:
                break
            best = changed
        return (self._placed(best[0]) if best else None) or self._by_rows()

    def _best(self, candidates: Sequence[Forms]) -> list[Forms]:
        placed = {forms: self._placed(forms) for forms in candidates}
        fitting = [(found.seconds, forms) for forms, found in placed.items() if found is not None]
        return [forms for _, forms in sorted(fitting)[:_BEAM]]

    def _starts(self) -> Iterator[Forms]:
        tables = self._workload.tables
        yield self._cheapest()
        by_size = sorted(range(len(tables)), key=lambda number: tables[number].num_embeddings)
        copied = Form("data_parallel", "rows", self._costs.world_size)
        for base in dict.fromkeys(form for known in self._parts for form in known):
            for count in (0, *_powers(len(tables)), len(tables)):
                small = set(by_size[:count])
                yield tuple(
                    copied if number in small else base if base in known else self._default(known)
                    for number, known in enumerate(self._parts)
                )

    @staticmethod
    def _default(known: dict[Form, _Part]) -> Form:
        return next(form for form in known if form.sharding_type == "table_wise")

    def _changes(self, forms: Forms) -> Iterator[Forms]:
        """Those where one of the costliest tables has another form, or all of one form have."""
        costs = [self._alone(known[form]) for known, form in zip(self._parts, forms, strict=True)]
        for number in sorted(range(len(forms)), key=lambda number: -costs[number])[:_CHANGED]:
            for form in self._parts[number]:
                yield (*forms[:number], form, *forms[number + 1 :])
        used = dict.fromkeys(forms)
        others = dict.fromkeys(form for known in self._parts for form in known)
        for old, new in itertools.product(used, others):
            yield tuple(
                new if form == old and new in known else form for known, form in zip(self._parts, forms, strict=True)
            )


def _powers(most: int) -> Iterator[int]:
    """2, 4, 8... up to ``most``."""
    count = 2
    while count <= most:
        yield count
        count *= 2
