"""DLRM (Naumov et al., 2019): a bottom MLP for the dense features, an interaction, a top MLP. And features in groups,
towers, each compressed before they interact (Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling Technique
for Efficient Large-Scale Recommendation", MLSys 2024).

Shapes: B samples, C dense features, F sparse features (of a tower, its own), D columns of an embedding, E = F * D, N =
F + 1 vectors of a sample, W columns of all towers' results, L labels.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..nn.jagged import KeyedTensor


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
    """Logits of binary labels, one or several, from dense features and jagged ids.

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
        num_labels: L; of several, each has a head, the last layer's column over what is shared below.

    ValueError: an unknown interaction or a width below 1.
    """

    def __init__(
        self, embeddings: nn.Module, *, num_features: int, embedding_dim: int, num_dense: int = 13,
        bottom_mlp: Sequence[int] = (64,), top_mlp: Sequence[int] = (64,), interaction: Literal["dot", "dcn"] = "dot",
        cross_layers: int = 2, cross_rank: int = 32, dense_dim: int | None = None, num_labels: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        width = embedding_dim if dense_dim is None else dense_dim
        if min(num_features, embedding_dim, width, num_dense + 1, *bottom_mlp, *top_mlp, num_labels) < 1:
            raise ValueError("num_features, embedding_dim, num_labels and widths must be at least 1, num_dense 0")
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
        self.top = _mlp([self.interaction.out_features, *top_mlp, num_labels], end_with_relu=False)

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """All but those of the embeddings, by name; the modules of ``Towers`` are dense."""
        named = dict(self.named_parameters())
        return {name: each for name, each in named.items() if not re.match(r"embeddings\.(?!towers\.)", name)}

    def forward(self, dense_BC: Tensor | None, sparse: Any) -> Tensor:
        """Returns the logits, [B], or [B, L] of several labels; ``dense_BC`` may be None without dense features."""
        return self.dense_part(dense_BC, self.embeddings(sparse).values())

    def dense_part(self, dense_BC: Tensor | None, pooled_BE: Tensor) -> Tensor:
        """All but the embeddings: the logits, as ``forward``, from their pooled rows; ``torch.compile`` and CUDA graphs
        take it."""
        if dense_BC is None:
            dense_BC = pooled_BE.new_empty(pooled_BE.shape[0], 0)
        sparse_BFD = torch.unflatten(pooled_BE, 1, self._sparse_shape)
        logits_BL: Tensor = self.top(self.interaction(self.bottom(dense_BC), sparse_BFD))
        return logits_BL.squeeze(1)


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


class DLRMTower(nn.Module):
    """A tower's features as c F + p vectors, for a ``DLRM`` with dot interaction over the vectors of all towers.

    One linear layer makes c vectors of each feature, by the same weights for all; another makes p of all features
    together. The tower is compressed by F D / ((c F + p) out_dim). ValueError: it would give nothing.

    Args:
        num_features, dim: F and D. per_feature, flat: c and p.
        out_dim: width of a vector; the ``embedding_dim`` of the DLRM.
    """

    def __init__(self, *, num_features: int, dim: int, out_dim: int, per_feature: int = 0, flat: int = 1) -> None:
        super().__init__()
        self.num_vectors = per_feature * num_features + flat
        if min(num_features, dim, out_dim, self.num_vectors, per_feature + 1, flat + 1) < 1:
            raise ValueError("num_features, dim, out_dim and per_feature + flat must be at least 1")
        self.out_features = self.num_vectors * out_dim
        self._shape = (num_features, dim)
        self.per_feature = xavier(nn.Linear(dim, per_feature * out_dim)) if per_feature else None
        self.flat = xavier(nn.Linear(num_features * dim, flat * out_dim)) if flat else None

    def forward(self, pooled: Tensor) -> Tensor:
        """Float32 [B, F * D] to [B, out_features]: the c vectors of each feature in turn, then the p."""
        parts = [] if self.flat is None else [self.flat(pooled)]
        if self.per_feature is not None:
            parts.insert(0, self.per_feature(torch.unflatten(pooled, 1, self._shape)).flatten(1))
        return torch.cat(parts, dim=1)


class DCNTower(nn.Module):
    """A ``CrossNetwork`` over a tower's features, of so many layers and that rank, and a projection to ``out_features``
    columns, for a ``DLRM`` with ``interaction="dcn"``. ``num_features``, ``dim``: F and D."""

    def __init__(self, *, num_features: int, dim: int, out_features: int, layers: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.out_features = out_features
        self.cross = CrossNetwork(num_features=num_features, dim=dim, layers=layers, rank=rank, dense_dim=0)
        self.projection = xavier(nn.Linear(num_features * dim, out_features))

    def forward(self, pooled: Tensor) -> Tensor:
        """Float32 [B, F * D] to [B, out_features]."""
        projected: Tensor = self.projection(self.cross(pooled[:, :0], pooled))
        return projected


class Towers(nn.Module):
    """Embeddings compressed by towers, in one process; a ``DLRM`` takes it as its embeddings. Weights are named as over
    hosts: ``towers.0.``, ....

    Args:
        embeddings: a ``TieredEmbeddingBagCollection``, or what has its ``embedding_bag_configs`` and results.
        towers: names of each tower's features. Their columns are in order of ``embeddings``, whatever the order here.
        modules: of each tower: nn.Module of float32 [B, its columns] to [B, ``out_features``], an attribute.

    Attributes: ``widths``, columns that each gives, and ``out_features``, W. ValueError: a feature is in no tower or in
    two, a tower has none, or there is not one module for each.
    """

    def __init__(self, embeddings: Any, towers: Sequence[Sequence[str]], modules: Sequence[Any]) -> None:
        super().__init__()
        dims = {name: each.embedding_dim for each in embeddings.embedding_bag_configs() for name in each.feature_names}
        counts = Counter(chain(*towers))
        for name in [*dims, *counts]:
            if counts[name] != 1 or name not in dims:
                raise ValueError(f"towers name {name!r} {counts[name]} times: name each feature once, nothing else")
        if not all(towers):
            raise ValueError("towers: one has no features")
        if len(modules) != len(towers):
            raise ValueError(f"{len(modules)} modules are given for {len(towers)} towers: give each its own")
        self.embeddings, self.towers = embeddings, nn.ModuleList(modules)
        self.widths = [int(module.out_features) for module in modules]
        self.out_features = sum(self.widths)
        self._dims = list(dims.values())
        self._features = [[place for place, name in enumerate(dims) if name in tower] for tower in towers]

    def forward(self, features: Any) -> KeyedTensor:
        """The towers' results, float32 [B, W], for a batch of ids, with the keys "tower0", ...."""
        names = [f"tower{number}" for number in range(len(self.widths))]
        return KeyedTensor(names, self.widths, self.compressed(self.embeddings(features).values()))

    def compressed(self, pooled: Tensor) -> Tensor:
        """The same, of the pooled rows: float32 [B, columns of all features], in order of ``embeddings``."""
        columns = torch.split(pooled, self._dims, dim=1)
        parts = (torch.cat([columns[place] for place in places], dim=1) for places in self._features)
        return torch.cat([module(part) for module, part in zip(self.towers, parts, strict=True)], dim=1)


def logits_of(model: DLRM, dense_BC: Tensor, pooled_BE: Tensor) -> Tensor:
    """As ``DLRM.dense_part`` from pooled rows, which towers compress first if it has them."""
    if isinstance(model.embeddings, Towers):
        pooled_BE = model.embeddings.compressed(pooled_BE)
    return model.dense_part(dense_BC, pooled_BE)
