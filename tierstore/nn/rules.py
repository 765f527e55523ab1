"""The update rule of a table in the place of a weight, of the torch optimizer that trained it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import optim

Rules = optim.Optimizer | Mapping[str, optim.Optimizer] | torch.optim.Optimizer
"""One for all tables, by name, or what trains the weights."""


def rules_of(given: Rules | None, name: str, weight: Tensor) -> tuple[optim.Optimizer | None, Mapping[str, Any]]:
    """(the rule, None if none is given; the optimizer's state of the weight).

    Raises:
        ValueError: there is none for this weight, or it has no counterpart. TypeError: ``given`` is something else.
    """
    if given is None or isinstance(given, optim.Optimizer):
        return given, {}
    if isinstance(given, torch.optim.Optimizer):
        for group in given.param_groups:
            if any(each is weight for each in group["params"]):
                return _rule_of(type(given).__name__, group), given.state.get(weight, {})
        if not weight.requires_grad:
            return None, {}
        raise ValueError("the optimizer does not train its weight; give optimizer={name: tierstore.optim....}")
    if not isinstance(given, Mapping) or not all(isinstance(each, optim.Optimizer) for each in given.values()):
        raise TypeError(
            "optimizer must be a tierstore.optim.Optimizer, a dict of those by module name, or a torch optimizer, not "
            f"{type(given).__name__}"
        )
    if name not in given:
        raise ValueError(f"optimizer has no rule for it, but for {list(given)}")
    return given[name], {}


def _rule_of(kind: str, group: Mapping[str, Any]) -> optim.Optimizer:
    for option, default in (("momentum", 0), ("lr_decay", 0), ("amsgrad", False), ("maximize", False)):
        if group.get(option, default) != default:
            raise ValueError(f"{option}={group[option]} of torch.optim.{kind} has no counterpart: leave it out")
    common: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group.get("weight_decay", 0))}
    if kind == "SGD":
        return optim.SGD(**common)
    if kind in ("Adagrad", "RowWiseAdagrad"):  # the second is TorchRec's
        rule = optim.Adagrad if kind == "Adagrad" else optim.RowWiseAdagrad
        first = float(group["initial_accumulator_value"])
        return rule(**common, eps=group["eps"], initial_accumulator_value=first)
    if kind in ("Adam", "AdamW", "SparseAdam"):
        decoupled = kind == "AdamW" or group.get("decoupled_weight_decay", False)
        return optim.Adam(**common, betas=tuple(group["betas"]), eps=group["eps"], decoupled=decoupled)
    raise ValueError(
        f"{kind} has no counterpart: give optimizer= SGD, Adagrad, RowWiseAdagrad or Adam of tierstore.optim"
    )
