"""Sharding: a workload's tables over equal devices, so that none has more to do, or to hold, than need be."""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config import require_choice, require_int
from ...system.sizes import format_size
from ..workload import Workload
from .costs import CostModel
from .greedy import improve, longest_first, lower_bound
from .shapes import Piece, Shapes
from .splitting import Division, SplitKind, Splitter

__all__ = ["DEVICES_MAX", "SPLIT_KINDS", "Part", "PartKind", "ShardPlan", "SplitTable", "shard"]

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]

PartKind = Literal["table", "row", "column", "row and column"]
SPLIT_KINDS: Final = ("table", "row", "column")
DEVICES_MAX: Final = 1 << 16
_FINER: Final = (1, 2, 4)
"""Parts of the mean device's cost that tables are split into: of two equal parts one may be too much."""
_WORTHWHILE: Final = 0.01
"""Splits that make the largest cost smaller by less are not made."""


class Part(NamedTuple):
    """Rows and columns of a table on a device.

    Attributes:
        size_bytes: of its rows with their optimizer state.
        cost_s: seconds of its lookups in a batch, by the cost model.
    """

    table: str
    device: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    size_bytes: int
    cost_s: float


class SplitTable(NamedTuple):
    """A table in several parts."""

    table: str
    kind: PartKind
    parts: int
    why: str


class ShardPlan(NamedTuple):
    """Which device holds what.

    Attributes:
        parts: table by table, each row and column of each once.
        device_bytes: int64 [devices]. device_costs_s: float64 [devices].
        split_tables: those in several parts.
        lower_bound_s: no assignment of these parts has a smaller largest cost.
    """

    num_devices: int
    budget_bytes: int
    parts: tuple[Part, ...]
    device_bytes: Int64s
    device_costs_s: Floats
    split_tables: tuple[SplitTable, ...]
    lower_bound_s: float

    @property
    def cost_s(self) -> float:
        """The largest of a device: the others wait for it."""
        return float(self.device_costs_s.max())

    @property
    def balance(self) -> float:
        """The largest cost over the mean; 1: all have the same to do."""
        return self.cost_s / float(self.device_costs_s.mean()) if self.cost_s else 1.0

    @property
    def gap(self) -> float:
        """By how much, relative to it, the largest cost is above the lower bound."""
        return self.cost_s / self.lower_bound_s - 1 if self.cost_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "num_devices": self.num_devices,
            "budget_bytes": self.budget_bytes,
            "parts": [part._asdict() for part in self.parts],
            "device_bytes": self.device_bytes.tolist(),
            "device_costs_s": self.device_costs_s.tolist(),
            "split_tables": [each._asdict() for each in self.split_tables],
            "cost_s": self.cost_s,
            "balance": self.balance,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
        }


class _Packed(NamedTuple):
    """Pieces on devices; arrays are by piece."""

    division: Division
    devices: Int64s
    costs: Floats
    num_devices: int

    @property
    def largest(self) -> float:
        return float(np.bincount(self.devices, self.costs, self.num_devices).max())


def shard(
    workload: Workload,
    *,
    num_devices: int,
    budget_bytes: int,
    cost_model: CostModel,
    allow: Sequence[SplitKind] = ("table", "row", "column"),
) -> ShardPlan:
    """Divide a workload's tables over devices; the same input gives the same plan.

    Tables that are larger than a device are split first. Then, while a piece costs more than the mean device, it is
    split too, where that makes its largest part cheaper. Of the plan without these splits and those with more and more
    of them, the first is returned that is within a hundredth of the best. Pieces are assigned longest first (see
    ``greedy``); where memory is too tight for that, largest first, and what does not fit is split to fill what is free.

    Args:
        budget_bytes: of rows with their optimizer state, of each device.
        cost_model: seconds of a piece's lookups; of each piece alone.
        allow: how a table may lie: whole ("table"), its rows divided ("row"), its columns divided ("column").

    Raises:
        ValueError: the tables do not fit; says how many devices, or how large ones, would do.
    """
    require_int(num_devices, "num_devices", 1, DEVICES_MAX)
    require_int(budget_bytes, "budget_bytes", 1, 1 << 62)
    for kind in allow:
        require_choice(kind, SPLIT_KINDS, "allow")
    if not allow:
        raise ValueError(f"allow is empty; it has one or more of {', '.join(SPLIT_KINDS)}")
    splitter = Splitter(Shapes(workload), cost_model, tuple(allow))
    packed = _best(splitter, num_devices, budget_bytes)
    if packed is None:
        raise ValueError(_what_would_do(splitter, num_devices, budget_bytes))
    return _plan(splitter, packed, budget_bytes)


def _best(splitter: Splitter, num_devices: int, budget: int) -> _Packed | None:
    division = splitter.fitting(num_devices, budget)
    candidates = [_pack(splitter, division, num_devices, budget)]
    for finer in _FINER:
        balanced = splitter.balanced(division, num_devices, finer)
        if balanced.pieces == division.pieces:
            break
        candidates.append(_pack(splitter, balanced, num_devices, budget))
    fitting = [each for each in candidates if each is not None]
    if not fitting:
        return None
    enough = (1 + _WORTHWHILE) * min(each.largest for each in fitting)
    return next(each for each in fitting if each.largest <= enough)


