"""DLRM (Naumov et al., 2019): a bottom MLP for the dense features, an interaction, a top MLP.

Shapes: B samples, C dense features, F sparse features, D columns of an embedding, E = F * D.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .interaction import CrossNetwork, DotInteraction

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Logits of binary labels from dense features and jagged ids.

    Args:
        embeddings: called with the jagged ids; its result's ``values()`` is a Tensor [B, F * D]. A
            ``TieredEmbeddingBagCollection``, or any module that answers the same.
        num_features: F.
        embedding_dim: D.
        num_dense: C.
        bottom_mlp: hidden widths of the bottom MLP; its last layer, of width D, is added.
        top_mlp: hidden widths of the top MLP; its last layer, of width 1, is added.
        interaction: "dot" for dot products of all pairs, "dcn" for the cross network of DCN-v2.
        cross_layers: layers of the cross network.
        cross_rank: rank of its weight matrices; 0 for full matrices.

    Raises:
        ValueError: for an unknown interaction or a width below 1.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_features: int,
        embedding_dim: int,
        num_dense: int = 13,
        bottom_mlp: Sequence[int] = (64,),
        top_mlp: Sequence[int] = (64,),
        interaction: Literal["dot", "dcn"] = "dot",
        cross_layers: int = 2,
        cross_rank: int = 32,
    ) -> None:
        super().__init__()
        if min(num_features, embedding_dim, num_dense, *bottom_mlp, *top_mlp) < 1:
            raise ValueError("num_features, embedding_dim, num_dense and the widths of the MLPs must be at least 1")
        self.embeddings = embeddings
        self._sparse_shape = (num_features, embedding_dim)
        self.bottom = _mlp([num_dense, *bottom_mlp, embedding_dim], end_with_relu=True)
        self.interaction: DotInteraction | CrossNetwork
        if interaction == "dot":
            self.interaction = DotInteraction(num_features=num_features, dim=embedding_dim)
        elif interaction == "dcn":
            if cross_layers < 1 or cross_rank < 0:
                raise ValueError(f"cross_layers={cross_layers} must be at least 1, cross_rank={cross_rank} at least 0")
            self.interaction = CrossNetwork(
                num_features=num_features, dim=embedding_dim, layers=cross_layers, rank=cross_rank
            )
        else:
            raise ValueError(f'interaction={interaction!r}: expected "dot" or "dcn"')
        self.top = _mlp([self.interaction.out_features, *top_mlp, 1], end_with_relu=False)

    def forward(self, dense_BC: Tensor, sparse: Any) -> Tensor:
        """Returns the logits, Tensor [B]; ``sparse`` is what the embeddings are called with."""
        return self.dense_part(dense_BC, self.embeddings(sparse).values())

    def dense_part(self, dense_BC: Tensor, pooled_BE: Tensor) -> Tensor:
        """All but the embeddings: the logits, Tensor [B], from their pooled rows.

        Tensors in, a tensor out, on one device and without a look at their values: ``torch.compile`` and CUDA graphs
        take it.
        """
        sparse_BFD = torch.unflatten(pooled_BE, 1, self._sparse_shape)
        logits: Tensor = self.top(self.interaction(self.bottom(dense_BC), sparse_BFD)).squeeze(1)
        return logits


def _mlp(widths: Sequence[int], *, end_with_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, initialised as in the reference DLRM."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, 0.0, math.sqrt(2 / (fan_in + fan_out)))
        nn.init.normal_(linear.bias, 0.0, math.sqrt(1 / fan_out))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if end_with_relu else layers[:-1]))
