"""A plan for tables over ranks, by beam search.

A table's *form* is its sharding type, its exchange and the number of its ranks; with the ranks it is an *option*. The
search begins with plans whose tables all have one form, or the smallest of them data-parallel, and with each table in
the form that costs least alone. Each is dealt out, costliest tables first, every table to the ranks where it costs
least of those that have the space (Graham, Bounds on Multiprocessing Timing Anomalies, 1969); and, if ranks have a
limit, largest tables first, every table to the ranks that have the most space.

In the best few, the beam (Zha et al., Pre-train and Search, MLSys 2023), each table in turn takes the option that makes
the step fastest, until none changes. Then all tables of a group take another form together, which saves what a group
costs whatever its tables, or two of the costliest tables change. Only sums over the tables of each group are kept, so
an option costs the same to try however many tables there are.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from ...config import TableConfig
from ...kernels.arrays import Float64s, Int64s
from ...system.sizes import format_size
from ..plan import Exchange, Plan, Sharding, ShardingType
from .costs import AMOUNTS, Demand, Group, RankCosts, TableDemand, amounts_of, group_of

_BEAM: Final = 12
_MOST_SWEEPS: Final = 20
"""Over all tables, of each plan of the beam."""
_MOST_CHANGES: Final = 20
_CHANGED: Final = 6
"""Tables of which two change together: the costliest."""
_MOST_MOVED: Final = 2000
"""Tables that one round tries in another form with their group: those of the smallest groups."""
_UNEVENNESS: Final = 0.02
"""What the root mean square of owners' work counts for: of plans that take equally long, the balanced one is chosen."""
_LEAST_GAIN: Final = 1e-9
_LEAST_COLUMNS: Final = 4
"""Of a range."""
_PAGE_BYTES: Final = 4096
_ALL: Final = slice(None)
_SLACK_BYTES: Final = 1e-3
"""Of a limit: sums of floats are not exact."""


class Prediction(NamedTuple):
    """Of a plan.

    Attributes:
        seconds: of a step of the tables: forward, backward and update, without prefetch, all rows in memory.
        served: float64 [ranks], what each looks up in its own part: rows, or ids where owners pool or all have copies.
        size_bytes: float64 [ranks], of rows with their optimizer state.
    """

    plan: Plan
    seconds: float
    served: Float64s
    size_bytes: Float64s


def predict(tables: Sequence[TableConfig], plan: Plan, demand: Demand, costs: RankCosts) -> Prediction:
    """What a step of a plan takes. ValueError: it lacks a table, or is for another number of ranks than the costs."""
    if plan.world_size != costs.world_size:
        raise ValueError(
            f"the plan is for {plan.world_size} ranks and the costs are of {costs.world_size}; measure them again"
        )
    missing = next((table.name for table in tables if table.name not in plan.tables), None)
    if missing is not None:
        raise ValueError(f"the plan has no table {missing!r}")
    work, served, size_bytes = dict[Group, Float64s](), np.zeros(costs.world_size), np.zeros(costs.world_size)
    for table in tables:
        sharding, own = plan.tables[table.name], demand.tables.get(table.name, TableDemand())
        group, amounts = group_of(sharding, table.embedding_dim), _amounts(table, sharding, demand, costs)
        work[group] = work.get(group, 0.0) + amounts
        is_copied = group.kind == "data_parallel"
        served += own.ids + costs.world_size * own.rows if is_copied else amounts[:, AMOUNTS.index("served")]
        size_bytes += size_bytes_of(table, sharding, costs)
    seconds = sum(costs.group_s(group, amounts) for group, amounts in work.items())
    return Prediction(plan, seconds, served, size_bytes)


def _amounts(table: TableConfig, sharding: Sharding, demand: Demand, costs: RankCosts) -> Float64s:
    own = demand.tables.get(table.name, TableDemand())
    return amounts_of(sharding, table.embedding_dim, own, bags=demand.samples, ranks=costs.world_size)


