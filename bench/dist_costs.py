"""How near are the costs of steps over ranks, and how good are plans made of them?

Parts, each for itself with ``--only``: "errors" (of costs, on sets of tables that they were not fitted to), "plans" (of
Criteo's and other tables, on real ranks, by the beam search and by hand), "measured" (of drawn sets of tables, on four
real ranks, by the beam search and by greedy rules). All take the costs that "errors" measured.
"""

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import Plan, ShardedStore, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist.placement import Demand, Prediction, RankCosts, Search, TableDemand, demand_of, predict
from tierstore.dist.placement.costs import KINDS
from tierstore.dist.placement.measure import measure_ranks
from tierstore.dist.placement.search import size_bytes_of
from tierstore.dist.plan import Exchange
from tierstore.plan.traces import draw_zipf
from tierstore.plan.workload import TableSpec
from tierstore.settings.sections import described
from tierstore.trace import TableTrace, Trace

from .common import Goal, Part, Report, Run, Table, start
from .sharded.ranks import run_ranks
from .sharded.step_part import joined
from .sharded.systems import System
from .sharded.turns import contender, spreads, take_turns
from .steps import criteo

_GOAL: Final = 0.15
BEAM: Final = "beam"
_BEAM_SEARCH: Final = "beam search"
COPIED: Final = "data_parallel"
RULES: Final = ("size", "dim", "lookups", "size-lookups", "random")
"""Of AutoShard (KDD 2022), DreamShard (NeurIPS 2022) and NeuroShard (MLSys 2023), which compare with them."""
_LIMIT: Final = 0.75
"""Of all tables' bytes, on a rank."""
Figures = dict[str, Any]


def _measure_errors(request: Run, _figures: Figures) -> Figures:
    in_rank = partial(measure_ranks, seconds=request.config["measure_s"])
    return {"costs": [asdict(run_ranks(in_rank, size)[0]) for size in request.config["ranks"]]}


def _tell_errors(figures: Figures) -> Report:
    pairs = [(costs, kind, costs["errors"][kind]) for costs in figures["costs"] for kind in KINDS]
    goals = [
        Goal(f"error of the costs, {costs['world_size']} ranks, {kind}", round(error, 3), at_most=_GOAL)
        for costs, kind, error in pairs
    ]
    title = "mean error of what is predicted of a step, sets of tables that were not fitted"
    rows = [[str(costs["world_size"]), kind, f"{error:.1%}"] for costs, kind, error in pairs]
    note = "; ".join(costs["source"].partition("measure, ")[2] for costs in figures["costs"])
    note = f"Costs: {note}; each fifth set is held out."
    return Report([Table(title, ["ranks", "exchange", "error"], rows)], goals, [note])


class Case(NamedTuple):
    """Tables, and batches of each rank by step."""

    name: str
    tables: list[tierstore.TableConfig]
    batches: list[list[tierstore.KeyedJaggedTensor]]

    @property
    def table_bytes(self) -> int:
        return sum(table.size_bytes(4096) for table in self.tables)


def _table(name: str, num_rows: int, dim: int) -> tierstore.TableConfig:
    rule = tierstore.optim.RowWiseAdagrad(lr=0.01)
    return tierstore.TableConfig(name=name, num_embeddings=num_rows, embedding_dim=dim, optimizer=rule)


def _criteo(config: Figures, dim: int, size: int) -> Case:
    shape = config | {"criteo_batch": config["batch"], "dim": dim}
    found = criteo(shape, size * config["batches"])
    tables = [_table(f"f{number}", rows, dim) for number, rows in enumerate(found.rows)]
    return Case(f"Criteo, {dim} columns", tables, [found.batches[rank::size] for rank in range(size)])


def _mixed(config: Figures, size: int) -> Case:
    """Bags of one and of many ids, rows of few and of many columns."""
    shapes = [shape for fields in config["plan_tables"] for shape in TableSpec(**fields).shapes()]
    samples, names = config["batch"], [shape.name for shape in shapes]
    lengths = torch.tensor([int(shape.pooling_factor) for shape in shapes]).repeat_interleave(samples)

    def batch(seed: int) -> tierstore.KeyedJaggedTensor:
        ids = [
            draw_zipf(each.num_embeddings, each.exponent, samples * int(each.pooling_factor), seed=seed + place)
            for place, each in enumerate(shapes)
        ]
        return tierstore.KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(ids)), lengths=lengths)

    firsts = [(config["seed"] * 1000 + rank) * 1000 for rank in range(size)]
    tables = [_table(each.name, each.num_embeddings, each.embedding_dim) for each in shapes]
    return Case("mixed tables", tables, [[batch(first + n) for n in range(config["batches"])] for first in firsts])


