"""What a plan found: the answer and what supports it, for the terminal, the page and JSON."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .curves import MissRatioCurve
from .marginal import Marginal
from .plan_file import PlanFile, to_dict
from .prediction import Prediction, Setup
from .search import describe_setup

__all__ = ["Alternative", "Grid", "Line", "Placed", "PlanResult", "PricePart", "ShownCurve", "finite"]


def finite(value: Any) -> Any:
    """Nested dicts and lists without what JSON has no word for: None in place of infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ShownCurve(NamedTuple):
    """A miss-ratio curve with what it is of.

    Attributes:
        group: what the name is of: all tables of a "pool", a "policy" to compare with, a "table", a "window" of time.
        chosen_rows: of it that the plan's memory holds, of all hosts; None where that is not known.
    """

    group: Literal["pool", "policy", "table", "window"]
    name: str
    curve: MissRatioCurve
    chosen_rows: float | None = None


class Line(NamedTuple):
    """The step as one quantity varies and all else stays.

    Attributes:
        unit: "bytes", "reads/s", "samples" or "".
        step_s: seconds, of each value.
        bounds: seconds that each resource is busy, of each value.
        chosen: the plan's own value.
    """

    quantity: str
    unit: str
    values: tuple[float, ...]
    step_s: tuple[float, ...]
    samples_per_s: tuple[float, ...]
    bounds: dict[str, tuple[float, ...]]
    chosen: float


class Grid(NamedTuple):
    """Samples a second by memory and by drives.

    Attributes:
        samples_per_s: of each reads_per_s, of each ddr_bytes.
        chosen_ddr_bytes, chosen_reads_per_s: the plan's own.
    """

    ddr_bytes: tuple[float, ...]
    reads_per_s: tuple[float, ...]
    samples_per_s: tuple[tuple[float, ...], ...]
    chosen_ddr_bytes: float
    chosen_reads_per_s: float


class Alternative(NamedTuple):
    """A setup that was looked at and not chosen.

    Attributes:
        prediction: None if it does not fit.
        reason: what it fails by; "" if it meets the target and only costs more.
    """

    setup: Setup
    prediction: Prediction | None
    reason: str


class Placed(NamedTuple):
    """Where tables could lie.

    Attributes:
        step_s: infinite where they do not fit.
        note: why they do not fit, or "".
    """

    strategy: str
    step_s: float
    bottleneck: str
    note: str


class PricePart(NamedTuple):
    """Parts of one kind, of all hosts."""

    name: str
    number: int
    usd: float
    watts: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer to a plan file.

    Attributes:
        searched: whether the setup was chosen among others, rather than given.
        num_setups: looked at, hosts counted once.
        curves: first those of the pools that the prediction is made of.
        lines: first that over DDR.
        grid: None where there is no drive to vary.
        alternatives: the next best first, then those that fail.
        warnings: sentences.
        assumptions: sentences that say where figures come from.
    """

    asked: PlanFile
    prediction: Prediction
    searched: bool
    num_setups: int = 1
    curves: tuple[ShownCurve, ...] = ()
    gains: tuple[Marginal, ...] = ()
    lines: tuple[Line, ...] = ()
    grid: Grid | None = None
    alternatives: tuple[Alternative, ...] = ()
    placements: tuple[Placed, ...] = ()
    price_parts: tuple[PricePart, ...] = ()
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is unbounded is None."""
        found = {
            "asked": to_dict(self.asked),
            "prediction": self.prediction.to_dict(),
            "searched": self.searched,
            "num_setups": self.num_setups,
            "curves": [each._asdict() | {"curve": each.curve.to_dict()} for each in self.curves],
            "gains": [each._asdict() for each in self.gains],
            "lines": [each._asdict() for each in self.lines],
            "grid": None if self.grid is None else self.grid._asdict(),
            "alternatives": [
                {
                    "setup": describe_setup(each.setup),
                    "prediction": None if each.prediction is None else each.prediction.to_dict(),
                    "reason": each.reason,
                }
                for each in self.alternatives
            ],
            "placements": [each._asdict() for each in self.placements],
            "price_parts": [each._asdict() for each in self.price_parts],
            "warnings": list(self.warnings),
            "assumptions": list(self.assumptions),
        }
        return dict(finite(found))