def size_bytes_of(table: TableConfig, sharding: Sharding, costs: RankCosts) -> Float64s:
    """float64 [ranks], of the rows that each has, with their optimizer state."""
    found, column_bytes = np.zeros(costs.world_size), table.layout(_PAGE_BYTES).row_bytes / table.embedding_dim
    for shard in sharding.shards(table.num_embeddings, table.embedding_dim):
        found[shard.rank] += shard.num_rows * shard.num_columns * column_bytes
    return found


class _Options(NamedTuple):
    """All ways to place one table: of each the number of its group, a requester's work, float64 [options], and owners'
    work and bytes, float64 [options, ranks]; and the numbers of the options of each form."""

    shardings: list[Sharding]
    groups: Int64s
    asked_s: Float64s
    owned_s: Float64s
    size_bytes: Float64s
    of_form: dict[int, Int64s]

    def alone_s(self, option: int) -> float:
        """What the table's work takes, evenly spread, without what its group costs."""
        return float(self.asked_s[option] * self.owned_s.shape[1] + self.owned_s[option].sum())


class _State:
    """A plan, or a part of one: the option of each table, int64 [tables], -1 for none yet; and sums over the tables, of
    each rank, of each group, and for ``owned_s`` of both."""

    def __init__(self, tables: int, groups: int, ranks: int) -> None:
        self.options = np.full(tables, -1)
        self.size_bytes = np.zeros(ranks)
        self.counts, self.asked_s, self.scores = np.zeros(groups), np.zeros(groups), np.zeros(groups)
        self.owned_s = np.zeros((groups, ranks))

    @property
    def score(self) -> float:
        return float(self.scores.sum())