def _tables_asked(config: Figures) -> tuple[list[tierstore.TableConfig], dict[str, float]]:
    """Tables whose ids add up to those of Meta's traces, and of each the ids of a sample."""
    generator, count = np.random.default_rng(config["seed"]), config["trace_tables"]
    rows: Any = 10 ** generator.uniform(3, 6.5, count)
    dims: Any = generator.choice(config["set_dims"], count)
    factors: Any = generator.lognormal(sigma=1.5, size=count)
    factors *= config["trace_ids"] / config["trace_samples"] / factors.sum() * count / 856
    tables = [_table(f"t{n}", int(own), int(dim)) for n, (own, dim) in enumerate(zip(rows, dims, strict=True))]
    return tables, {table.name: own for table, own in zip(tables, factors.tolist(), strict=True)}


def _drawn(config: Figures, number: int, count: int, size: int) -> Case:
    """Tables of the traces with fewer rows, and ids by Zipf's law."""
    generator = np.random.default_rng((config["seed"], number))
    every, asked = _tables_asked(config)
    chosen = [
        replace(table, num_embeddings=max(16, int(table.num_embeddings * config["measured_rows"])))
        for table in (every[place] for place in generator.choice(len(every), count, replace=False))
    ]
    (low, high), samples = config["measured_exponents"], config["measured_batch"]
    exponents = generator.uniform(low, high, count)

    def batch() -> tierstore.KeyedJaggedTensor:
        lengths: list[Any] = [generator.poisson(asked[table.name], samples) for table in chosen]
        ids = [
            draw_zipf(table.num_embeddings, exponent, int(own.sum()), seed=int(generator.integers(1 << 31)))
            for table, exponent, own in zip(chosen, exponents, lengths, strict=True)
        ]
        values, lengths_ = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(lengths))
        return tierstore.KeyedJaggedTensor([table.name for table in chosen], values, lengths=lengths_)

    return Case(f"set {number}", chosen, [[batch() for _ in range(config["batches"])] for _ in range(size)])


def _demand(case: Case) -> Demand:
    """What the batches of all ranks ask for."""
    steps = [joined(of_ranks) for of_ranks in zip(*case.batches, strict=True)]
    tables = {}
    for name in (table.name for table in case.tables):
        ids = torch.cat([step[name].values() for step in steps]).numpy()
        lengths = torch.cat([step[name].lengths() for step in steps]).numpy()
        tables[name] = TableTrace(ids, np.append(0, np.cumsum(lengths)))
    return demand_of(Trace(tables=tables, batch_samples=steps[0].stride()), case.tables, len(case.batches))


def greedy(
    tables: Sequence[tierstore.TableConfig], demand: Demand, costs: RankCosts, rule: str, *, rank_bytes: float,
    seed: int = 0,
) -> Prediction:  # fmt: skip
    """The table-wise plan by a rule: tables are dealt out, heaviest first, each to the rank with the least weight that
    has the space, ``rank_bytes`` for rows with their optimizer state. Of the two exchanges, all tables have the one
    that the costs say is faster. ValueError: no rank has the space for a table, after those before it. Weights are by
    "size" rows times columns, by "dim" columns, by "lookups" columns times ids of a batch, by "size-lookups" the
    product of both; by "random" each table is on any rank with the space."""
    generator, ranks, weights = np.random.default_rng(seed), costs.world_size, dict[str, float]()
    for table in tables:
        rows, dim = table.num_embeddings, table.embedding_dim
        lookups = demand.tables.get(table.name, TableDemand()).ids / demand.samples * dim
        by_rule = {"size": rows * dim, "dim": dim, "lookups": lookups, "size-lookups": rows * lookups, "random": 0.0}
        weights[table.name] = by_rule[rule]
    load, free, places = np.zeros(ranks), np.full(ranks, float(rank_bytes)), dict[str, int]()
    for table in sorted(tables, key=lambda table: -weights[table.name]):
        size_bytes = size_bytes_of(table, Sharding("table_wise", (0,)), costs)[0]
        fitting = np.flatnonzero(free >= size_bytes)
        if not len(fitting):
            raise ValueError(f"no rank has the space for table {table.name!r}")
        rank = int(generator.choice(fitting) if rule == "random" else fitting[load[fitting].argmin()])
        load[rank] += weights[table.name]
        free[rank] -= size_bytes
        places[table.name] = rank
    plans = (
        Plan(ranks, {name: Sharding("table_wise", (rank,), exchange) for name, rank in places.items()})
        for exchange in get_args(Exchange)
    )
    return min((predict(tables, plan, demand, costs) for plan in plans), key=lambda found: found.seconds)


