"""The dense part of the model: a torch layer with torch's Adam, and noise from torch's own random numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Dense"]

_NOISE = 0.1


class Dense:
    """All of it is committed beside the rows: weights, Adam's state and the state of the random numbers."""

    def __init__(self, columns: int) -> None:
        torch.manual_seed(5)
        self._layer = torch.nn.Linear(columns, 1)
        self._optimizer = torch.optim.Adam(self._layer.parameters(), lr=0.01, foreach=False)

    def step(self, pooled: Tensor, target: Tensor) -> None:
        """One step on float32 [samples, columns]; the gradient goes on to where ``pooled`` came from."""
        noisy = pooled + _NOISE * torch.rand(pooled.shape)
        loss = (self._layer(noisy).squeeze(1) - target).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Copies."""
        found = {f"layer.{name}": tensor.clone() for name, tensor in self._layer.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            found |= {f"adam.{index}.{name}": tensor.clone() for name, tensor in state.items()}
        return found | {"random": torch.get_rng_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part == "adam":
                index, _, key = rest.partition(".")
                state.setdefault(int(index), {})[key] = tensor.clone()
        layer = {name[len("layer.") :]: tensor for name, tensor in tensors.items() if name.startswith("layer.")}
        self._layer.load_state_dict(layer)
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": state})
        torch.set_rng_state(tensors["random"])
