"""From the times of loops to what each unit of work costs: least squares, no cost below zero.

The loops come in stages, each with work that those before it did not have, so that a stage has few unknown costs and
its errors do not reach back.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ...kernels.least_squares import solve_nonnegative
from ..host import SoftwareCosts


def _of_rows(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}_{unit}" for name in names for unit in ("ns", "ns_per_byte"))


STAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "lookup": ("batch_us", *_of_rows("pool", "pool_row", "pool_bag")),
    "training": ("step_us", *_of_rows("update", "update_row", "update_bag")),
    "hits": ("admit_ns", "admit_row_ns"),
    "misses": _of_rows("miss"),
    "cold": ("read_ns",),
    "write-back": (*_of_rows("append"), "transaction_us"),
    "cleaning": _of_rows("move"),
    "hand-over": ("hand_over_us",),
    "ahead": ("ahead_us",),
    "threads": ("share_us",),
    "dense": ("dense_product_us", "dense_wake_us", "dense_value_ns"),
}
"""The fields of ``SoftwareCosts`` that each stage adds."""


class Loop(NamedTuple):
    """One loop that was timed.

    Attributes:
        name: what it was, for people.
        stage: see ``STAGES``.
        ns: of a batch, on one core; of a dense model and of threads, on those that it had.
        work: of a batch: amounts by the field of ``SoftwareCosts`` that is their cost; ids, rows or bytes for
            nanoseconds, and 1,000 for one that is in microseconds.
        beside_ns: of ``ns``, what is known without these costs.
    """

    name: str
    stage: str
    ns: float
    work: Mapping[str, float]
    beside_ns: float = 0.0

    def fitted_ns(self, costs: Mapping[str, float]) -> float:
        """As the costs have it."""
        return self.beside_ns + cost_ns(self.work, costs)


class Fitted(NamedTuple):
    """Attributes:
    costs: of ``SoftwareCosts``.
    fitted_ns: of each loop, in their order, what the costs say that it takes.
    """

    costs: SoftwareCosts
    fitted_ns: tuple[float, ...]


def fit_costs(loops: Sequence[Loop]) -> Fitted:
    """What each kind of work costs, by the loops of its stage; relative errors count.

    A stage without loops costs nothing.
    """
    costs: dict[str, float] = {}
    for stage, kinds in STAGES.items():
        own = [loop for loop in loops if loop.stage == stage]
        if not own:
            continue
        # Equations are divided by the loop's time, so that one of a millisecond counts as much as one of a second.
        matrix = np.array([[loop.work.get(kind, 0.0) / loop.ns for kind in kinds] for loop in own])
        left = np.array([1 - loop.fitted_ns(costs) / loop.ns for loop in own])
        costs |= dict(zip(kinds, solve_nonnegative(matrix, left).tolist(), strict=True))
    return Fitted(SoftwareCosts(**costs), tuple(loop.fitted_ns(costs) for loop in loops))


def cost_ns(work: Mapping[str, float], costs: Mapping[str, float]) -> float:
    """Of some work; kinds of work that have no cost yet cost nothing."""
    return sum(amount * costs.get(kind, 0.0) for kind, amount in work.items())