def _by_hand(tables: Sequence[tierstore.TableConfig], size: int) -> dict[str, Plan]:
    """Plans whose tables are alike; table-wise, the largest are dealt out first, in turns."""
    every = tuple(range(size))
    order = sorted(tables, key=lambda table: -table.num_embeddings)
    found = {
        "row_wise, rows": {table.name: Sharding("row_wise", every, "rows") for table in tables},
        "row_wise, pooled": {table.name: Sharding("row_wise", every, "pooled") for table in tables},
        "column_wise, rows": {table.name: Sharding("column_wise", every, "rows") for table in tables},
        "table_wise, rows": {t.name: Sharding("table_wise", (n % size,), "rows") for n, t in enumerate(order)},
        "table_wise, pooled": {t.name: Sharding("table_wise", (n % size,), "pooled") for n, t in enumerate(order)},
        COPIED: {table.name: Sharding("data_parallel", every) for table in tables},
    }
    return {name: Plan(size, own) for name, own in found.items()}


class Planned(System):
    """Tables as a plan has them."""

    store: ShardedStore

    def __init__(self, case: Case, plan: Plan) -> None:
        rows = sum(table.num_embeddings for table in case.tables)
        self.store = open_sharded(plan=plan, cold="memory", ddr=2 * case.table_bytes + 64 * rows + (64 << 20))
        for table in case.tables:
            self.store.create_table(table)
        self.module = ShardedTieredEmbeddingBagCollection(self.store)
        self.model = self.module

    def served(self, batches: Sequence[tierstore.KeyedJaggedTensor]) -> list[float]:
        """Rows that each rank looks up in its part in a step."""
        before = self.store.balance()
        for batch in batches:
            self.module(batch)
        after = self.store.balance()
        return [(new.lookups - old.lookups) / len(batches) for old, new in zip(before, after, strict=True)]


def _planned_in_rank(config: Figures, costs: RankCosts) -> list[Figures]:
    size, found = costs.world_size, []
    for case in [*(_criteo(config, dim, size) for dim in config["dims"]), _mixed(config, size)]:
        demand = _demand(case)
        best = Search(case.tables, demand, costs, rank_bytes=_LIMIT * case.table_bytes).best()
        plans = {_BEAM_SEARCH: best.plan, **_by_hand(case.tables, size)}
        found.append({"workload": case.name, "plans": _taken(case, plans, demand, costs, config["plan_turns"])})
    return found


def _drawn_in_rank(config: Figures, costs: RankCosts) -> list[Figures]:
    size, found = costs.world_size, []
    for number, count in enumerate(config["set_tables"] * config["measured_sets"]):
        case = _drawn(config, number, count, size)
        demand = _demand(case)
        sizes = [table.size_bytes(4096) for table in case.tables]
        limit, plans = float(config["set_limit"] * max(sum(sizes) / size, *sizes)), dict[str, Plan]()
        for rule in RULES:
            with contextlib.suppress(ValueError):  # it finds none
                plans[rule] = greedy(case.tables, demand, costs, rule, rank_bytes=limit, seed=number).plan
        plans[BEAM] = Search(case.tables, demand, costs, rank_bytes=limit).best().plan
        found.append({"tables": count, "plans": _taken(case, plans, demand, costs, config["measured_turns"])})
    return found


def _taken(case: Case, plans: dict[str, Plan], demand: Demand, costs: RankCosts, turns: int) -> Figures:
    """Of each plan, what is predicted and this rank's steps. Collective."""
    own = case.batches[dist.get_rank()]
    systems = {name: Planned(case, plan) for name, plan in plans.items()}
    seconds = take_turns({name: contender(system, own, is_model=False) for name, system in systems.items()}, turns)
    found = {}
    for name, plan in plans.items():
        predicted = predict(case.tables, plan, demand, costs)
        found[name] = {
            "predicted_s": predicted.seconds,
            "predicted_served": predicted.served.tolist(),
            "served": systems[name].served(own),
            "seconds": seconds[name],
            "forms": dict(Counter(f"{each.sharding_type}, {each.exchange}" for each in plan.tables.values())),
        }
        systems[name].close()
    return found


def _measure(
    in_rank: Callable[..., list[Figures]], keys: dict[str, str], largest_only: bool, request: Run, figures: Figures
) -> Figures:
    config, points = request.config, list[Figures]()
    if "errors" not in figures:
        raise SystemExit("This part needs the costs of --only errors, or the file of --json that has them.")
    costs = {each["world_size"]: described(RankCosts, each, "costs") for each in figures["errors"]["costs"]}
    for size in [max(costs)] if largest_only else config["ranks"]:
        for of_point in zip(*run_ranks(in_rank, size, config, costs[size]), strict=True):
            step = spreads([{name: each["seconds"] for name, each in rank["plans"].items()} for rank in of_point])
            plans = {name: each | {"seconds": step[name]} for name, each in of_point[0]["plans"].items()}
            points.append({**of_point[0], "ranks": size, "plans": plans})
    return {"points": points, "ranks": size, **{name: config[key] for name, key in keys.items()}}


