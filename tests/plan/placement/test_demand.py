"""What a step asks of tables, against sets of rows."""

from dataclasses import replace

import numpy as np
import pytest

from tests.plan.placement.support import workload_of
from tierstore.plan import Accesses, TableShape, accesses_of
from tierstore.plan.placement import TableDemand, expected_demand, measured_demand
from tierstore.plan.placement.demand import shares_of
from tierstore.plan.traces import generate

TABLES = (
    TableShape(name="a", num_embeddings=100, embedding_dim=4, pooling_factor=3.0, exponent=1.2),
    TableShape(name="b", num_embeddings=4000, embedding_dim=8, pooling_factor=1.0, exponent=0.5),
)


def test_what_a_trace_has_is_counted_by_rank() -> None:
    """Of two batches of table a; ranks have the first and the second half of each."""
    batches = [[7, 7, 90, 7], [3, 4, 4, 99, 99, 99]]
    keys = np.array([row for batch in batches for row in batch])
    found = measured_demand(workload_of(*TABLES), Accesses(keys, np.array([0, 4, 10]), ("a",)), 2)
    own = [{7}, {90, 7}, {3, 4}, {99}]
    assert found["a"][:3] == (10 / 4, sum(map(len, own)) / 4, sum(len(set(batch)) for batch in batches) / 2)
    assert shares_of(found["a"].hot_rows, 2) == pytest.approx([4 / 6, 2 / 6])
    assert shares_of(found["a"].hot_ids, 2) == pytest.approx([6 / 10, 4 / 10])
    assert shares_of(found["a"].hot_ids, 1) == pytest.approx([1])
    assert found["b"] == TableDemand(0, 0, 0)


def test_a_sample_of_the_rows_stands_for_all() -> None:
    keys = np.array([1, 2, 2, 5])
    sampled = Accesses(keys, np.array([0, 4]), ("a",), 0.5, all_lookups=(10,))
    ids, rows, all_rows, *_ = measured_demand(workload_of(*TABLES), sampled, 2)["a"]
    assert (ids, rows, all_rows) == (5, 4, 6)
    many = measured_demand(workload_of(*TABLES), replace_rate(sampled, 0.01), 2)["a"]
    assert many.rows == many.ids, "no more rows than ids"


def replace_rate(accesses: Accesses, rate: float) -> Accesses:
    return accesses._replace(sampling_rate=rate)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_formula_says_what_drawn_ids_have(ranks: int) -> None:
    workload = replace(workload_of(*TABLES), batch_samples=600)
    drawn = measured_demand(workload, accesses_of(generate(workload, samples=600 * 30, seed=2)), ranks)
    for name, (ids, rows, all_rows, *_) in expected_demand(workload, ranks).items():
        assert drawn[name].ids == ids
        assert drawn[name].rows == pytest.approx(rows, rel=0.02)
        assert drawn[name].all_rows == pytest.approx(all_rows, rel=0.02)
    assert shares_of(drawn["b"].hot_rows, 4) == pytest.approx([0.25] * 4, rel=0.2)