class Search:
    """For the plan of least step time over the ranks that the costs were measured on. ``rank_bytes``: limit of each
    rank's rows with their optimizer state. ValueError: the costs are of another optimizer."""

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
        self._forms: list[tuple[ShardingType, Exchange, int]] = list(self._all_forms())
        self._groups = dict[Group, int]()
        self._options = [self._options_of(table) for table in tables]
        self._fixed_s = np.array([costs.fixed_s(group) for group in self._groups])
        self._hosts = np.arange(0, costs.world_size, costs.local_world_size)

    def best(self, progress: Callable[[int, int], None] | None = None) -> Prediction:
        """The best plan found; ``progress`` is given the rounds done, and how many there may be. ValueError: the tables
        exceed the ranks' limits."""
        distinct = {state.options.tobytes(): state for state in self._starts()}
        starts = sorted(distinct.values(), key=lambda state: state.score)
        if not starts:
            size_bytes = sum(table.size_bytes(_PAGE_BYTES) for table in self._tables)
            raise ValueError(
                f"the tables take {format_size(size_bytes)}, more than {self._costs.world_size} ranks of "
                f"{format_size(self._rank_bytes)} hold as they are dealt out; raise the limit, or have more ranks"
            )
        best = min(map(self._descended, starts[:_BEAM]), key=lambda state: state.score)
        for done in range(_MOST_CHANGES):
            if progress is not None:
                progress(done + 1, _MOST_CHANGES)
            changed = self._descended(min(self._changes(best), key=lambda state: state.score, default=best))
            if not changed.score < best.score * (1 - _LEAST_GAIN):
                break
            best = changed
        chosen = zip(self._tables, self._options, best.options, strict=True)
        plan = Plan(self._costs.world_size, {table.name: own.shardings[option] for table, own, option in chosen})
        return predict(self._tables, plan, self._demand, self._costs)

    def _all_forms(self) -> Iterator[tuple[ShardingType, Exchange, int]]:
        ranks = self._costs.world_size
        yield "data_parallel", "rows", ranks
        for exchange in get_args(Exchange):
            yield "table_wise", exchange, 1
            yield "row_wise", exchange, ranks
            if exchange == "rows" or self._costs.optimizer != "rowwise_adagrad":  # which needs whole rows
                for size in _powers(ranks):
                    yield "column_wise", exchange, size

    def _options_of(self, table: TableConfig) -> _Options:
        ranks, dim = self._costs.world_size, table.embedding_dim
        shardings, groups, asked_s, owned_s, of_bytes = (list[Any]() for _ in range(5))
        of_form = dict[int, Int64s]()
        for form, (sharding_type, exchange, size) in enumerate(self._forms):
            if sharding_type == "column_wise" and (dim % size or dim // size < _LEAST_COLUMNS):
                continue
            first = Sharding(sharding_type, tuple(range(size)), exchange)
            group, size_bytes = group_of(first, dim), size_bytes_of(table, first, self._costs)
            work_s = self._costs.work_s(group, _amounts(table, first, self._demand, self._costs))
            number = self._groups.setdefault(group, len(self._groups))
            shifts = range(ranks if size < ranks else 1)
            of_form[form] = len(shardings) + np.arange(len(shifts))
            for shift in shifts:
                shardings.append(first._replace(ranks=tuple((rank + shift) % ranks for rank in first.ranks)))
                groups.append(number)
                asked_s.append(work_s[0, 0])
                owned_s.append(np.roll(work_s[:, 1], shift))
                of_bytes.append(np.roll(size_bytes, shift))
        return _Options(shardings, np.array(groups), np.array(asked_s), np.stack(owned_s), np.stack(of_bytes), of_form)

    def _scores(self, groups: Int64s, asked_s: Float64s, owned_s: Float64s) -> Float64s:
        """float64 [n], of n groups with so much work: seconds, and unevenness."""
        costs = self._costs
        busy = np.maximum(owned_s.max(1), np.add.reduceat(owned_s, self._hosts, axis=1).max(1) / costs.cores)
        uneven = np.sqrt(np.einsum("gr,gr->g", owned_s, owned_s) / costs.world_size)
        found: Float64s = self._fixed_s[groups] + asked_s + busy + _UNEVENNESS * uneven
        return found

    def _add(self, state: _State, table: int, option: int, sign: int) -> int:
        """Count the option of a table in, or out; its group."""
        own = self._options[table]
        group = int(own.groups[option])
        state.counts[group] += sign
        state.asked_s[group] += sign * own.asked_s[option]
        state.owned_s[group] += sign * own.owned_s[option]
        state.size_bytes += sign * own.size_bytes[option]
        return group

    def _take(self, state: _State, table: int) -> None:
        """A table has no option any more."""
        group = self._add(state, table, int(state.options[table]), -1)
        state.options[table], state.scores[group] = -1, 0.0
        if state.counts[group]:
            one = slice(group, group + 1)
            state.scores[one] = self._scores(np.array([group]), state.asked_s[one], state.owned_s[one])

    def _put(self, state: _State, table: int, option: int, gain: float) -> None:
        """A table has the option, which adds so much to the score."""
        state.scores[self._add(state, table, option, 1)] += gain
        state.options[table] = option

    def _gains(self, state: _State, table: int, among: Int64s | slice = _ALL) -> Float64s:
        """float64 [options], what each adds to the score for a table that has none; infinity where it does not fit."""
        own = self._options[table]
        groups = own.groups[among]
        asked_s, owned_s = state.asked_s[groups] + own.asked_s[among], state.owned_s[groups] + own.owned_s[among]
        gains = self._scores(groups, asked_s, owned_s) - state.scores[groups]
        fitting = (own.size_bytes[among] <= self._rank_bytes - state.size_bytes + _SLACK_BYTES).all(1)
        found: Float64s = np.where(fitting, gains, np.inf)
        return found

    def _dealt(self, state: _State, forms: Mapping[int, int], *, by_size: bool = False) -> _State | None:
        """With tables, in place, in the option of their form that is best as the others are, the costliest first; or
        ``by_size``, where the ranks have the most space, the largest first. None if one has no space.

        Args:
            forms: of tables that have no option yet.
        """
        known = {table: self._options[table].of_form[form] for table, form in forms.items()}
        weigh = self._size_bytes if by_size else self._alone_s
        for table in sorted(forms, key=lambda table: (len(known[table]) > 1, -weigh(table, forms[table]))):
            gains, sizes = self._gains(state, table, known[table]), self._options[table].size_bytes[known[table]]
            taken = np.where(gains < np.inf, sizes @ state.size_bytes, np.inf)
            # Of equal ones, as those of tables that are not looked up: where the ranks have the most space.
            best = int(np.lexsort((gains, taken) if by_size else (taken, gains))[0])
            if gains[best] == np.inf:
                return None
            self._put(state, table, int(known[table][best]), float(gains[best]))
        return state

    def _alone_s(self, table: int, form: int) -> float:
        own = self._options[table]
        return own.alone_s(int(own.of_form[form][0]))

    def _size_bytes(self, table: int, form: int) -> float:
        own = self._options[table]
        return float(own.size_bytes[own.of_form[form][0]].sum())

    def _costly(self, state: _State) -> list[int]:
        """Tables, the costliest first."""
        alone_s = [own.alone_s(option) for own, option in zip(self._options, state.options.tolist(), strict=True)]
        return sorted(range(len(alone_s)), key=lambda table: -alone_s[table])

    def _descended(self, state: _State) -> _State:
        """With each table in turn in the option that is best as the others are, in place, until none changes."""
        order = self._costly(state)
        for _ in range(_MOST_SWEEPS):
            before = state.score
            for table in order:
                option = int(state.options[table])
                self._take(state, table)
                gains = self._gains(state, table)
                best = int(gains.argmin())
                chosen = best if gains[best] < gains[option] - _LEAST_GAIN * before else option
                self._put(state, table, chosen, float(gains[chosen]))
            if state.score >= before * (1 - _LEAST_GAIN):
                break
        return state

    def _starts(self) -> Iterator[_State]:
        count, ranks = len(self._tables), self._costs.world_size
        known = [set(own.of_form) for own in self._options]
        smallest = sorted(range(count), key=lambda index: self._tables[index].num_embeddings)
        cheapest = {table: min(own, key=lambda form: self._alone_s(table, form)) for table, own in enumerate(known)}
        chosen = [cheapest]
        for base in range(len(self._forms)):
            for number in dict.fromkeys((0, *_powers(count, 4), count)):
                small = set(smallest[:number])
                chosen.append(
                    {table: 0 if table in small else base if base in own else 1 for table, own in enumerate(known)}
                )
        for forms in {tuple(each.values()): each for each in chosen}.values():
            for by_size in {False, self._rank_bytes < np.inf}:
                state = self._dealt(_State(count, len(self._groups), ranks), forms, by_size=by_size)
                if state is not None:
                    yield state

    def _changes(self, state: _State) -> Iterator[_State]:
        """Those where two of the costliest tables have other options, as where space is short one has to give way; and
        where all tables of one group have another form, of the smallest groups first."""
        for first, second in itertools.permutations(self._costly(state)[:_CHANGED], 2):
            rest = copy.deepcopy(state)
            self._take(rest, first)
            self._take(rest, second)
            gains = self._gains(rest, first)
            for option in np.flatnonzero(np.isfinite(gains)).tolist():
                changed = copy.deepcopy(rest)
                self._put(changed, first, option, float(gains[option]))
                last = self._gains(changed, second)
                if last.min() < np.inf:
                    self._put(changed, second, int(last.argmin()), float(last.min()))
                    yield changed
        members = dict[int, list[int]]()
        for table, option in enumerate(state.options.tolist()):
            members.setdefault(int(self._options[table].groups[option]), []).append(table)
        moved = 0
        for tables, form in itertools.product(sorted(members.values(), key=len), range(len(self._forms))):
            if moved > _MOST_MOVED:
                break
            if all(form in self._options[table].of_form for table in tables):
                moved += len(tables)
                changed = copy.deepcopy(state)
                for table in tables:
                    self._take(changed, table)
                if self._dealt(changed, dict.fromkeys(tables, form)) is not None:
                    yield changed


def _powers(most: int, base: int = 2) -> Iterator[int]:
    """2, 4, 8... up to ``most``, or those of another base."""
    count = base
    while count <= most:
        yield count
        count *= base
