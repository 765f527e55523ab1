"""Lookahead against the paper's loop, written by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tierstore.optim import HessianFree, Lookahead

RULES: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "hessian-free": HessianFree,
}


class Job:
    """A net, and a weight that has gradients from the third step on."""

    def __init__(self, rule: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.weights = [*self.net.parameters(), nn.Parameter(torch.ones(1).double())]
        self.inner = self.optimizer = RULES[rule](self.weights)
        if options:
            self.optimizer = Lookahead(self.inner, **options)

    def step(self, number: int) -> None:
        inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(number)).double()

        def loss() -> Any:
            outputs = self.net(inputs)[:, 0] * (self.weights[-1] if number > 2 else 1)
            return (outputs - inputs.sum(1)).square().mean()

        is_called = isinstance(self.inner, HessianFree)
        self.optimizer.zero_grad()
        if not is_called:
            loss().backward()
        self.optimizer.step(*[loss] * is_called)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("k", "alpha"), [(3, 0.5), (1, 0.3), (4, 1.0)])
def test_weights_go_back_a_share_of_the_way_as_by_hand(rule: str, k: int, alpha: float) -> None:
    plain, ours, resumed = Job(rule), Job(rule, k=k, alpha=alpha), Job(rule, k=k, alpha=alpha)
    slow = [each.detach().clone() for each in plain.weights]
    for number in range(1, 8):
        plain.step(number)
        for before, each in zip(slow, plain.weights, strict=True):
            if number % k == 0:
                before += alpha * (each.detach() - before)
                each.data.copy_(before)
        ours.step(number)
        close = 1e-3 if rule == "hessian-free" else 1e-12  # Bi-CGSTAB may make much of the last bit
        torch.testing.assert_close(ours.weights, plain.weights, rtol=close, atol=close)
        if number > 4:
            resumed.step(number)
        elif number == 4:
            for one, other in zip(resumed.weights, ours.weights, strict=True):
                one.data.copy_(other)
            resumed.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    assert all(torch.equal(one, other) for one, other in zip(resumed.weights, ours.weights, strict=True))
