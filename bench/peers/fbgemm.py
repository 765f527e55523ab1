"""FBGEMM's table-batched embeddings on the CPU, if ``make peers`` has brought them."""

import sys
import warnings
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from ..data import ROOT

__all__ = ["Fbgemm", "is_there"]

PEERS: Final = ROOT / ".peers"


def _operators() -> ModuleType | None:
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as operators
    except (ImportError, OSError):
        return None
    found: ModuleType = operators
    return found


def is_there() -> bool:
    return _operators() is not None


class Fbgemm:
    """Tables of one shape in one table-batched module.

    Args:
        optimizer: "EXACT_SGD" or "EXACT_ROWWISE_ADAGRAD".
        weights: float32 [rows, dim] of each table, copied.
    """

    def __init__(self, weights: list[Tensor], *, optimizer: str, lr: float, eps: float) -> None:
        operators: Any = _operators()
        rows, dim = weights[0].shape
        place = operators.EmbeddingLocation.HOST, operators.ComputeDevice.CPU
        self._module = operators.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place)] * len(weights),
            optimizer=getattr(operators.OptimType, optimizer),
            learning_rate=lr,
            eps=eps,
        )
        for own, given in zip(self.weights, weights, strict=True):
            own.copy_(given)

    @property
    def weights(self) -> list[Tensor]:
        """float32 [rows, dim] of each table, as they are."""
        return [each.detach() for each in self._module.split_embedding_weights()]

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self._module(values, offsets)
        return out

    def step(self, values: Tensor, offsets: Tensor, gradient: Tensor) -> None:
        self._module(values, offsets).backward(gradient)
