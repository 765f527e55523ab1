"""What a step costs: by hand, and found again from steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.placement.support import costs_of, table
from tierstore.dist import Plan, Sharding
from tierstore.dist.placement import Demand, RankCosts, TableDemand, predict
from tierstore.dist.placement.costs import AMOUNTS, KINDS, Group, Kind, Probe

TABLES = [table("a", 100), table("b", 50)]
HOT = TableDemand(32, 20, 30, np.array([5.0, 3.0]), np.array([3.0, 1.0]))
DEMAND = Demand(32, {"a": HOT, "b": TableDemand(32, 10, 15)})
FIRST, SECOND, BOTH = (0,), (1,), (0, 1)


def seconds(a: Sharding, b: Sharding, **changes: Any) -> float:
    """Of a step of both tables over two ranks."""
    return predict(TABLES, Plan(2, {"a": a, "b": b}), DEMAND, costs_of(2, **changes)).seconds


def test_each_exchange_by_hand() -> None:
    requester = 3 + 2 * 0.1 + 2 * 32 * 0.01 + (20 + 10) * 0.02
    # Rank 0 looks up each rank's 20 rows.
    whole = seconds(Sharding("table_wise", FIRST), Sharding("table_wise", SECOND))
    assert whole == pytest.approx(requester + 40 * (0.02 + 8 * 0.002))
    # Three quarters of a's rows, and half of b's, are the first rank's.
    by_rows = seconds(Sharding("row_wise", BOTH), Sharding("row_wise", BOTH))
    assert by_rows == pytest.approx(requester + (30 + 10) * (0.02 + 8 * 0.002))
    # Columns: both look up all rows, half as wide.
    columns = seconds(Sharding("column_wise", BOTH), Sharding("column_wise", BOTH))
    assert columns == pytest.approx(requester + 60 * (0.02 + 4 * 0.002))
    # Pooled: the requester gets 32 bags of 8 columns of each owner; ids are divided 5 to 3, rows 3 to 1.
    pooled = seconds(Sharding("row_wise", BOTH, "pooled"), Sharding("table_wise", SECOND, "pooled"))
    owners = [40 * 0.03 + 0.75 * 30 * 8 * 0.001, (24 + 64) * 0.03 + (0.25 * 30 + 15) * 8 * 0.001]
    assert pooled == pytest.approx(4 + 64 * 0.01 + (2 + 1) * 32 * 8 * 0.001 + max(owners))
    copied = seconds(Sharding("data_parallel", BOTH), Sharding("data_parallel", BOTH))
    assert copied == pytest.approx(2 + 30 * 0.05 + 45 * (0.04 + 8 * 0.001))


@pytest.mark.parametrize("cores", [1, 4])
def test_costs_are_found_again_from_steps(cores: int) -> None:
    given, generator = costs_of(4, cores=cores), np.random.default_rng(1)

    def probe(kind: Kind, parts: int) -> Probe:
        amounts = np.outer([100.0, 50, 25, 0], generator.random(len(AMOUNTS)))  # rank 0 is the busiest in all
        group = Group(kind, 8, parts)
        return Probe(group, amounts, given.group_s(group, given.work_s(group, amounts)))

    probes = [probe(kind, 1 + number % 2) for kind in KINDS for number in range(40)]
    found = RankCosts.fitted(probes, world_size=4, local_world_size=4, cores=cores, optimizer="sgd")
    assert max(getattr(found.errors, kind) for kind in KINDS) < 1e-9
    for kind in KINDS:
        own, expected = (vars(getattr(costs.seconds, kind)) for costs in (found, given))
        assert own == pytest.approx(expected, abs=1e-9)


def test_a_file_has_them(tmp_path: Path) -> None:
    path, given = tmp_path / "ranks.json", costs_of(2, source="here")
    given.save(path)
    assert RankCosts.load(path) == given
    with pytest.raises(FileExistsError):
        given.save(path)
    replace(given, source="there").save(path, force=True)
    assert RankCosts.load(path).source == "there"
    with pytest.raises(FileNotFoundError):
        RankCosts.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("no JSON", "Expecting value"),
        ({"version": 0}, "version"),
        ({"errors": {"rows": -1.0, "pooled": 0.0, "data_parallel": 0.0}}, r"errors: rows=-1\.0"),
        ({"world_size": "2"}, "world_size"),
        ({"more": 1}, "more"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: Any, key: str) -> None:
    path = tmp_path / "ranks.json"
    costs_of(2).save(path)
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"{path}: .*{key}.*tierstore shard measure"):
        RankCosts.load(path)
