"""The search on made-up losses that do not add up, against all choices there are."""

import itertools
import math
import random
from typing import Any

import pytest

from tierstore.precision.held_out import Choice, Part, Unit
from tierstore.precision.search import search, size_of

UNITS = [Unit(name, {"float32": 64 * rows, "float16": 32 * rows, "int8": 24 * rows, "int4": 16 * rows})
         for name, rows in (("a", 10), ("b", 400), ("c", 3000))]  # fmt: skip
UNITS += [Unit("layer", {"float32": 4000, "int8": 1000}), Unit("rest", {"float32": 77})]
FIRST = 0.5


class Losses:
    """Each lowering adds a loss, more for fewer bits; pairs of lowered units add to that."""

    def __init__(self, seed: int, *, on_check: float = 1.0) -> None:
        draw = random.Random(seed)
        self.own: dict[tuple[str, str], float] = {}
        for unit in UNITS:
            added = 0.0
            for dtype in list(unit.size_bytes)[1:]:
                added += draw.uniform(0, 0.002)
                self.own[unit.name, dtype] = added
        self.pairs = {frozenset(pair): draw.uniform(0, 0.001) for pair in itertools.combinations("abc", 2)}
        self.on_check = on_check

    def added(self, choice: Choice) -> float:
        pairs = sum(added for pair, added in self.pairs.items() if pair <= choice.keys())
        return sum(self.own[each] for each in choice.items()) + pairs

    def __call__(self, choice: Choice, part: Part) -> float:
        return FIRST * (1 + self.added(choice) * (self.on_check if part == "check" else 1))


def every_choice() -> list[dict[str, str]]:
    types = [list(unit.size_bytes) for unit in UNITS]
    return [
        {unit.name: dtype for unit, dtype in zip(UNITS, each, strict=True) if dtype != "float32"}
        for each in itertools.product(*types)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [0.0, 0.0005, 0.002, 1.0])
def test_the_bound_holds_together_and_nothing_more_fits(seed: int, bound: float) -> None:
    losses = Losses(seed)
    found = search(UNITS, bound, losses)
    assert losses.added(found.choice) <= bound
    assert found.added["search"] == pytest.approx(losses.added(found.choice), abs=1e-12)
    for unit in UNITS:  # and with one more step the loss is above the bound
        now = unit.size_bytes[found.choice.get(unit.name, "float32")]
        for dtype in [each for each, size in unit.size_bytes.items() if size < now]:
            assert losses.added({**found.choice, unit.name: dtype}) > bound
    fitting = [size_of(UNITS, each) for each in every_choice() if losses.added(each) <= bound]
    least, most = min(fitting), size_of(UNITS, {})
    assert size_of(UNITS, found.choice) - least <= 0.25 * (most - least), "greedy is not this far off the best"
    assert found.choice == {each.unit: each.dtype for each in found.steps if each.became == "kept"}


def test_what_saves_most_for_its_loss_comes_first() -> None:
    losses = Losses(0)
    losses.pairs = {}
    losses.own = {(unit.name, dtype): 1.0 for unit in UNITS for dtype in list(unit.size_bytes)[1:]}
    losses.own |= {("c", "float16"): 1e-4, ("c", "int8"): 2e-4, ("c", "int4"): 9e-4, ("layer", "int8"): -1e-5}
    losses.own |= {("b", "float16"): 1e-6, ("b", "int8"): 1e-6}
    found = search(UNITS, 0.001, losses)
    # Bytes for each change of the loss: b 16,000 / 1e-6; c 96,000 / 1e-4; layer 3,000 / 1e-5; c 24,000 / 1e-4.
    order = [("b", "int8"), ("c", "float16"), ("layer", "int8"), ("c", "int8"), ("c", "int4")]
    kept = [(each.unit, each.dtype) for each in found.steps if each.became == "kept"]
    assert kept == order
    sizes = [each.size_bytes for each in found.steps if each.became == "kept"]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == size_of(UNITS, found.choice)
    assert found.alone["c"]["int8"] == pytest.approx(2e-4)


def test_a_loss_that_falls_by_luck_counts_as_one_that_rises() -> None:
    losses = Losses(1)
    losses.own = {each: -added for each, added in losses.own.items()}
    losses.pairs = {}
    found = search(UNITS, 0.001, losses)
    assert found.choice
    assert -0.001 <= found.added["search"] < 0


def test_steps_are_undone_until_the_other_rows_agree() -> None:
    losses = Losses(3, on_check=2.0)
    found = search(UNITS, 0.004, losses)
    assert 2 * losses.added(found.choice) <= 0.004
    assert found.added["check"] == pytest.approx(2 * losses.added(found.choice), abs=1e-12)
    before: dict[str, str] = {}
    for step in found.steps:
        before |= {step.unit: step.dtype} if step.became != "refused" else {}
    assert losses.added(before) <= 0.004 < 2 * losses.added(before), "the search alone went too far"
    ends: list[Any] = [each.became for each in found.steps if each.became != "refused"]
    assert ends == sorted(ends), "those undone are the last ones"
    undone = next(each for each in found.steps if each.became == "undone")
    assert 2 * losses.added({**found.choice, undone.unit: undone.dtype}) > 0.004, "no more than needed"


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_is_no_number_breaks_every_bound(seed: int) -> None:
    """On either part, of any choice; of the run itself there is no bound to keep."""
    losses, draw = Losses(seed), random.Random(seed)
    broken = {(unit.name, dtype) for unit in UNITS for dtype in unit.size_bytes if draw.random() < 0.3}
    part = draw.choice(["search", "check"])

    def measure(choice: Choice, own: Part) -> float:
        return math.nan if own == part and broken & {*choice.items()} else losses(choice, own)

    assert not broken & {*search(UNITS, 1.0, measure).choice.items()}
    for first in (math.nan, math.inf, 0.0):
        with pytest.raises(ValueError, match="not positive numbers"):
            search(UNITS, 1.0, lambda choice, own, first=first: first if own == part else 1.0)
