"""The benchmark of recommendation models: whether operators, queries and notes are what they are called."""

import tomllib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from bench import rmc
from bench.common import Run
from bench.data import ROOT
from bench.serving.operators import OPERATORS, operator_of, operator_seconds
from bench.serving.zoo import IN_MEMORY, MODELS, PLACEMENTS, ZooModel

CONFIG = tomllib.loads((ROOT / "bench" / "rmc.toml").read_text())


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(config=CONFIG | CONFIG["quick"], quick=True, folder=tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("name", ["rmc1", "mlperf-dlrm-v2"])
def test_layers_of_a_served_program_are_told_apart(name: str, request_: Run) -> None:
    model = ZooModel(request_, name)
    graph = torch.export.load(model.program).module().graph
    found = Counter(operator_of(node) for node in graph.nodes if node.target is torch.ops.aten.linear.default)
    crosses = 2 * model.shape.get("cross_layers", 0)
    wanted = {"dense": len(model.shape["bottom_mlp"]) + len(model.shape["top_mlp"]) + 2, "interaction": crosses}
    assert found == Counter({key: count for key, count in wanted.items() if count})


def test_every_operator_takes_time_and_torch_agrees(request_: Run) -> None:
    for seconds in operator_seconds(ZooModel(request_, "rmc1")).values():
        assert min(seconds.values()) > 0
        assert sum(seconds[name] for name in OPERATORS) == seconds["all"]


def test_queries_have_the_ids_that_are_published(request_: Run) -> None:
    model = ZooModel(request_, "mlperf-dlrm-v2")
    one, two = model.queries([2, 3], seed=1, store_name="ads")
    assert (one.model, len(one.inputs["dense"]), len(two.inputs["dense"])) == ("ads.mlperf-dlrm-v2", 2, 3)
    published = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
    assert two.inputs["lengths"].tolist() == [[many] * 3 for many in published]
    parts = np.split(two.inputs["values"], np.cumsum(two.inputs["lengths"].sum(1))[:-1])
    assert all(own.max() < rows for own, rows in zip(parts, model.tables.values(), strict=True))


def test_a_server_begins_with_the_rows_looked_up_most(request_: Run) -> None:
    model = ZooModel(request_, "rmc1")
    with tierstore.open(model.store, mode="r", ddr="64MiB") as store:
        keys = {int(row) | table.index << 40 for table in store.tables.values() for row in range(500)}
    assert sorted(model.keys_by_use.tolist()) == sorted(keys)
    hot = set(model.keys_by_use[-400:].tolist())  # a tenth, by which a tenth of the lookups would be found by chance
    asked = np.concatenate([query.inputs["values"][:80] for query in model.queries([1] * 200, seed=9)])  # of table 0
    assert np.mean([each in hot for each in asked.tolist()]) > 0.5


def test_notes_say_what_figures_show() -> None:
    def case(rate: float, mib: int) -> dict[str, Any]:
        bound = {"rate": rate, "hit_rate": 1.0, "server_cores": 1.0}
        return {"alone_p95": 1.0, "samples": 27, "bounds": {"100": bound}, "pss": mib << 20, "anonymous": 0}

    cases = {f"{n} x {IN_MEMORY}": case(*own) for n, own in {1: (10, 100), 2: (30, 150), 4: (20, 250)}.items()}
    cases[f"4 x {PLACEMENTS[1]}"] = case(40, 50)  # with most, but not of those that are compared
    told = rmc.PARTS["colocated"].tell({"model": "m", "cases": cases})
    assert f"Here 2 x {IN_MEMORY} carry most, 3.00 times what one does, and 4 x {IN_MEMORY} 2.00 times" in told.notes[0]
    assert [row[4] for row in told.tables[0].rows] == ["1.00", "3.00", "2.00", "4.00"]

    def size(embedding: float, dense: float) -> dict[str, float]:
        own = {"embedding": embedding, "dense": dense, "interaction": 0.1, "rest": 0.1}
        return own | {"all": sum(own.values()), "torch's embedding_bag": 1, "torch's layers": 1}

    own = {"sizes": {"1": size(1, 2), "8": size(6.8, 1)}, "sample_bytes": 1, "table_bytes": 1}
    told = rmc.PARTS["operators"].tell({"models": dict.fromkeys(MODELS, own)})
    shown = ("rmc1 by embedding, here with 8 of", "rmc3 by dense, here with 1 of", "from 31% to 85%", "time to 31%")
    assert all(text in told.notes[1] for text in shown)
