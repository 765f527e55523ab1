"""The dense part of the model: a torch layer with SGD, and noise from torch's own random numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Dense"]

_NOISE = 0.1


class Dense:
    """All of it is committed beside the rows: weights, and the state of the random numbers."""

    def __init__(self, columns: int) -> None:
        torch.manual_seed(5)
        self._layer = torch.nn.Linear(columns, 1)
        self._optimizer = torch.optim.SGD(self._layer.parameters(), lr=0.01)

    def step(self, pooled: Tensor, target: Tensor) -> None:
        """One step on float32 [samples, columns]; the gradient goes on to where ``pooled`` came from."""
        noisy = pooled + _NOISE * torch.rand(pooled.shape)
        loss = (self._layer(noisy).squeeze(1) - target).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Copies."""
        found = {name: tensor.clone() for name, tensor in self._layer.state_dict().items()}
        return found | {"random": torch.get_rng_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        self._layer.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "random"})
        torch.set_rng_state(tensors["random"])
