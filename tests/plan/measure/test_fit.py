"""Costs from loops: those that made them, and the best there are."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore import KeyedJaggedTensor
from tierstore.kernels.least_squares import solve_nonnegative
from tierstore.plan import SoftwareCosts
from tierstore.plan.host import per_byte, pooling_work, updating_work
from tierstore.plan.measure.fit import STAGES, Loop, cost_ns, fit_costs
from tierstore.plan.measure.loops import Amounts
from tierstore.rows import RowLayout


def synthetic(costs: SoftwareCosts, seed: int, noise: float = 0.0) -> list[Loop]:
    """Loops of amounts at random that take what the costs say; each stage has the work of those before it too."""
    generator = np.random.default_rng(seed)
    own = dataclasses.asdict(costs)
    loops, before = [], []
    for stage, kinds in STAGES.items():
        before += kinds
        for number in range(len(kinds) + 3):
            work = {kind: float(generator.uniform(10, 1000)) for kind in before}
            ns = cost_ns(work, own) * (1 + noise * generator.standard_normal())
            beside_ns = float(generator.uniform(0, ns))
            loops.append(Loop(f"{stage} {number}", stage, ns + beside_ns, work, beside_ns))
    return loops


def test_every_cost_has_its_stage() -> None:
    every = [kind for kinds in STAGES.values() for kind in kinds]
    assert sorted(every) == sorted(field.name for field in dataclasses.fields(SoftwareCosts))


@pytest.mark.parametrize("seed", range(5))
def test_known_costs_are_found_again(seed: int) -> None:
    generator = np.random.default_rng(seed)
    known = SoftwareCosts(
        **{
            field.name: float(generator.uniform(0.1, 50) * (generator.random() > 0.2))
            for field in dataclasses.fields(SoftwareCosts)
        }
    )
    loops = synthetic(known, seed)
    found = fit_costs(loops)
    assert dataclasses.asdict(found.costs) == pytest.approx(dataclasses.asdict(known), rel=1e-6, abs=1e-6)
    assert found.fitted_ns == pytest.approx([loop.ns for loop in loops])


def test_the_loops_and_the_host_count_alike() -> None:
    generator = np.random.default_rng(0)
    costs = SoftwareCosts(**{field.name: float(generator.random()) for field in dataclasses.fields(SoftwareCosts)})
    layout = RowLayout(dim=30, state_dim=1)
    given = {"ids": 50, "rows": 20, "bags": 10, "layout": layout}
    ids = np.concatenate([np.arange(20), np.zeros(30, np.int64)])
    amounts = Amounts.of([KeyedJaggedTensor(["f"], torch.from_numpy(ids), offsets=torch.arange(0, 51, 5))], layout)
    own = dataclasses.asdict(costs)
    lookup = costs.batch_us * 1000 + costs.ns_of(pooling_work(**given))
    assert cost_ns(amounts.lookup(), own) == pytest.approx(lookup)
    assert cost_ns(amounts.training(), own) == pytest.approx(costs.step_us * 1000 + costs.ns_of(updating_work(**given)))
    hits = lookup + costs.admission_ns(ids=50, rows=20)
    assert cost_ns(amounts.admitting() | amounts.lookup(), own) == pytest.approx(hits)
    missing = per_byte("miss", 20, layout.row_bytes)
    missed = hits + 20 * (costs.miss_ns + costs.miss_ns_per_byte * layout.row_bytes)
    assert cost_ns(amounts.admitting() | amounts.lookup() | missing, own) == pytest.approx(missed)


def test_noisy_loops_are_fitted_better_than_by_what_made_them() -> None:
    known = SoftwareCosts(**{field.name: 10.0 for field in dataclasses.fields(SoftwareCosts)})
    loops = [loop for loop in synthetic(known, 0, noise=0.05) if loop.stage == "lookup"]

    def error(ns: Sequence[float]) -> float:
        return sum((each / loop.ns - 1) ** 2 for each, loop in zip(ns, loops, strict=True))

    made_by = [cost_ns(loop.work, dataclasses.asdict(known)) for loop in loops]
    assert 0 < error(fit_costs(loops).fitted_ns) < error(made_by)


def test_a_stage_that_was_not_measured_costs_nothing() -> None:
    loops = [loop for loop in synthetic(SoftwareCosts(batch_us=3.0, read_ns=7.0), 0) if loop.stage != "cold"]
    costs = fit_costs(loops).costs
    assert costs.read_ns == 0
    assert costs.batch_us == pytest.approx(3)


def best_of_all(matrix: np.ndarray, target: np.ndarray) -> float:
    """The least error of any x >= 0: that of least squares on one of all choices of unknowns that may differ from 0."""
    unknowns, least = matrix.shape[1], float(np.linalg.norm(target))
    for count in range(1, unknowns + 1):
        for chosen in itertools.combinations(range(unknowns), count):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found >= 0).all():
                least = min(least, float(np.linalg.norm(part @ found - target)))
    return least


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 8))
def test_no_other_costs_fit_better(seed: int, unknowns: int, equations: int) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(equations, unknowns)) * 10.0 ** generator.integers(-6, 6, unknowns)
    target = generator.normal(size=equations)
    found = solve_nonnegative(matrix, target)
    assert (found >= 0).all()
    error = float(np.linalg.norm(matrix @ found - target))
    assert error == pytest.approx(best_of_all(matrix, target), rel=1e-6, abs=1e-9)


def test_nothing_explains_what_goes_the_other_way() -> None:
    assert solve_nonnegative(np.ones((3, 2)), -np.ones(3)).tolist() == [0, 0]
    assert solve_nonnegative(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]
