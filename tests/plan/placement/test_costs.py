"""What a step costs: by hand, and found again from steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plan.placement.support import costs_of, workload_of
from tierstore.dist.plan import Plan, Sharding
from tierstore.plan import TableShape
from tierstore.plan.placement import RankCosts, TableDemand, predict
from tierstore.plan.placement.costs import ASKER, KINDS, OWNER, Amounts, Kind, Probe, busiest

A = TableShape(name="a", num_embeddings=100, embedding_dim=8)
B = TableShape(name="b", num_embeddings=50, embedding_dim=8)
DEMAND = {"a": TableDemand(32, 20, 30, np.array([5.0, 3.0]), np.array([3.0, 1.0])), "b": TableDemand(32, 10, 15)}


def seconds(plan: dict[str, Sharding], **changes: Any) -> float:
    """Of a step of both tables over two ranks."""
    return predict(workload_of(A, B), Plan(2, plan), DEMAND, costs_of(2, **changes)).seconds


def test_each_exchange_by_hand() -> None:
    first, second, both = ((0,), (1,), (0, 1))
    asker = 3 + 2 * 0.1 + 2 * 32 * 0.01 + (20 + 10) * 0.02
    whole = {"a": Sharding("table_wise", first), "b": Sharding("table_wise", second)}
    # Rank 0 looks up each rank's 20 rows.
    assert seconds(whole) == pytest.approx(asker + 40 * (0.02 + 8 * 0.002))
    by_rows = {"a": Sharding("row_wise", both), "b": Sharding("row_wise", both)}
    # Three quarters of a's rows, and half of b's, are the first rank's.
    assert seconds(by_rows) == pytest.approx(asker + (30 + 10) * (0.02 + 8 * 0.002))
    # Columns: both look up all rows, half as wide.
    columns = {"a": Sharding("column_wise", both), "b": Sharding("column_wise", both)}
    assert seconds(columns) == pytest.approx(asker + 60 * (0.02 + 4 * 0.002))
    # Pooled: the asker gets 32 bags of 8 columns of each owner; ids are divided 5 to 3, rows 3 to 1.
    pooled = {"a": Sharding("row_wise", both, "pooled"), "b": Sharding("table_wise", second, "pooled")}
    asker = 4 + 64 * 0.01 + (2 + 1) * 32 * 8 * 0.001
    owners = [40 * 0.03 + 0.75 * 30 * 8 * 0.001, (24 + 64) * 0.03 + (0.25 * 30 + 15) * 8 * 0.001]
    assert seconds(pooled) == pytest.approx(asker + max(owners))
    copied = {"a": Sharding("data_parallel", both), "b": Sharding("data_parallel", both)}
    assert seconds(copied) == pytest.approx(2 + 30 * 0.05 + 45 * (0.04 + 8 * 0.001))


def test_groups_follow_one_another_and_ranks_share_cores() -> None:
    apart = {"a": Sharding("table_wise", (0,)), "b": Sharding("data_parallel", (0, 1))}
    alone = 3 + 0.1 + 32 * 0.01 + 20 * 0.02
    copied = 2 + 10 * 0.05 + 15 * 0.048
    assert seconds(apart) == pytest.approx(alone + 40 * 0.036 + copied)
    # All ranks update their copies on the one core.
    assert seconds(apart, cores=1) == pytest.approx(alone + 40 * 0.036 + copied + 15 * 0.048)


def test_a_hosts_ranks_share_its_cores_and_no_other() -> None:
    work = np.array([[4.0, 0], [1, 2], [0, 0], [3, 9]])
    assert busiest(work, cores=2, local_ranks=4).tolist() == [4, 9]
    assert busiest(work, cores=1, local_ranks=4).tolist() == [8, 11]
    assert busiest(work, cores=1, local_ranks=2).tolist() == [5, 9]


def test_a_plan_says_what_ranks_hold_and_look_up() -> None:
    plan = Plan(2, {"a": Sharding("row_wise", (0, 1)), "b": Sharding("data_parallel", (0, 1))})
    found = predict(workload_of(A, B), plan, DEMAND, costs_of(2))
    assert found.served.tolist() == [30 + 32 + 20, 10 + 32 + 20]
    assert found.size_bytes.tolist() == [(50 + 50) * 32] * 2
    with pytest.raises(ValueError, match="no table 'b'"):
        predict(workload_of(A, B), plan._replace(tables={"a": plan.tables["a"]}), DEMAND, costs_of(2))
    with pytest.raises(ValueError, match="for 2 ranks and the costs are of 4"):
        predict(workload_of(A, B), plan, DEMAND, costs_of(4))


@pytest.mark.parametrize("cores", [2, 4])
def test_costs_are_found_again_from_steps(cores: int) -> None:
    given, generator = costs_of(4, cores=cores), np.random.default_rng(1)

    def probe(kind: Kind) -> Probe:
        amounts = Amounts(generator.random(len(ASKER)) * 100, generator.random((4, len(OWNER))) * 100)
        owners = amounts.owners * np.array([[1.0], [0.5], [0.25], [0.0]])  # so that rank 0 is the busiest in all
        own = amounts._replace(owners=owners)
        took = own.asker @ given.asker(kind) + busiest(owners, cores, 4) @ given.owner(kind)
        return Probe(kind, own, float(took))

    probes = [probe(kind) for kind in KINDS for _ in range(40)]
    found = RankCosts.fitted(probes, world_size=4, local_world_size=4, cores=cores, optimizer="sgd", source="a test")
    for kind in KINDS:
        assert found.seconds[kind] == pytest.approx(given.seconds[kind], abs=1e-9)
        assert found.errors[kind] == pytest.approx(0, abs=1e-9)


def test_a_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    given = costs_of(2, source="here")
    given.save(path)
    assert RankCosts.load(path) == given
    with pytest.raises(FileExistsError):
        given.save(path)
    replace(given, source="there").save(path, force=True)
    assert RankCosts.load(path).source == "there"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no JSON", "Expecting value"),
        ("[]", r"costs of ranks = \[\]: expected a table"),
        ({"version": 0}, "version=0: expected a whole number from 1 to 1"),
        ({"seconds": {}}, 'costs of ranks.seconds: key "rows" is missing'),
        ({"errors": dict.fromkeys(KINDS, "some")}, "costs of ranks.errors.rows = 'some': expected a number"),
        ({"errors": dict.fromkeys(KINDS, -1.0)}, "rows=-1.0: expected a number from 0"),
        ({"world_size": "2"}, "costs of ranks.world_size = '2': expected an integer"),
        ({"cores": 0}, "cores=0: expected a whole number from 1"),
        ({"reduce_us": float("nan")}, "reduce_us=nan: expected a number from 0"),
        ({"optimizer": "best"}, 'costs of ranks.optimizer = \'best\': expected "none" or "sgd"'),
        ({"more": 1}, 'unknown key "more"'),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, change: Any, reason: str) -> None:
    path = tmp_path / "ranks.json"
    costs_of(2).save(path)
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"{path}: .*{reason}.*measure-ranks writes costs of ranks"):
        RankCosts.load(path)
    with pytest.raises(FileNotFoundError):
        RankCosts.load(tmp_path / "none.json")
