"""Timed lookups: that they are run and told, whatever time they take."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tierstore.plan.placement import QUICK, Timing, fit_cost, measure_costs, measure_lookups
from tierstore.plan.placement.timing import designed_shapes, draw_bags


def test_a_quick_sample_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = measure_costs(tmp_path, timing=QUICK, progress=lambda done, total: told.append((done, total)))
    assert [each.shape for each in found] == list(designed_shapes(QUICK))[: len(found)]
    assert told[-1] == (len(found), QUICK.count)
    assert all(min(each.forward_s, each.backward_s, each.call_s) > 0 for each in found)
    assert not list(tmp_path.iterdir())
    if len(found) >= 10:
        assert fit_cost(found).num_measurements == len(found)


def test_without_an_optimizer_there_is_no_backward(tmp_path: Path) -> None:
    shapes = designed_shapes(QUICK)[:2]
    found = measure_lookups(shapes, tmp_path, timing=replace(QUICK, optimizer="none"))
    assert [each.backward_s for each in found] == [0.0, 0.0]
    assert all(each.forward_s > 0 for each in found)


def test_time_ends_it_after_the_first_tables(tmp_path: Path) -> None:
    found = measure_lookups(designed_shapes(QUICK), tmp_path, timing=replace(QUICK, seconds=0.0))
    assert 0 < len(found) < QUICK.count


def test_shapes_are_spread_and_within_bounds() -> None:
    timing = Timing(count=70, seed=2)
    shapes = designed_shapes(timing)
    assert shapes == designed_shapes(timing)
    assert len(set(shapes)) == 70
    assert max(shape.num_embeddings for shape in shapes) <= timing.max_rows
    assert max(shape.num_embeddings * (shape.weight_bytes + 8) for shape in shapes) <= timing.max_bytes
    assert max(shape.lookups for shape in shapes) <= timing.max_lookups * 1.01
    assert min(shape.num_embeddings for shape in shapes) >= 100
    # Ten of each width, and exponents one in each seventieth.
    assert np.bincount([shape.embedding_dim for shape in shapes])[[4, 8, 16, 32, 64, 128, 256]].tolist() == [10] * 7
    assert sorted(int(shape.exponent / 1.5 * 70 + 1e-2) for shape in shapes)[::10] == list(range(0, 70, 10))


def test_bags_have_the_pooling_factor_on_average() -> None:
    (shape,) = (each._replace(pooling_factor=2.25, batch_samples=4000) for each in designed_shapes(QUICK)[:1])
    bags = draw_bags(np.random.default_rng(0), shape)
    lengths = np.diff(bags.offsets.numpy())
    assert set(lengths.tolist()) == {2, 3}
    assert abs(lengths.mean() - 2.25) < 6 * np.sqrt(0.25 * 0.75 / 4000)
    assert len(bags.ids) == lengths.sum()
    assert int(bags.ids.max()) < shape.num_embeddings


@pytest.mark.parametrize("change", [{"count": 0}, {"seconds": -1.0}, {"rounds": 0}, {"threads": 0}])
def test_wrong_settings(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Timing(**change)  # type: ignore[arg-type]
