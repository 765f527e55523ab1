"""FBGEMM's table-batched embeddings on the CPU."""

from typing import Final

import torch
from torch import Tensor

from . import has, load

_MODULE: Final = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


def is_there() -> bool:
    return has(_MODULE)


class Fbgemm:
    """Tables of one shape in one table-batched module, from a copy of weights, float32 [rows, dim] of each, trained by
    "EXACT_SGD" or "EXACT_ROWWISE_ADAGRAD"."""

    def __init__(self, weights: list[Tensor], *, optimizer: str, lr: float, eps: float) -> None:
        operators = load(_MODULE)
        shape = (*weights[0].shape, operators.EmbeddingLocation.HOST, operators.ComputeDevice.CPU)
        rule = getattr(operators.OptimType, optimizer)
        self._module = operators.SplitTableBatchedEmbeddingBagsCodegen(
            [shape] * len(weights), optimizer=rule, learning_rate=lr, eps=eps
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
