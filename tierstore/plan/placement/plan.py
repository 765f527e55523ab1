"""What is said of one way to place the tables."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

from ...settings.options import check_ranges, option
from ..host import Host
from ..json_file import plain
from ..prediction import Prediction, ResourceLoad
from ..workload import Workload

__all__ = [
    "STRATEGIES",
    "TIERS",
    "PlacedPart",
    "PlacedTier",
    "PlacementPlan",
    "Room",
    "Step",
    "StoreModel",
    "Strategy",
    "TierUse",
]

Strategy = Literal["gpu", "host", "remote", "hybrid", "ssd"]
STRATEGIES: Final[tuple[Strategy, ...]] = ("gpu", "host", "remote", "hybrid", "ssd")
PlacedTier = Literal["hbm", "ddr", "remote", "ssd"]
TIERS: Final[dict[Strategy, tuple[PlacedTier, ...]]] = {
    "gpu": ("hbm",),
    "host": ("ddr",),
    "remote": ("remote",),
    "hybrid": ("hbm", "ddr"),
    "ssd": ("hbm", "ddr", "ssd"),
}
"""Which memory a strategy uses, fastest first."""


class StoreModel(Protocol):
    """How fast tierstore's own tiers are, which the strategy "ssd" takes from the planner."""

    def __call__(self, workload: Workload, host: Host, *, hosts: int, ddr_bytes: float, hbm_bytes: float) -> Prediction:
        """Of one step, each host having an equal part of the rows; budgets are of one host and of one accelerator.

        Raises:
            ValueError: it cannot be, and why.
        """
        ...


class PlacedPart(NamedTuple):
    """Rows and columns of a table, and where they are.

    Attributes:
        place: of the tier: the number of the accelerator, host or server, over all hosts.
    """

    table: str
    tier: PlacedTier
    place: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    size_bytes: int


class TierUse(NamedTuple):
    """Bytes of one tier, of all hosts together.

    Attributes:
        capacity_bytes: that rows may take.
        free_bytes: below 0 if they do not fit.
    """

    tier: PlacedTier
    capacity_bytes: float
    used_bytes: float

    @property
    def free_bytes(self) -> float:
        return self.capacity_bytes - self.used_bytes


class Step(NamedTuple):
    """What a step of one batch takes.

    Attributes:
        loads: of the busiest device, link or host; amounts are of it too.
        step_s: lookups, transfers and model one after another.
        overlapped_s: were all resources busy at a time with several batches: the largest load.
        samples_per_s: of all hosts, a step after the other.
        bottleneck: the resource of the largest load.
    """

    loads: tuple[ResourceLoad, ...]
    step_s: float
    overlapped_s: float
    samples_per_s: float
    bottleneck: str


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """One strategy.

    Attributes:
        workload, host: their names.
        hosts: machines that compute. servers: others of the same make that hold tables, with "remote".
        parts: what is where; as it would be with enough memory, if it does not fit.
        tiers: how full each memory is.
        fits: whether every device and host has room.
        missing_bytes: by how much rows exceed the room; 0 if they do not.
        hosts_needed: how many hosts (with "remote", servers) would do, by bytes; None if no number.
        step: as it would be with enough memory, if it does not fit; None if it cannot run at all.
        why: what is in the way, if something is.
    """

    strategy: Strategy
    workload: str
    host: str
    hosts: int
    servers: int = 0
    parts: tuple[PlacedPart, ...] = ()
    tiers: tuple[TierUse, ...] = ()
    fits: bool = False
    missing_bytes: float = 0.0
    hosts_needed: int | None = None
    step: Step | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        found: dict[str, Any] = plain(self)
        for own, tier in zip(found["tiers"], self.tiers, strict=True):
            own["free_bytes"] = tier.free_bytes
        return found


@dataclass(frozen=True, kw_only=True)
class Room:
    """Which share of each memory may hold rows; the rest is the model's, the system's, and for batches under way."""

    hbm_share: float = option(0.8, "of an accelerator's memory", low=0, high=1)
    ddr_share: float = option(0.8, "of a host's memory", low=0, high=1)
    ssd_share: float = option(0.95, "of the drives; files are reckoned at their largest", low=0, high=1)

    def __post_init__(self) -> None:
        check_ranges(self)
