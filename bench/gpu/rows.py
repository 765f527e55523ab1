"""Pooling and fused updates, all rows in device memory: against the bytes that must move, and against torch."""

import math
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tierstore import optim
from tierstore.hbm.cache import group, kernels_of
from tierstore.hbm.kernel_types import Bags, Groups
from tierstore.kernels import slots as kernels

from ..common import Goal, Report, Table, spread
from .rig import Action, Rig, Zipf, rounds_of

RULES: Final[dict[str, optim.Optimizer]] = {
    "sgd": optim.SGD(lr=1e-3),
    "rowwise_adagrad": optim.RowWiseAdagrad(lr=1e-3),
}
_STATE_COLUMNS: Final = 2
"""Of a row in the arena: whole words."""
_STATE_BYTES: Final = {"sgd": 0, "rowwise_adagrad": 4}
_COUNTED: Final = 4
"""Batches whose distinct rows are counted."""
_TOLERANCE: Final = 1e-3
_TOLD: Final = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad"}
_WANTED_OF_COPY: Final = 0.7


class _Case(NamedTuple):
    """Tables of one width, all in ``weights``, and lookups in them. N positions, K bags, T tables."""

    dim: int
    batch: int
    exponent: float
    weights: Tensor
    state: Tensor
    slots: list[Tensor]
    """Of each batch: int32 [N]."""
    bags: Bags
    """Of every batch."""
    gradient: Tensor
    """float32 [B, T * D], of every batch."""


