"""From the times of loops to what each unit of work costs: least squares, no cost below zero.

The loops come in stages, each with work that those before it did not have, so that a stage has few unknown costs and
its errors do not reach back.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Float64s
from ...nn import KeyedJaggedTensor
from ...rows import RowLayout
from ..host import SoftwareCosts
from .subject import Subject, transactions_in

__all__ = ["STAGES", "Amounts", "Fitted", "Loop", "Written", "cost_ns", "fit_costs", "solve_nonnegative"]


STAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "lookup": (
        "batch_us",
        "pool_ns",
        "pool_ns_per_byte",
        "pool_row_ns",
        "pool_row_ns_per_byte",
        "pool_bag_ns",
        "pool_bag_ns_per_byte",
    ),
    "tables": ("table_us",),
    "training": (
        "step_us",
        "update_ns",
        "update_ns_per_byte",
        "update_row_ns",
        "update_row_ns_per_byte",
        "update_bag_ns",
        "update_bag_ns_per_byte",
    ),
    "tables in training": ("step_table_us",),
    "hits": ("admit_ns", "admit_row_ns"),
    "misses": ("miss_ns", "miss_ns_per_byte"),
    "cold": ("read_ns",),
    "write-back": ("append_ns", "append_ns_per_byte", "transaction_us"),
    "cleaning": ("move_ns", "move_ns_per_byte"),
    "hand-over": ("hand_over_us",),
    "ahead": ("ahead_us",),
}
"""The fields of ``SoftwareCosts`` that each stage adds."""

_MOST_STEPS: Final = 100


class Loop(NamedTuple):
    """One loop that was timed.

    Attributes:
        name: what it was, for people.
        stage: see ``STAGES``.
        ns: of a batch, on one core.
        work: of a batch: amounts by the field of ``SoftwareCosts`` that is their cost; ids, rows or bytes for
            nanoseconds, and 1,000 for one that is in microseconds.
    """

    name: str
    stage: str
    ns: float
    work: Mapping[str, float]


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
        left = np.array([1 - cost_ns(loop.work, costs) / loop.ns for loop in own])
        costs |= dict(zip(kinds, solve_nonnegative(matrix, left).tolist(), strict=True))
    return Fitted(SoftwareCosts(**costs), tuple(cost_ns(loop.work, costs) for loop in loops))


def cost_ns(work: Mapping[str, float], costs: Mapping[str, float]) -> float:
    """Of some work; kinds of work that have no cost yet cost nothing."""
    return sum(amount * costs.get(kind, 0.0) for kind, amount in work.items())


def solve_nonnegative(matrix: Float64s, target: Float64s) -> Float64s:
    """The x >= 0 for which ``matrix @ x`` is nearest to ``target``.

    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23: unknowns are let off zero one by one, the one
    along which the error falls fastest first; those that would fall below zero go back.

    Args:
        matrix: float64 [equations, unknowns].
        target: float64 [equations].
    """
    unknowns = matrix.shape[1]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), np.finfo(np.float64).tiny)
    scaled = matrix / scale
    found, is_free = np.zeros(unknowns), np.zeros(unknowns, np.bool_)
    for _ in range(_MOST_STEPS):
        slopes = np.where(is_free, 0.0, scaled.T @ (target - scaled @ found))
        if slopes.max(initial=0.0) <= 1e-12:
            break
        is_free[int(np.argmax(slopes))] = True
        while True:
            wanted = np.zeros(unknowns)
            wanted[is_free] = np.linalg.lstsq(scaled[:, is_free], target, rcond=None)[0]
            if (wanted[is_free] > 0).all():
                found = wanted
                break
            falling: Any = is_free & (wanted <= 0)
            # As far as the first of them reaches zero.
            share = np.min(found[falling] / (found[falling] - wanted[falling]))
            found = found + share * (wanted - found)
            is_free &= found > 1e-15
            found[~is_free] = 0.0
    solution: Float64s = found / scale
    return solution


class Amounts(NamedTuple):
    """Of a batch: ids, distinct rows, bags; and the work that they are, as ``Loop.work`` has it."""

    ids: float
    rows: float
    bags: float

    @classmethod
    def of(cls, batches: Sequence[KeyedJaggedTensor]) -> "Amounts":
        """Means."""
        rows = statistics.mean(len(np.unique(batch.values().numpy())) for batch in batches)
        return cls(len(batches[0].values()), rows, batches[0].stride())

    def work(self, what: str, layout: RowLayout) -> dict[str, float]:
        """Of pooling ("pool") or training ("update")."""
        counts = {what: self.ids, f"{what}_row": self.rows, f"{what}_bag": self.bags}
        nanoseconds = {f"{name}_ns": count for name, count in counts.items()}
        return nanoseconds | {f"{name}_ns_per_byte": count * layout.row_bytes for name, count in counts.items()}

    def lookup(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup whose rows are all in memory."""
        return {"batch_us": 1000, **self.work("pool", layout)}

    def training(self, layout: RowLayout) -> dict[str, float]:
        """Of a training step, beyond its lookup."""
        return {"step_us": 1000, **self.work("update", layout)}

    def hits(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup whose rows are all in the cache."""
        return {"admit_ns": self.ids, "admit_row_ns": self.rows, **self.lookup(layout)}

    def bringing(self, layout: RowLayout) -> dict[str, float]:
        """In of rows that are not in the cache."""
        return {"miss_ns": self.rows, "miss_ns_per_byte": self.rows * layout.row_bytes}


class Written(NamedTuple):
    """What the cold tier was made to write, in a step or in all: rows appended and moved, and transactions."""

    rows: float
    moved: float
    transactions: float

    @classmethod
    def by(cls, subject: Subject) -> "Written":
        """Since it was opened; of transactions, since its file was made."""
        found = subject.store.stats().ssd
        return cls(found.rows_written, found.rows_moved, transactions_in(subject.store.directory))

    def since(self, before: "Written", steps: int) -> "Written":
        """In each of so many steps."""
        return Written(*((now - then) / steps for now, then in zip(self, before, strict=True)))

    def work(self, layout: RowLayout) -> dict[str, float]:
        """As ``Loop.work`` has it."""
        return {
            "append_ns": self.rows,
            "append_ns_per_byte": self.rows * layout.row_bytes,
            "move_ns": self.moved,
            "move_ns_per_byte": self.moved * layout.row_bytes,
            "transaction_us": 1000 * self.transactions,
        }