def _pack(splitter: Splitter, division: Division, num_devices: int, budget: int) -> _Packed | None:
    costs, sizes = splitter.costs(division.pieces), splitter.sizes(division.pieces)
    devices = longest_first(costs, sizes, num_devices, budget)
    packed = None if devices is None else _Packed(division, devices, costs, num_devices)
    packed = packed or _fill(splitter, division, num_devices, budget)
    if packed is None:
        return None
    sizes = splitter.sizes(packed.division.pieces)
    return packed._replace(devices=improve(packed.devices, packed.costs, sizes, num_devices, budget))


def _fill(splitter: Splitter, division: Division, num_devices: int, budget: int) -> _Packed | None:
    """Largest first, each to the device with most room; what fits nowhere is split, if it may be."""
    size_of, reasons = splitter.shapes.size_bytes, dict(division.reasons)
    waiting = sorted(division.pieces, key=size_of)
    free = [budget] * num_devices
    placed: list[Piece] = []
    devices: list[int] = []
    while waiting:
        piece = waiting.pop()
        device = max(range(num_devices), key=free.__getitem__)
        if size_of(piece) > free[device]:
            carved = splitter.carve(piece, free[device])
            if carved is None:
                return None
            piece, rest = carved
            waiting.append(rest)
            reasons.setdefault(piece.table, "to fill what is free")
        placed.append(piece)
        devices.append(device)
        free[device] -= size_of(piece)
    found = Division(placed, reasons)
    return _Packed(found, np.array(devices, np.int64), splitter.costs(placed), num_devices)


def _plan(splitter: Splitter, packed: _Packed, budget: int) -> ShardPlan:
    shapes, pieces, num_devices = splitter.shapes, packed.division.pieces, packed.num_devices
    order = sorted(range(len(pieces)), key=pieces.__getitem__)
    parts = tuple(
        Part(shapes.table(piece).name, device, *piece[1:], shapes.size_bytes(piece), cost)
        for piece, device, cost in ((pieces[at], int(packed.devices[at]), float(packed.costs[at])) for at in order)
    )
    device_bytes = np.zeros(num_devices, np.int64)
    np.add.at(device_bytes, packed.devices, splitter.sizes(pieces))
    device_costs: Floats = np.bincount(packed.devices, packed.costs, num_devices).astype(np.float64)
    split = _split_tables(shapes.workload, packed.division)
    bound = lower_bound(packed.costs, num_devices)
    return ShardPlan(num_devices, budget, parts, device_bytes, device_costs, split, bound)


def _split_tables(workload: Workload, division: Division) -> tuple[SplitTable, ...]:
    found = []
    for index, table in enumerate(workload.tables):
        own = [piece for piece in division.pieces if piece.table == index]
        if len(own) > 1:
            by_rows = any(piece.num_rows < table.num_embeddings for piece in own)
            by_columns = any(piece.num_columns < table.embedding_dim for piece in own)
            kind: PartKind = "row and column" if by_rows and by_columns else "row" if by_rows else "column"
            found.append(SplitTable(table.name, kind, len(own), division.reasons[index]))
    return tuple(found)


def _what_would_do(splitter: Splitter, num_devices: int, budget: int) -> str:
    shapes, whole = splitter.shapes, splitter.shapes.whole()
    total = sum(map(shapes.size_bytes, whole))
    enough = _enough_bytes(splitter, num_devices)
    text = (
        f"the tables take {format_size(total)}, {num_devices} devices of {format_size(budget)} hold "
        f"{format_size(num_devices * budget)}"
    )
    larger = f"{num_devices} devices of {enough:,} bytes ({format_size(enough)}) would do"
    devices = _enough_devices(splitter, num_devices, budget, total)
    if devices is None:
        largest = max(whole, key=shapes.size_bytes)
        name, size = shapes.table(largest).name, format_size(shapes.size_bytes(largest))
        way_out = larger if "row" in splitter.allow else f"{larger}, or dividing tables by rows"
        return f"{text}, and table {name!r} alone takes {size}, which no number of them can share; {way_out}"
    return f"{text}: {devices} such devices would do; so would {larger.removesuffix(' would do')}"


def _enough_devices(splitter: Splitter, num_devices: int, budget: int, total: int) -> int | None:
    """As many as are found to do; None if no number does.

    Where each piece fits a device, twice what the bytes need is enough: no two devices are less than half full.
    """
    low = max(num_devices, total // budget)
    high = min(2 * low + 2, DEVICES_MAX)
    if _best(splitter, high, budget) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _best(splitter, middle, budget) is None else (low, middle)
    return high


def _enough_bytes(splitter: Splitter, num_devices: int) -> int:
    """A budget that does: of growing ones, the first that is found to."""
    total = sum(map(splitter.shapes.size_bytes, splitter.shapes.whole()))
    budget = -(-total // num_devices)
    while _best(splitter, num_devices, budget) is None:
        budget += max(1, budget // 50)
    return budget