def measure(rig: Rig, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    del folder
    limit = rig.copy_bytes_per_s()
    shapes = product(config["exponents"], config["dims"], config["batches"])
    measured = [_measure(rig, _draw(rig, *shape, config), config, limit) for shape in shapes]
    told = {name: config[name] for name in ("tables", "rows", "pooling_factor")}
    return {"copy_bytes_per_s": limit, "cases": measured, **told}


def _draw(rig: Rig, exponent: float, dim: int, batch: int, config: dict[str, Any]) -> _Case:
    tables, pooling, rows = config["tables"], config["pooling_factor"], config["rows"]
    zipf = Zipf(rig, rows, exponent)
    count = tables * batch * pooling
    first = (torch.arange(tables, device=rig.device) * rows).repeat_interleave(batch * pooling)
    slots = [(zipf.draw(count) + first).to(torch.int32) for _ in range(rounds_of(config["repetitions"]))]
    bags = Bags(
        bag_starts=torch.arange(0, count + 1, pooling, dtype=torch.int32, device=rig.device),
        bag_of=torch.empty(count, dtype=torch.int32, device=rig.device),
        columns=torch.arange(0, tables * dim, dim, dtype=torch.int32, device=rig.device),
        table_of=torch.arange(tables, dtype=torch.int32, device=rig.device),
        batch=batch,
        column_step=math.gcd(4, dim),
    )
    kernels_of(rig.device).number_bags(bags.bag_starts, bags.bag_of)
    weights = torch.rand((tables * rows, dim), generator=rig.generator, device=rig.device)
    state = torch.zeros((len(weights), _STATE_COLUMNS), device=rig.device)
    gradient = torch.randn((batch, tables * dim), generator=rig.generator, device=rig.device)
    return _Case(dim, batch, exponent, weights, state, slots, bags, gradient)


class _Own:
    """The tier's kernels on the batches of a case: what a step with all rows in device memory launches."""

    def __init__(self, rig: Rig, case: _Case, tables: int) -> None:
        self._case = case
        self._kernels = kernels_of(rig.device)
        self._tables = tables
        self._grouped: Groups | None = None
        self._hyper = {
            name: torch.from_numpy(np.array([rule.hyper(rule.lr, 1)] * tables, np.float32)).to(rig.device)
            for name, rule in RULES.items()
        }
        self._code_of = {
            name: torch.full((tables,), rule.code, dtype=torch.int32, device=rig.device) for name, rule in RULES.items()
        }

    def forward(self, number: int) -> Tensor:
        """float32 [B, T * D]."""
        case, slots = self._case, self._case.slots[number]
        out = torch.empty_like(case.gradient)
        self._kernels.pool_rows(
            case.bags, slots, None, 0, len(slots), mode=kernels.SUM, weights=case.weights, dim=case.dim, out=out,
            arg_max=None,
        )  # fmt: skip
        return out

    def group(self, number: int) -> None:
        self._grouped = group(self._case.slots[number])

    def merge(self, rule: str, _number: int) -> None:
        """The update of rows that ``group`` grouped."""
        case, grouped = self._case, self._grouped
        assert grouped is not None
        self._kernels.update_rows(
            case.bags, grouped, grouped.distinct, 0, grad_out=case.gradient, arg_max=None, mean=False,
            codes=(RULES[rule].code,) * self._tables, code_of=self._code_of[rule], hyper=self._hyper[rule],
            weights=case.weights, state=case.state, dim=case.dim, dirty=None,
        )  # fmt: skip

    def update(self, rule: str, number: int) -> None:
        """The whole backward."""
        self.group(number)
        self.merge(rule, number)


class _Torch:
    """One ``embedding_bag`` call over the rows of all tables; backward, which follows forward, gives a sparse gradient,
    and torch's SGD applies it."""

    def __init__(self, case: _Case) -> None:
        self._case, self._leaf, self._gradient = case, case.weights.detach().requires_grad_(), _by_bag(case)
        # Torch's sparse gradients have ids of 64 bits.
        self._slots, self._starts = [own.long() for own in case.slots], case.bags.bag_starts.long()
        self._optimizer = torch.optim.SGD([self._leaf], lr=1e-6)

    def forward(self, number: int) -> Tensor:
        """float32 [B, T * D]."""
        slots, starts = self._slots[number], self._starts
        self._out = embedding_bag(slots, self._leaf, starts, mode="sum", sparse=True, include_last_offset=True)
        return self._out.view(-1, self._case.batch, self._case.dim).transpose(0, 1).flatten(1)

    def backward(self, _number: int) -> None:
        self._out.backward(self._gradient)  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._leaf.grad = None


def _by_bag(case: _Case) -> Tensor:
    """float32 [K, D], the gradient of each bag."""
    return case.gradient.view(case.batch, -1, case.dim).transpose(0, 1).reshape(-1, case.dim)


def _measure(rig: Rig, case: _Case, config: dict[str, Any], limit: float) -> dict[str, Any]:
    tables = config["tables"]
    own, theirs = _Own(rig, case, tables), _Torch(case)
    _check(case, own, theirs)
    actions: dict[str, Action] = {"forward": own.forward, "group": own.group}
    prepare: dict[str, Action] = {}
    for rule in RULES:
        actions |= {rule: partial(own.update, rule), f"{rule} grouped": partial(own.merge, rule)}
        prepare[f"{rule} grouped"] = own.group
    actions |= {"torch forward": theirs.forward, "torch backward": theirs.backward}
    device = rig.times(actions, repetitions=config["repetitions"], before=prepare)
    distinct = int(statistics.median(len(torch.unique(slots)) for slots in case.slots[:_COUNTED]))
    compulsory = _compulsory_bytes(len(case.slots[0]), distinct, tables * case.batch, 4 * case.dim)
    seconds = {name: spread(each) for name, each in device.items()}
    return {
        "dim": case.dim,
        "batch": case.batch,
        "exponent": case.exponent,
        "positions": len(case.slots[0]),
        "distinct": distinct,
        "seconds": seconds,
        "compulsory_bytes": compulsory,
        "of_copy": {name: size / seconds[name]["median"] / limit for name, size in compulsory.items()},
    }


def _compulsory_bytes(positions: int, distinct: int, bags: int, row_bytes: int) -> dict[str, int]:
    """The fewest bytes that pooling and updates must move through device memory: the limit.

    Counted once: each distinct row (read, and in an update also written, with its state), each id and offset (of four
    bytes), each gradient, each result. What a kernel reads a second time, it should find in a cache.
    """
    around = bags * row_bytes + 4 * (positions + bags + 1)
    found = {"forward": distinct * row_bytes + around}
    for rule, state_bytes in _STATE_BYTES.items():
        found[rule] = found[f"{rule} grouped"] = 2 * distinct * (row_bytes + state_bytes) + around
    return found


def _check(case: _Case, own: _Own, theirs: _Torch) -> None:
    """RuntimeError unless ours pool as torch does, and SGD changes rows as it should."""
    slots, expected = case.slots[0].long(), theirs.forward(0).detach()
    _require_near("pooled rows", own.forward(0), expected, expected.abs())
    rows, inverse = torch.unique(slots, return_inverse=True)
    sources = _by_bag(case)[case.bags.bag_of.long()]
    summed = torch.zeros((len(rows), case.dim), device=slots.device).index_add_(0, inverse, sources)
    sizes = torch.zeros((len(rows), case.dim), device=slots.device).index_add_(0, inverse, sources.abs())
    before = case.weights[rows]
    own.update("sgd", 0)
    _require_near("changes by SGD", (before - case.weights[rows]) / RULES["sgd"].lr, summed, sizes + 1)


def _require_near(what: str, found: Tensor, expected: Tensor, scale: Tensor) -> None:
    error = float(((found - expected).abs() / (scale + 1)).max())
    if not error < _TOLERANCE:
        raise RuntimeError(f"{what} are wrong by {error}")


def tell(found: dict[str, Any]) -> Report:
    measured = found["cases"]
    skewed = [case for case in measured if case["exponent"]] or measured
    kernels_told = {"forward": "pooled forward"} | {f"{rule} grouped": told for rule, told in _TOLD.items()}
    goals = []
    for name, what in kernels_told.items():
        least = round(min(case["of_copy"][name] for case in skewed), 3)
        name = f"{what}, Zipf ids, all widths and batches: compulsory bytes a second over a device copy's, lowest"
        goals.append(Goal(name, least, at_least=_WANTED_OF_COPY))
    note = (
        "Rows: every call has a batch that was never seen before. Of copy rate: the fewest bytes that must move "
        "(each distinct row, id, offset, gradient and result once, an updated row twice: read, written) a second "
        f"over the {found['copy_bytes_per_s'] / 1e9:,.0f} GB/s of a device copy. An update includes the grouping of "
        "its ids, as torch's does; grouped: without. Device time by events, after the L2 cache was written over. "
        "torch: one embedding_bag, sparse gradients, SGD."
    )
    return Report([_device_table(found)], goals, [note])


_PEERS: Final = {"forward": "torch forward", "sgd": "torch backward"}
"""Torch's action that does the same."""


def _device_table(found: dict[str, Any]) -> Table:
    rows = []
    for case in found["cases"]:
        ids = f"Zipf {case['exponent']}" if case["exponent"] else "uniform"
        head, medians = f"{case['dim']}, {case['batch']:,}, {ids}", {n: s["median"] for n, s in case["seconds"].items()}
        for what in ("forward", *RULES):
            alone = what if what == "forward" else f"{what} grouped"
            shares = [f"{case['of_copy'][name]:.2f}" for name in (what, alone)]
            times = f"{medians[_PEERS[what]] / medians[what]:.2f}" if what in _PEERS else ""
            rows.append([head, what, f"{medians[what] * 1e6:.1f}", *shares, times])
        rows.append([head, "group ids", f"{medians['group'] * 1e6:.1f}", "", "", ""])
    title = f"{found['tables']} tables of {found['rows']:,} rows in device memory, {found['pooling_factor']} ids a bag"
    columns = ["dim, batch, ids", "kernel", "device us", "of copy rate", "grouped", "x torch"]
    return Table(title, columns, rows)
