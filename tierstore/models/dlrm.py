"""DLRM (Naumov et al., 2019): a bottom MLP for the dense features, an interaction, a top MLP.

Shapes: B samples, C dense features, F sparse features, D columns of an embedding, E = F * D, N = F + 1 vectors of a
sample.
"""

import math
import re
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """The dense vector, followed by the dot products of all pairs of the sample's vectors (Naumov et al., 2019)."""

    pairs: Tensor

    def __init__(self, *, num_features: int, dim: int) -> None:
        super().__init__()
        num_vectors = num_features + 1
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", row * num_vectors + column, persistent=False)
        self.out_features = dim + num_vectors * (num_vectors - 1) // 2

    def forward(self, dense_BD: Tensor, sparse_BFD: Tensor) -> Tensor:
        """Returns Tensor [B, D + N(N-1)/2]: pairs in the order (1,0), (2,0), (2,1), ...; 0 is the dense vector."""
        vectors_BND = torch.cat([dense_BD.unsqueeze(1), sparse_BFD], dim=1)
        products_BNN = torch.bmm(vectors_BND, vectors_BND.transpose(1, 2))
        return torch.cat([dense_BD, products_BNN.flatten(1).index_select(1, self.pairs)], dim=1)


class CrossNetwork(nn.Module):
    """DCN-v2: ``x[l+1] = x[0] * (W[l] x[l] + b[l]) + x[l]`` over the sample's vectors laid end to end.

    With ``rank`` above zero ``W[l]`` is the product of two matrices of that rank. Wang et al., "DCN V2: Improved Deep &
    Cross Network and Practical Lessons for Web-scale Learning to Rank Systems", 2021.
    """

    def __init__(self, *, num_features: int, dim: int, layers: int, rank: int, dense_dim: int | None = None) -> None:
        super().__init__()
        width = num_features * dim + (dim if dense_dim is None else dense_dim)

        def weight() -> nn.Module:
            if not rank:
                return xavier(nn.Linear(width, width))
            return nn.Sequential(xavier(nn.Linear(width, rank, bias=False)), xavier(nn.Linear(rank, width)))

        self.layers = nn.ModuleList(weight() for _ in range(layers))
        self.out_features = width

    def forward(self, dense_BD: Tensor, sparse_BFD: Tensor) -> Tensor:
        """Returns Tensor [B, N * D]."""
        first = torch.cat([dense_BD, sparse_BFD.flatten(1)], dim=1)
        crossed = first
        for layer in self.layers:
            crossed = first * layer(crossed) + crossed
        return crossed


def xavier(linear: nn.Linear) -> nn.Linear:
    """The layer, initialised as those that compress or cross vectors are."""
    nn.init.xavier_normal_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class DLRM(nn.Module):
    """Logits of binary labels from dense features and jagged ids.

    Args:
        embeddings: called with the jagged ids; its result's ``values()`` is a Tensor [B, F * D]. A
            ``TieredEmbeddingBagCollection``, or any module that answers the same.
        num_features, embedding_dim: F and D.
        num_dense: C; without dense features, 0, the bottom MLP gives every sample the same vector, which is learned.
        bottom_mlp, top_mlp: hidden widths; a last layer, of width D or 1, is added.
        interaction: "dot" for dot products of all pairs, "dcn" for the cross network of DCN-v2.
        cross_layers, cross_rank: layers of the cross network, and rank of its weight matrices; 0 for full ones.
        dense_dim: width of the dense vector, with "dcn"; None: D. Over the results of ``DCNTower``s, W of them, take
            ``num_features=W, embedding_dim=1, dense_dim=D``.

    ValueError: an unknown interaction or a width below 1.
    """

    def __init__(
        self, embeddings: nn.Module, *, num_features: int, embedding_dim: int, num_dense: int = 13,
        bottom_mlp: Sequence[int] = (64,), top_mlp: Sequence[int] = (64,), interaction: Literal["dot", "dcn"] = "dot",
        cross_layers: int = 2, cross_rank: int = 32, dense_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        width = embedding_dim if dense_dim is None else dense_dim
        if min(num_features, embedding_dim, width, num_dense + 1, *bottom_mlp, *top_mlp) < 1:
            raise ValueError("num_features, embedding_dim and the widths of the MLPs must be at least 1, num_dense 0")
        self.embeddings = embeddings
        self._sparse_shape = (num_features, embedding_dim)
        if interaction == "dot" and dense_dim not in (None, embedding_dim):
            raise ValueError(f'dense_dim={dense_dim}: with interaction="dot" it is the embedding_dim, {embedding_dim}')
        self.bottom = _mlp([num_dense, *bottom_mlp, width], end_with_relu=True)
        self.interaction: DotInteraction | CrossNetwork
        shape = {"num_features": num_features, "dim": embedding_dim}
        if interaction == "dot":
            self.interaction = DotInteraction(**shape)
        elif interaction == "dcn":
            if cross_layers < 1 or cross_rank < 0:
                raise ValueError(f"cross_layers={cross_layers} must be at least 1, cross_rank={cross_rank} at least 0")
            self.interaction = CrossNetwork(**shape, layers=cross_layers, rank=cross_rank, dense_dim=dense_dim)
        else:
            raise ValueError(f'interaction={interaction!r}: expected "dot" or "dcn"')
        self.top = _mlp([self.interaction.out_features, *top_mlp, 1], end_with_relu=False)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """All but those of the embeddings, by name; the modules of ``Towers`` are dense."""
        named = dict(self.named_parameters())
        return {name: each for name, each in named.items() if not re.match(r"embeddings\.(?!towers\.)", name)}

    def forward(self, dense_BC: Tensor | None, sparse: Any) -> Tensor:
        """Returns the logits, Tensor [B]; ``dense_BC`` may be None without dense features."""
        return self.dense_part(dense_BC, self.embeddings(sparse).values())

    def dense_part(self, dense_BC: Tensor | None, pooled_BE: Tensor) -> Tensor:
        """All but the embeddings: the logits, Tensor [B], from their pooled rows; ``torch.compile`` and CUDA graphs
        take it."""
        if dense_BC is None:
            dense_BC = pooled_BE.new_empty(pooled_BE.shape[0], 0)
        sparse_BFD = torch.unflatten(pooled_BE, 1, self._sparse_shape)
        logits: Tensor = self.top(self.interaction(self.bottom(dense_BC), sparse_BFD)).squeeze(1)
        return logits


def _mlp(widths: Sequence[int], *, end_with_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, initialised as in the reference DLRM."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        with warnings.catch_warnings(action="ignore"):  # there is nothing to initialise without dense features
            linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, 0.0, math.sqrt(2 / (fan_in + fan_out)))
        nn.init.normal_(linear.bias, 0.0, math.sqrt(1 / fan_out))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if end_with_relu else layers[:-1]))
