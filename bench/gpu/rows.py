"""Pooling and fused updates, rows in device memory: bytes moved, against the rate of a device copy, and peers."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tierstore import kernels, optim
from tierstore.hbm import rows_twin
from tierstore.hbm.batch import Bags
from tierstore.hbm.grouping import Grouping, group
from tierstore.rows import KEY_ROW_BITS

from ..common import Goal, Spread, Table
from .ids import Zipf
from .part import Part
from .peers import FbgemmPeer, TorchPeer, fbgemm_missing
from .rig import Action, Rig

__all__ = ["run"]

_RULES: Final[dict[str, optim.Optimizer]] = {
    "sgd": optim.SGD(lr=1e-6),
    "rowwise_adagrad": optim.RowWiseAdagrad(lr=1e-6),
}
_STATE_COLUMNS: Final = 2
"""Of a row in the arena: whole words."""
_WANTED_OF_COPY: Final = 0.7
_WANTED_OF_FBGEMM: Final = 0.9
_TOLERANCE: Final = 1e-3


class _Lookup(NamedTuple):
    """One batch. N positions, K bags, U distinct rows, T tables."""

    ids: Tensor
    """int64 [N], within their table."""
    bags: Bags
    keys: Tensor
    slots: Tensor
    """int32 [N]."""
    grouping: Grouping
    unique_slots: Tensor
    table_of: Tensor
    gradient: Tensor
    """float32 [B, T * D]."""


class _Case(NamedTuple):
    """Tables of one width, all in ``weights``, and batches of lookups in them."""

    dim: int
    batch: int
    exponent: float
    weights: Tensor
    state: Tensor
    lookups: list[_Lookup]
    num_sets: int


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Part:
    del folder
    limit = rig.copy_bytes_per_s()
    missing = fbgemm_missing(rig)
    measured = []
    for dim in config["dims"]:
        slots = config["tables"] * config["rows"]
        weights = torch.rand((slots, dim), generator=rig.generator, device=rig.device)
        state = torch.zeros((slots, _STATE_COLUMNS), device=rig.device)
        place = torch.randperm(slots, generator=rig.generator, device=rig.device).to(torch.int32)
        for exponent in config["exponents"]:
            zipf = Zipf(rig, config["rows"], exponent)
            for batch in config["batches"]:
                lookups = [_lookup(rig, zipf, place, dim, batch, config) for _ in range(config["distinct_batches"])]
                case = _Case(dim, batch, exponent, weights, state, lookups, -(-slots // 32))
                measured.append(_measure(rig, case, config, limit, missing))
    return _report(measured, config, limit, missing)


def _lookup(rig: Rig, zipf: Zipf, place: Tensor, dim: int, batch: int, config: dict[str, Any]) -> _Lookup:
    tables, pooling = config["tables"], config["pooling_factor"]
    ids = zipf.draw(tables * batch * pooling)
    table = torch.arange(tables, device=rig.device).repeat_interleave(batch * pooling)
    bags = Bags(
        torch.arange(0, len(ids) + 1, pooling, device=rig.device),
        torch.arange(tables * batch, dtype=torch.int32, device=rig.device).repeat_interleave(pooling),
        torch.arange(0, tables * dim, dim, dtype=torch.int32, device=rig.device),
        batch,
        column_step=math.gcd(4, dim),
    )
    keys = table << KEY_ROW_BITS | ids
    grouping = group(keys, -(-len(place) // 32))
    unique_table = (grouping.keys >> KEY_ROW_BITS).to(torch.int32)
    unique_row = grouping.keys & ((1 << KEY_ROW_BITS) - 1)
    gradient = torch.randn((batch, tables * dim), generator=rig.generator, device=rig.device)
    return _Lookup(
        ids, bags, keys, place[table * config["rows"] + ids], grouping,
        place[unique_table.long() * config["rows"] + unique_row], unique_table, gradient,
    )  # fmt: skip


class _Own:
    """The tier's kernels on the batches of a case."""

    def __init__(self, rig: Rig, case: _Case, tables: int) -> None:
        self._case = case
        self._kernels = _kernels(rig)
        self._tables = tables
        self._out = torch.zeros((case.batch, tables * case.dim), device=rig.device)
        self._hyper = {
            name: torch.from_numpy(np.stack([rule.hyper(rule.lr, 1)] * tables)).to(rig.device)
            for name, rule in _RULES.items()
        }

    def _of(self, number: int) -> _Lookup:
        return self._case.lookups[number % len(self._case.lookups)]

    def zero(self, number: int) -> Tensor:
        del number
        return self._out.zero_()

    def forward(self, number: int) -> None:
        lookup = self._of(number)
        self._kernels.pool_rows(
            lookup.bags, lookup.slots, 0, len(lookup.slots), mode=kernels.SUM, weights=self._case.weights,
            dim=self._case.dim, out=self._out, arg_max=None,
        )  # fmt: skip

    def group(self, number: int) -> None:
        group(self._of(number).keys, self._case.num_sets)

    def update(self, rule: str) -> Callable[[int], None]:
        codes = (_RULES[rule].code,) * self._tables

        def act(number: int) -> None:
            lookup = self._of(number)
            self._kernels.update_rows(
                lookup.bags, lookup.grouping.groups, lookup.unique_slots, 0, grad_out=lookup.gradient, arg_max=None,
                mean=False, table_of=lookup.table_of, codes=codes, hyper=self._hyper[rule], weights=self._case.weights,
                state=self._case.state, dim=self._case.dim,
            )  # fmt: skip

        return act

    def pooled(self, number: int) -> Tensor:
        """float32 [K, D], feature-major as torch's EmbeddingBag gives it."""
        self.zero(number)
        self.forward(number)
        return self._out.view(self._case.batch, self._tables, -1).transpose(0, 1).reshape(-1, self._case.dim)


