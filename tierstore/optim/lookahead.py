"""Slow weights that follow an optimizer's."""

from collections.abc import Callable
from typing import Any

import torch

from ..system.checks import require_int
from .curvature import dense_of


class Lookahead(torch.optim.Optimizer):
    """Every ``k`` steps of another optimizer, weights go back to a share of the way: ``slow += alpha * (fast - slow);
    fast = slow`` (Zhang, Lucas, Hinton and Ba, "Lookahead optimizer: k steps forward, 1 step back", NeurIPS 2019).

    Groups and state are those of the other optimizer, with the slow weights among the state, so schedules and
    checkpoints take this one in its place. Rows of tables keep their own optimizer.

    ``optimizer``: of dense weights, any of torch's, stepped by this one only. ``alpha``: above 0, up to 1. TypeError,
    ValueError: a wrong argument.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, k: int = 5, alpha: float = 0.5) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha} must be above 0, and at most 1")
        self.optimizer, self.k, self.alpha = optimizer, require_int(k, "k", 1, 1 << 20), alpha
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def __getstate__(self) -> dict[str, Any]:  # of which torch's knows groups and state
        return {**super().__getstate__(), "optimizer": self.optimizer, "k": self.k, "alpha": self.alpha}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the other optimizer, whose result it returns, and after ``k`` of them the way back."""
        dense = dense_of(each for group in self.param_groups for each in group["params"])
        first = {each: each.clone() for each in dense if "slow" not in self.state.get(each, {})}
        result: Any = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        steps = self.param_groups[0]["steps_from_slow"] = (self.param_groups[0].get("steps_from_slow", 0) + 1) % self.k
        for each in dense:
            if each in first and torch.equal(each, first[each]):
                continue  # some optimizers know by an empty state that they have not moved it yet
            slow = self.state[each].setdefault("slow", first.get(each))
            if not steps:
                each.copy_(slow.lerp_(each, self.alpha))
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
