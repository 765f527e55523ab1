"""Pooling and fused updates, all rows in device memory: against the bytes that must move, and against peers."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tierstore import optim
from tierstore.hbm.cache import group, kernels_of
from tierstore.hbm.kernel_types import Bags, Groups
from tierstore.kernels import slots as kernels

from ..common import Spread
from .compulsory import Work, pooled_bytes, updated_bytes
from .ids import Zipf
from .part import Part
from .peers import FbgemmPeer, TorchPeer, fbgemm_missing
from .rig import Action, Rig, rounds_of
from .rows_report import report
from .tables_peer import TablesPeer, tables_missing

__all__ = ["run"]

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


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Iterator[Part]:
    del folder
    limit = rig.copy_bytes_per_s()
    missing = {"fbgemm": fbgemm_missing(rig), "cuda": tables_missing(rig)}
    shapes = list(product(config["exponents"], config["dims"], config["batches"]))
    left = [f"dim {dim}, batch {batch:,}, exponent {exponent}" for exponent, dim, batch in shapes]
    measured: list[dict[str, Any]] = []
    for exponent, dim, batch in shapes:
        case = _draw(rig, exponent, dim, batch, config)
        measured.append(_measure(rig, case, config, limit, missing))
        del case  # before the next one is drawn
        yield report(measured, left[len(measured) :], config, limit, missing)


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

    def merge(self, rule: str) -> Callable[[int], None]:
        """The update of rows that ``group`` grouped."""
        codes = (RULES[rule].code,) * self._tables

        def act(number: int) -> None:
            del number
            case, grouped = self._case, self._grouped
            assert grouped is not None
            self._kernels.update_rows(
                case.bags, grouped, grouped.distinct, 0, grad_out=case.gradient, arg_max=None, mean=False,
                codes=codes, code_of=self._code_of[rule], hyper=self._hyper[rule], weights=case.weights,
                state=case.state, dim=case.dim, dirty=None,
            )  # fmt: skip

        return act

    def update(self, rule: str) -> Callable[[int], None]:
        """The whole backward."""
        merge = self.merge(rule)

        def act(number: int) -> None:
            self.group(number)
            merge(number)

        return act


def _measure(rig: Rig, case: _Case, config: dict[str, Any], limit: float, missing: dict[str, str]) -> dict[str, Any]:
    tables = config["tables"]
    own = _Own(rig, case, tables)
    peers = _peers(rig, case, config, missing)
    _check(case, own, peers)
    actions: dict[str, Action] = {"forward": own.forward, "group": own.group}
    prepare: dict[str, Action] = {}
    for rule in RULES:
        actions |= {rule: own.update(rule), f"{rule} grouped": own.merge(rule)}
        prepare[f"{rule} grouped"] = own.group
    for name, peer in peers.items():
        # Each peer's forward, then its backward: those of torch and FBGEMM need it.
        actions |= {f"{name} {action}": act for action, act in peer.actions.items()}
    device = rig.times(actions, repetitions=config["repetitions"], before=prepare)
    calls = rig.calls(
        {name: action for name, action in actions.items() if name not in prepare}, repetitions=config["repetitions"]
    )
    distinct = int(statistics.median(len(torch.unique(slots)) for slots in case.slots[:_COUNTED]))
    work = Work(len(case.slots[0]), distinct, tables * case.batch, 4 * case.dim, 4 * case.dim)
    compulsory = {"forward": pooled_bytes(work)}
    for rule in RULES:
        compulsory[rule] = compulsory[f"{rule} grouped"] = updated_bytes(work, _STATE_BYTES[rule])
    seconds = {name: Spread.of(each) for name, each in device.items()}
    return {
        "dim": case.dim,
        "batch": case.batch,
        "exponent": case.exponent,
        "positions": work.positions,
        "distinct": distinct,
        "seconds": {name: asdict(each) for name, each in seconds.items()},
        "wall_s": {name: asdict(Spread.of([call.done for call in each])) for name, each in calls.items()},
        "host_s": {name: asdict(Spread.of([call.returned for call in each])) for name, each in calls.items()},
        "compulsory_bytes": compulsory,
        "of_copy": {name: size / seconds[name].median / limit for name, size in compulsory.items()},
    }


def _peers(rig: Rig, case: _Case, config: dict[str, Any], missing: dict[str, str]) -> dict[str, Any]:
    """Each with ``forward``, ``backward`` and ``actions``."""
    found: dict[str, Any] = {"torch": TorchPeer(case.weights, case.slots, case.bags.bag_starts, case.gradient)}
    for rule in RULES:
        if not missing["cuda"]:
            found[f"cuda {rule}"] = TablesPeer(
                case.weights, case.slots, case.bags.bag_starts, case.gradient, case.batch,
                is_adagrad=rule == "rowwise_adagrad", lr=RULES[rule].lr,
            )  # fmt: skip
        if not missing["fbgemm"]:
            found[f"fbgemm {rule}"] = FbgemmPeer(
                rig, config["tables"], config["rows"], case.dim, rule, case.slots, case.bags.bag_starts, case.gradient
            )
    return found


def _check(case: _Case, own: _Own, peers: dict[str, Any]) -> None:
    """RuntimeError unless ours and the CUDA kernels pool as torch does, and SGD changes rows as it should."""
    slots = case.slots[0].long()
    pooled = {"own": own.forward(0)} | {name: peers[name].forward(0).detach() for name in peers if name != "torch"}
    expected = peers["torch"].forward(0).detach()
    for name, found in pooled.items():
        # FBGEMM has rows of its own.
        if not name.startswith("fbgemm"):
            _require_near(f"{name}: pooled rows", found, expected, expected.abs())
    rows, inverse = torch.unique(slots, return_inverse=True)
    sources = case.gradient.view(case.batch, -1, case.dim).transpose(0, 1).reshape(-1, case.dim)
    sources = sources[case.bags.bag_of.long()]
    summed = torch.zeros((len(rows), case.dim), device=slots.device).index_add_(0, inverse, sources)
    sizes = torch.zeros((len(rows), case.dim), device=slots.device).index_add_(0, inverse, sources.abs())
    actions = {"own": own.update("sgd")} | {name: peer.backward for name, peer in peers.items() if name == "cuda sgd"}
    for name, action in actions.items():
        before = case.weights[rows]
        action(0)
        change = (before - case.weights[rows]) / RULES["sgd"].lr
        _require_near(f"{name}: changes by SGD", change, summed, sizes + 1)


def _require_near(what: str, found: Tensor, expected: Tensor, scale: Tensor) -> None:
    error = float(((found - expected).abs() / (scale + 1)).max())
    if not error < _TOLERANCE:
        raise RuntimeError(f"{what} are wrong by {error}")
