"""Greedy plans by hand, and searches for many tables."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.placement.support import costs_of, drawn, table
from tierstore.dist import Plan
from tierstore.dist.placement import Demand, Search, TableDemand, greedy, predict
from tierstore.dist.placement.baselines import RULES, Rule
from tierstore.dist.placement.costs import group_of

# Rows and columns, and ids of a sample: each rule orders them in another way.
SHAPES = {"a": (1000, 4, 1.0), "b": (300, 8, 30.0), "c": (500, 4, 10.0), "d": (100, 16, 1.0)}
TABLES = [table(name, rows, dim) for name, (rows, dim, _) in SHAPES.items()]
DEMAND = Demand(10, {name: TableDemand(10 * ids, min(10 * ids, 50), 60) for name, (_, _, ids) in SHAPES.items()})


@pytest.mark.parametrize(
    ("rule", "together"),
    [
        ("size", "a d"),  # 4000, 2400, 2000, 1600: a | b c, then d to the lighter one
        ("dim", "b a c"),  # 16, 8, 4, 4: d | b, a to b, c to b as the lighter one
        ("lookups", "b"),  # 240, 40, 16, 4: b | all others
        ("size-lookups", "b"),  # 72000, 20000, 4000, 1600
    ],
)
def test_greedy_plans_by_hand(rule: Rule, together: str) -> None:
    found = greedy(TABLES, DEMAND, costs_of(2), rule).plan
    parts = [{name for name, each in found.tables.items() if each.ranks == (rank,)} for rank in (0, 1)]
    assert set(together.split()) in parts
    assert sum(map(len, parts)) == len(TABLES)
    exchanges = {each.exchange for each in found.tables.values()}
    other = "pooled" if exchanges == {"rows"} else "rows"
    plan = Plan(2, {name: each._replace(exchange=other) for name, each in found.tables.items()})  # type: ignore[arg-type]
    own = predict(TABLES, found, DEMAND, costs_of(2)).seconds
    assert own <= predict(TABLES, plan, DEMAND, costs_of(2)).seconds, "the faster exchange"


def test_random_plans_are_of_their_seed() -> None:
    plans = [greedy(TABLES, DEMAND, costs_of(2), "random", seed=seed).plan for seed in (1, 1, *range(2, 9))]
    assert plans[0] == plans[1]
    assert any(plan != plans[0] for plan in plans[2:])
    with pytest.raises(ValueError, match="rule"):
        greedy(TABLES, DEMAND, costs_of(2), "weight")  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([4, 8, 16])), min_size=1, max_size=12),
    share=st.sampled_from([1.0, 1.2, 2.0]),
    ranks=st.sampled_from([2, 3, 4]),
)
def test_limits_are_kept_by_each_search(shapes: list[tuple[int, int]], share: float, ranks: int) -> None:
    tables = [table(f"t{number}", *shape) for number, shape in enumerate(shapes)]
    demand, costs = drawn(tables, ranks), costs_of(ranks)
    # Ranges of rows are rounded up, to a row of 64 bytes at most.
    limit = share * sum(each.size_bytes(4096) for each in tables) / ranks + 64 * len(tables)
    best = Search(tables, demand, costs, rank_bytes=limit).best()
    assert best.size_bytes.max() <= limit
    for rule in RULES:
        try:
            found = greedy(tables, demand, costs, rule, rank_bytes=limit)
        except ValueError:
            continue
        assert found.size_bytes.max() <= limit
        assert set(found.plan.tables) == set(best.plan.tables)
        assert best.seconds <= found.seconds * 1.02, "greedy plans are among those that are searched"


def test_plans_are_balanced_where_that_is_free() -> None:
    # Four ranks share a core, so a step takes what all do together, wherever tables are.
    tables = [table(f"t{number}", 100) for number in range(8)]
    demand = Demand(10, {each.name: TableDemand(10 + n, 10 + 10 * n, 20 + 20 * n) for n, each in enumerate(tables)})
    alone = {"pooled": {"groups": 1e6}, "data_parallel": {"groups": 1e6}}
    found = Search(tables, demand, costs_of(4, other=alone, cores=1)).best()
    assert found.served.max() <= 1.05 * found.served.mean()


def test_tables_change_their_form_together_to_save_a_group() -> None:
    tables = [table(f"t{number}", 1000 + number) for number in range(30)]
    costs = costs_of(
        2, other={"rows": {"groups": 100.0}, "pooled": {"groups": 100.0}, "data_parallel": {"groups": 100.0}}
    )
    found = Search(tables, drawn(tables, 2), costs).best()
    kinds = {group_of(each, 8).kind for each in found.plan.tables.values()}
    assert len(kinds) == 1


def test_the_command_takes_each_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tierstore.cli import main
    from tierstore.cli.shard import _SEARCHES

    assert ("beam", *get_args(Rule)) == _SEARCHES
    costs, workload, plan = (tmp_path / name for name in ("ranks.json", "work.toml", "plan.json"))
    costs_of(2).save(costs)
    tables = "".join(
        f'[[table]]\nname = "{name}"\nnum_embeddings = {rows}\nembedding_dim = {dim}\npooling_factor = {ids}\n'
        for name, (rows, dim, ids) in SHAPES.items()
    )
    workload.write_text(f'[workload]\noptimizer = "sgd"\nbatch_samples = 20\n{tables}')
    command: list[Any] = ["shard", "plan", str(workload), str(plan), "--costs", str(costs), "--force"]
    for rule in _SEARCHES:
        assert main([*command, "--search", rule]) == 0
        types = {each.sharding_type for each in Plan.load(plan).tables.values()}
        assert rule == "beam" or types == {"table_wise"}
    assert "over 2 ranks takes" in capsys.readouterr().out
    assert main([*command, "--search", "size", "--limit", "15KiB"]) == 2
