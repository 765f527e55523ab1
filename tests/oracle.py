"""Training an embedding table the plain way: a dense tensor, torch's autograd, torch's own optimizers.

Shares nothing with tierstore: only rows that the batch touched take part in an update, as tierstore promises.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tierstore import optim

STATE_NAMES = {optim.SGD: (), optim.Adagrad: ("sum",), optim.Adam: ("exp_avg", "exp_avg_sq")}


class DenseTable:
    """float32 weights and state of one table, all in memory."""

    def __init__(self, weights: Tensor, optimizer: optim.Optimizer) -> None:
        self.weights = weights.clone()
        self.optimizer = optimizer
        self.step_count = 0
        rows = len(weights)
        self.accumulator = torch.full((rows,), optimizer.initial_state)
        self.state = {
            name: torch.full_like(weights, optimizer.initial_state) for name in STATE_NAMES.get(type(optimizer), ())
        }

    def pooled(self, ids: Tensor, offsets: Tensor, mode: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(leaf weights with gradient, pooled rows)."""
        leaf = self.weights.clone().requires_grad_()
        out = functional.embedding_bag(
            ids, leaf, offsets, mode=mode, per_sample_weights=scale, include_last_offset=True
        )
        return leaf, out

    def apply(self, gradient: Tensor, ids: Tensor) -> None:
        """One optimizer step on the rows of ``ids``."""
        self.step_count += 1
        touched = ids.unique()
        if isinstance(self.optimizer, optim.RowWiseAdagrad) and not isinstance(self.optimizer, optim.Adagrad):
            self._rowwise_adagrad(touched, gradient[touched])
        else:
            self._torch_step(touched, gradient[touched])

    def _rowwise_adagrad(self, touched: Tensor, gradient: Tensor) -> None:
        rule: Any = self.optimizer
        decay = rule.weight_decay * self.weights[touched]
        gradient = gradient if rule.decoupled else gradient + decay
        self.accumulator[touched] += gradient.double().pow(2).mean(1).float()
        root = self.accumulator[touched].sqrt() + rule.eps
        self.weights[touched] -= rule.lr * (gradient / root[:, None] + (decay if rule.decoupled else 0))

    def _torch_step(self, touched: Tensor, gradient: Tensor) -> None:
        rule: Any = self.optimizer
        parameter = torch.nn.Parameter(self.weights[touched].clone())
        parameter.grad = gradient.clone()
        torch_optimizer = self._torch_optimizer(rule, [parameter])
        for name, values in self.state.items():
            torch_optimizer.state[parameter][name] = values[touched].clone()
        if self.state:
            torch_optimizer.state[parameter]["step"] = torch.tensor(float(self.step_count - 1))
        torch_optimizer.step()
        self.weights[touched] = parameter.detach()
        for name, values in self.state.items():
            values[touched] = torch_optimizer.state[parameter][name]

    @staticmethod
    def _torch_optimizer(rule: Any, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        common = {"lr": rule.lr, "weight_decay": rule.weight_decay}
        if isinstance(rule, optim.Adam):
            kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
            return kind(parameters, betas=rule.betas, eps=rule.eps, **common)
        if isinstance(rule, optim.Adagrad):
            return torch.optim.Adagrad(
                parameters, eps=rule.eps, initial_accumulator_value=rule.initial_accumulator_value, **common
            )
        return torch.optim.SGD(parameters, **common)


def jagged(generator: torch.Generator, *, bags: int, rows: int, longest: int) -> tuple[Tensor, Tensor]:
    """(ids, offsets with the last one included): skewed ids, some bags empty."""
    lengths = torch.randint(0, longest + 1, (bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = (torch.rand(int(offsets[-1]), generator=generator) ** 2 * rows).long()
    return ids, offsets
