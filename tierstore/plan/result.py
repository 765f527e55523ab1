"""What a plan found: the answer and what supports it, for the terminal, the page and JSON."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .curves import MissRatioCurve
from .json_file import plain
from .plan_file import PlanFile
from .prediction import Prediction, Setup
from .search import describe_setup

__all__ = ["Alternative", "Grid", "Line", "Marginal", "Placed", "PlanResult", "PricePart", "ShownCurve"]


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


class Marginal(NamedTuple):
    """Attributes:
    resource: "ddr", "hbm", "page cache", "ssd reads", "cores", ...
    change: of each host's, as "+10 %" or "+1 GiB".
    samples_per_s: more than without, of all hosts.
    usd: price of the change at all hosts; None where the parts' prices do not say it.
    """

    resource: str
    change: str
    samples_per_s: float
    usd: float | None


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
        """JSON-able; what is unbounded is None. Setups that were not chosen are a line each."""
        found: dict[str, Any] = plain(self)
        for own, each in zip(found["alternatives"], self.alternatives, strict=True):
            own["setup"] = describe_setup(each.setup)
        return found
