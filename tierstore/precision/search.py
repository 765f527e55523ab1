"""A greedy search for the fewest bytes, as for multiple-choice knapsacks (Sinha and Zoltners, 1979): the type comes
first that saves most bytes for the loss it adds. Losses do not add up, so each step is measured with all before it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

Choice = Mapping[str, str]
"""The type of each unit that is lowered."""
Part = Literal["search", "check"]
Measure = Callable[[Choice, Part], float]
"""The log loss of a choice on a part of the held-out rows."""
_LEAST_LOSS: Final = 1e-9
"""Relative; less counts as this, so that among types that cost nothing the one that saves most comes first."""


class Unit(NamedTuple):
    """A table's rows, or a layer's weights. ``size_bytes``: by type; the first is what it has, the others are fewer."""

    name: str
    size_bytes: Mapping[str, int]

    @property
    def own(self) -> str:
        return next(iter(self.size_bytes))


class Step(NamedTuple):
    """``added``: loss of this and all that was kept before, on the rows of the search, relative to that of no unit
    lowered; ``size_bytes``: of all units then."""

    unit: str
    dtype: str
    size_bytes: int
    added: float
    became: Literal["kept", "refused", "undone"]


class Found(NamedTuple):
    """``alone``: size of the change of the loss by each unit alone, by type. ``first``: log loss of no unit lowered,
    ``added`` relative to it, both by part."""

    choice: Choice
    alone: Mapping[str, Mapping[str, float]]
    steps: Sequence[Step]
    first: Mapping[Part, float]
    added: Mapping[Part, float]


def search(units: Sequence[Unit], bound: float, measure: Measure) -> Found:
    """A choice that adds at most ``bound`` on both parts; ``measure`` always gives the same. On the search's rows
    a loss that falls counts as one that rises: fewer bits help by luck, and on other rows they would not."""
    first: dict[Part, float] = {part: measure({}, part) for part in ("search", "check")}
    if not all(0 < loss < float("inf") for loss in first.values()):
        raise ValueError(f"the run's log losses are {first}, not positive numbers: no bound is relative to these")

    def added(choice: Choice, part: Part = "search") -> float:
        return measure(choice, part) / first[part] - 1

    lower = [(unit, dtype) for unit in units for dtype in unit.size_bytes if dtype != unit.own]
    alone = {unit.name: {unit.own: 0.0} for unit in units}
    for unit, dtype in lower:
        alone[unit.name][dtype] = abs(added({unit.name: dtype}))
    steps: list[Step] = []

    def gain(unit: Unit, dtype: str) -> float:
        now = _kept(steps).get(unit.name, unit.own)
        saved = unit.size_bytes[now] - unit.size_bytes[dtype]
        return saved / max(alone[unit.name][dtype] - alone[unit.name][now], _LEAST_LOSS)

    while left := [each for each in lower if gain(*each) > 0]:
        best = max(left, key=lambda each: gain(*each))
        choice = {**_kept(steps), best[0].name: best[1]}
        joint = added(choice)
        steps.append(
            Step(best[0].name, best[1], size_of(units, choice), joint, "kept" if abs(joint) <= bound else "refused")
        )
        lower.remove(best)
    while not added(_kept(steps), "check") <= bound:  # NaN breaks it, too
        last = max(index for index, step in enumerate(steps) if step.became == "kept")
        steps[last] = steps[last]._replace(became="undone")
    choice = _kept(steps)
    return Found(choice, alone, steps, first, {part: added(choice, part) for part in first})


def _kept(steps: Sequence[Step]) -> dict[str, str]:
    return {step.unit: step.dtype for step in steps if step.became == "kept"}


def size_of(units: Sequence[Unit], choice: Choice) -> int:
    """Bytes of all units."""
    return sum(each.size_bytes[choice.get(each.name, each.own)] for each in units)