def _kernels(rig: Rig) -> Any:
    if not rig.is_cuda:
        return rows_twin
    from tierstore.hbm import rows_triton

    return rows_triton


def _moved_bytes(case: _Case) -> dict[str, float]:
    """What a kernel reads and writes, each position's row or gradient counted: some come from the L2 cache."""
    lookup = case.lookups[0]
    positions, distinct, bags = len(lookup.keys), len(lookup.grouping.keys), len(lookup.bags.bag_starts) - 1
    row = 4 * case.dim
    update = positions * (row + 4 + 4) + distinct * (2 * row + 8 + 4 + 4)
    return {
        "forward": positions * (row + 4) + bags * (2 * row + 8),
        "sgd": update,
        "rowwise_adagrad": update + distinct * 8,
    }


def _measure(rig: Rig, case: _Case, config: dict[str, Any], limit: float, missing: str) -> dict[str, Any]:
    own = _Own(rig, case, config["tables"])
    offsets = [each.bags.bag_starts for each in case.lookups]
    theirs = TorchPeer(
        case.weights, [each.slots.long() for each in case.lookups], offsets,
        [_feature_major(each.gradient, config["tables"], case.dim) for each in case.lookups],
    )  # fmt: skip
    difference = float((own.pooled(0) - theirs.forward(0).detach()).abs().max())
    if difference > _TOLERANCE:
        raise RuntimeError(f"pooled rows differ from those of torch by {difference}")
    actions: dict[str, Action] = {"zero": own.zero, "forward": own.forward, "group": own.group}
    actions |= {rule: own.update(rule) for rule in _RULES}
    actions |= {f"torch {name}": action for name, action in theirs.actions.items()}
    if not missing:
        ids, gradients = [each.ids for each in case.lookups], [each.gradient for each in case.lookups]
        for rule in _RULES:
            peer = FbgemmPeer(
                rig, config["tables"], config["rows"], case.dim, rule, ids, offsets, gradients
            )  # fmt: skip
            actions |= {f"fbgemm {rule} {name}": action for name, action in peer.actions.items()}
    seconds = {name: Spread.of(each) for name, each in rig.times(actions, repetitions=config["repetitions"]).items()}
    moved = _moved_bytes(case)
    return {
        "dim": case.dim,
        "batch": case.batch,
        "exponent": case.exponent,
        "positions": len(case.lookups[0].keys),
        "distinct": len(case.lookups[0].grouping.keys),
        "seconds": {name: asdict(each) for name, each in seconds.items()},
        "moved_bytes": moved,
        "of_copy": {name: size / seconds[name].median / limit for name, size in moved.items()},
    }


