"""Greedy plans by hand, searches for many tables, and costs that are learned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.placement.support import costs_of, drawn, table
from tierstore.dist import Plan
from tierstore.dist.placement import Demand, RankCosts, Search, TableDemand, greedy, predict
from tierstore.dist.placement.baselines import RULES, Rule
from tierstore.dist.placement.costs import AMOUNTS, KINDS, Group, Kind, Probe, group_of
from tierstore.dist.placement.learned import Correction

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


def _probes(seed: int, count: int, bend: float) -> list[Probe]:
    """Steps that take the linear costs, and more the more rows a rank looks up: as where caches overflow."""
    generator, given, found = np.random.default_rng(seed), costs_of(2), list[Probe]()
    for number in range(count):
        kind: Kind = KINDS[number % 3]
        work = 10 ** generator.uniform(0, 3, len(AMOUNTS))
        amounts, group = np.outer([1.0, generator.random()], work), Group(kind, 8, 1)
        seconds = given.group_s(group, amounts) * (1 + bend * np.log10(work[AMOUNTS.index("served")]) ** 2)
        found.append(Probe(group, amounts, float(seconds * generator.lognormal(sigma=0.02))))
    return found


def _fitted(bend: float) -> RankCosts:
    return RankCosts.fitted(
        _probes(1, 360, bend), held_out=_probes(2, 90, bend), world_size=2, local_world_size=2, cores=2, optimizer="sgd"
    )


def test_a_correction_is_learned_of_costs_that_are_not_linear(tmp_path: Path) -> None:
    found = _fitted(0.3)
    assert found.learned_errors is not None
    assert found.learned_kinds == KINDS
    for kind in KINDS:
        assert getattr(found.learned_errors, kind) < 0.75 * getattr(found.errors, kind)
    # Errors are of what is predicted.
    assert found.errors_of(_probes(2, 90, 0.3)) == found.learned_errors
    assert _fitted(0.3) == found
    found.save(tmp_path / "ranks.json")
    assert RankCosts.load(tmp_path / "ranks.json") == found
    # Far from all steps the linear costs remain.
    group, amounts = Group("rows", 8, 1), np.full((2, len(AMOUNTS)), 1e30)
    assert found.group_s(group, amounts) == pytest.approx(replace(found, learned_kinds=()).group_s(group, amounts))


def test_linear_costs_stay_where_nothing_is_learned() -> None:
    found = _fitted(0.0)
    assert found.learned_errors is not None
    assert all(getattr(found.errors, kind) < 0.03 for kind in KINDS)
    for kind in KINDS:
        is_better = getattr(found.learned_errors, kind) < getattr(found.errors, kind)
        assert (kind in found.learned_kinds) == is_better


def test_files_without_a_correction_are_read(tmp_path: Path) -> None:
    path, given = tmp_path / "ranks.json", costs_of(2)
    given.save(path)
    content = json.loads(path.read_text())
    for name in ("learned", "learned_errors", "learned_kinds"):
        del content[name]
    path.write_text(json.dumps(content))
    assert RankCosts.load(path) == given
    path.write_text(
        json.dumps(content | {"learned": {"means": [0], "scales": [1], "points": [[1, 2]], "weights": [1]}})
    )
    with pytest.raises(ValueError, match="learned = "):
        RankCosts.load(path)


def test_learned_costs_choose_among_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [table("a", 500), table("b", 700)]
    demand, linear = drawn(tables, 2), costs_of(2)
    kept = Search(tables, demand, linear).best()
    (kind,) = {group_of(each, 8).kind for each in kept.plan.tables.values()}
    one = Correction(means=(0.0,), scales=(1.0,), points=((0.0,),), weights=(0.0,))
    learned = replace(linear, learned=one, learned_kinds=(kind,))
    monkeypatch.setattr(Correction, "factors", lambda *_: np.array([1000.0]))
    chosen = Search(tables, demand, learned).best()
    assert chosen.seconds == predict(tables, chosen.plan, demand, learned).seconds
    assert chosen.seconds == predict(tables, chosen.plan, demand, linear).seconds, "of another kind"


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