def _imbalance(served: Sequence[float]) -> float:
    """What the busiest rank serves, over the mean."""
    return max(served) / (sum(served) / len(served))


def _error(plan: Figures) -> float:
    return float(plan["predicted_s"] / plan["seconds"]["median"] - 1)


def _tell(figures: Figures) -> Report:
    rows, off, uneven, by_hand = [], dict[str, list[float]](), list[float](), list[float]()
    for point in figures["points"]:
        plans = point["plans"]
        for name, each in plans.items():
            predicted, found = _imbalance(each["predicted_served"]), _imbalance(each["served"])
            is_found = name == _BEAM_SEARCH
            off.setdefault("found" if is_found else "by hand", []).append(abs(_error(each)))
            uneven.append(abs(predicted / found - 1))
            forms = "; ".join(f"{count} {form}" for form, count in each["forms"].items()) if is_found else ""
            shown = [f"{1e3 * seconds:.1f}" for seconds in (each["predicted_s"], each["seconds"]["median"])]
            shown += [f"{_error(each):+.0%}", f"{predicted:.2f}", f"{found:.2f}"]
            rows.append([f"{point['ranks']}, {point['workload']}", name, *shown, forms])
        best = min(each["seconds"]["median"] for name, each in plans.items() if name not in (_BEAM_SEARCH, COPIED))
        by_hand.append(best / plans[_BEAM_SEARCH]["seconds"]["median"])
    columns = ["ranks, workload", "plan", "ms predicted", "measured", "off", "busiest predicted", "measured", "tables"]
    title = "a step of tables by plan, and what the busiest rank looks up over the mean: predicted and measured"
    errors = {f"plans {whose}: a step predicted, off the measured one, the worst": own for whose, own in off.items()}
    errors["all plans: what the busiest rank looks up, predicted, off the measured"] = uneven
    goals = [Goal(name, round(max(own), 3), at_most=_GOAL) for name, own in errors.items()]
    name = "speed of the beam search's plans over the best by hand, the worst workload"
    goals.append(Goal(name, round(min(by_hand), 3), at_least=0.97))
    note = (
        f"Plans: {figures['batch']:,} samples a rank, row-wise Adagrad, all rows in memory, no prefetch, medians over "
        f"{figures['turns']} turns of each. Costs are those of the part errors, and the demand is that of "
        f"the batches. The search had a limit of {_LIMIT:.0%} of all tables on a rank, so not all can be "
        "data-parallel; that plan is there for its prediction alone."
    )
    return Report([Table(title, columns, rows)], goals, [note])


def _tell_measured(figures: Figures) -> Report:
    points, rows, ratios = figures["points"], [], list[float]()
    for rule in (*RULES, BEAM):
        own = [each["plans"] for each in points if rule in each["plans"] and BEAM in each["plans"]]
        taken = [plans[rule]["seconds"]["median"] for plans in own]
        over = [plans[rule]["seconds"]["median"] / plans[BEAM]["seconds"]["median"] for plans in own]
        off, shown = [abs(_error(plans[rule])) for plans in own], [""] * 4
        if own:
            shown = [f"{1e3 * statistics.fmean(taken):.0f}", f"{statistics.fmean(over):.2f}"]
            shown += [f"{statistics.median(off):.0%}", f"{max(off):.0%}"]
            ratios += [statistics.fmean(over)] if rule != BEAM else []
        rows.append([rule, f"{len(own) / len(points):.0%}", *shown])
    title = f"plans of {len(points)} sets of 20 to 100 tables, measured on {figures['ranks']} ranks"
    columns = ["search", "valid", "mean ms", "over the beam's of the same sets", "off by prediction, median", "worst"]
    name = f"time of a step by the best greedy rule over the beam's, {figures['ranks']} real ranks"
    note = (
        "Measured sets: drawn from tables whose ids in a batch add up to those of the 856 tables of Meta's traces of "
        f"2021, with {figures['rows']:.0%} of rows that are drawn, too; {figures['batch']} samples a rank, ids by "
        "Zipf's law with an exponent drawn for each table, row-wise Adagrad, all rows in memory, no prefetch. Ranks "
        "share cores, and so did those that gave the costs."
    )
    goal = Goal(name, round(min(ratios, default=1), 3), at_least=1.0)
    return Report([Table(title, columns, rows)], [goal], [note])


PARTS: Final = {
    "errors": Part(_measure_errors, _tell_errors),
    "plans": Part(partial(_measure, _planned_in_rank, {"batch": "batch", "turns": "plan_turns"}, False), _tell),
    "measured": Part(
        partial(_measure, _drawn_in_rank, {"batch": "measured_batch", "rows": "measured_rows"}, True), _tell_measured
    ),
}

if __name__ == "__main__":
    start("dist_costs")