def _feature_major(gradient: Tensor, tables: int, dim: int) -> Tensor:
    """[B, T * D] as [T * B, D]."""
    return gradient.view(-1, tables, dim).transpose(0, 1).reshape(-1, dim)


def _report(measured: list[dict[str, Any]], config: dict[str, Any], limit: float, missing: str) -> Part:
    skewed = [case for case in measured if case["exponent"]]
    goals = [
        Goal(
            name=f"{what}, Zipf ids, all widths and batches: bytes moved a second over a device copy's, lowest",
            value=round(min(case["of_copy"][name] for case in skewed), 3),
            at_least=_WANTED_OF_COPY,
        )
        for name, what in (("forward", "pooled forward"), ("sgd", "SGD"), ("rowwise_adagrad", "row-wise Adagrad"))
    ]
    if not missing:
        goals += [
            Goal(
                name=f"{what}: rate over FBGEMM's, Zipf ids, lowest",
                value=round(min(_over_fbgemm(case, what) for case in skewed), 3),
                at_least=_WANTED_OF_FBGEMM,
            )
            for what in ("forward", *_RULES)
        ]
    return Part(
        tables=[_table(measured, config)],
        figures={"copy_bytes_per_s": limit, "cases": measured, "fbgemm": missing or "measured"},
        goals=goals,
        notes=[
            "Pooling and updates: bytes moved count the row, or the gradient, of every position, as if none were "
            "cached; with Zipf ids the L2 cache gives a part. Against peers, forward includes zeroing its result, and "
            "an update the grouping of its ids; in training that is done ahead, on a stream of its own. "
            + (f"FBGEMM was not measured: {missing}." if missing else "FBGEMM: its updates fused, as ours.")
        ],
    )


def _median(case: dict[str, Any], *names: str) -> float:
    """Seconds, summed over the names; not a number where one was not measured."""
    return sum((case["seconds"][name]["median"] if name in case["seconds"] else float("nan")) for name in names)


def _over_fbgemm(case: dict[str, Any], what: str) -> float:
    if what == "forward":
        return _median(case, "fbgemm sgd forward") / _median(case, "zero", "forward")
    return _median(case, f"fbgemm {what} backward") / _median(case, "group", what)


def _table(measured: list[dict[str, Any]], config: dict[str, Any]) -> Table:
    rows = []
    for case in measured:
        ids = f"Zipf {case['exponent']}" if case["exponent"] else "uniform"
        head = [f"{case['dim']}, {case['batch']:,}, {ids}"]
        for what, torch_name in (("forward", "torch forward"), ("sgd", "torch backward"), ("rowwise_adagrad", "")):
            whole = _median(case, "zero", "forward") if what == "forward" else _median(case, "group", what)
            rows.append(
                [
                    *head,
                    what,
                    f"{case['seconds'][what]['median'] * 1e6:.1f}",
                    f"{case['of_copy'][what]:.2f}",
                    _shown(whole * 1e6, ".1f"),
                    _shown(_median(case, torch_name) / whole, ".2f"),
                    _shown(_over_fbgemm(case, what), ".2f"),
                ]
            )
        rows.append([*head, "group ids", f"{_median(case, 'group') * 1e6:.1f}", "", "", "", ""])
    return Table(
        title=f"{config['tables']} tables of {config['rows']:,} rows in device memory, {config['pooling_factor']} ids "
        "a bag",
        columns=["dim, batch, ids", "kernel", "us", "of copy rate", "with zero/group us", "x torch", "x FBGEMM"],
        rows=rows,
    )


def _shown(value: float, form: str) -> str:
    return "" if value != value else format(value, form)
