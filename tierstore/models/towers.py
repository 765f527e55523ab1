"""Disaggregated multi-tower models (Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling Technique for
Efficient Large-Scale Recommendation", MLSys 2024): features in groups, towers, each compressed before they interact.

Shapes: B samples, F features of a tower, D columns of an embedding, E = columns of all features together, W = of all
towers' results.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import KeyedTensor
from ..system.checks import require_partition
from .dlrm import CrossNetwork, xavier


class DLRMTower(nn.Module):
    """A tower's features as c F + p vectors, for a ``DLRM`` with dot interaction over the vectors of all towers.

    One linear layer makes c vectors of each feature, by the same weights for all; another makes p of all features
    together. The tower is compressed by F D / ((c F + p) out_dim).

    Args:
        num_features: F.
        dim: D.
        out_dim: width of a vector; the ``embedding_dim`` of the DLRM.
        per_feature: c.
        flat: p.

    Raises:
        ValueError: the tower would give nothing.
    """

    def __init__(self, *, num_features: int, dim: int, out_dim: int, per_feature: int = 0, flat: int = 1) -> None:
        super().__init__()
        self.num_vectors = per_feature * num_features + flat
        self.out_features = self.num_vectors * out_dim
        if min(num_features, dim, out_dim, self.num_vectors, per_feature + 1, flat + 1) < 1:
            raise ValueError(
                f"num_features={num_features}, dim={dim}, out_dim={out_dim}, per_feature={per_feature}, flat={flat}: "
                "expected at least 1 for each, or 0 for one of the last two"
            )
        self._shape = (num_features, dim)
        self.per_feature = xavier(nn.Linear(dim, per_feature * out_dim)) if per_feature else None
        self.flat = xavier(nn.Linear(num_features * dim, flat * out_dim)) if flat else None

    def forward(self, pooled: Tensor) -> Tensor:
        """Float32 [B, F * D] to [B, out_features]: the c vectors of each feature in turn, then the p."""
        parts = []
        if self.per_feature is not None:
            parts.append(self.per_feature(torch.unflatten(pooled, 1, self._shape)).flatten(1))
        if self.flat is not None:
            parts.append(self.flat(pooled))
        return torch.cat(parts, dim=1)


class DCNTower(nn.Module):
    """A small cross network over a tower's features, and a projection, for a ``DLRM`` with ``interaction="dcn"``.

    Args:
        num_features: F.
        dim: D.
        out_features: columns of the result.
        layers: of the cross network.
        rank: of its weight matrices; 0 for full ones.

    Raises:
        ValueError: a number is too small.
    """

    def __init__(self, *, num_features: int, dim: int, out_features: int, layers: int = 1, rank: int = 0) -> None:
        super().__init__()
        if min(num_features, dim, out_features, layers, rank + 1) < 1:
            raise ValueError(
                f"num_features={num_features}, dim={dim}, out_features={out_features}, layers={layers} must be at "
                f"least 1, rank={rank} at least 0"
            )
        self.out_features = out_features
        self.cross = CrossNetwork(num_features=num_features, dim=dim, layers=layers, rank=rank, dense_dim=0)
        self.projection = xavier(nn.Linear(self.cross.out_features, out_features))

    def forward(self, pooled: Tensor) -> Tensor:
        """Float32 [B, F * D] to [B, out_features]."""
        projected: Tensor = self.projection(self.cross.cross(pooled))
        return projected


class Towers(nn.Module):
    """Embeddings whose features are compressed in groups, in one process; a ``DLRM`` takes it as its embeddings.

    Its weights are named as those of a collection whose towers are on hosts of their own: ``towers.0.``, ....

    Args:
        embeddings: a ``TieredEmbeddingBagCollection``, or what has its ``embedding_bag_configs`` and results.
        towers: names of each tower's features. Their columns are in order of ``embeddings``, whatever the order here.
        modules: one for each tower: nn.Module of [B, columns of its features] to [B, ``out_features``].

    Attributes:
        out_features: W.

    Raises:
        ValueError: a feature is in no tower or in two, or there is not one module for each tower.
    """

    def __init__(self, embeddings: Any, towers: Sequence[Sequence[str]], modules: Sequence[Any]) -> None:
        super().__init__()
        dims = {
            name: config.embedding_dim for config in embeddings.embedding_bag_configs() for name in config.feature_names
        }
        require_partition(towers, list(dims), "features")
        if len(modules) != len(towers):
            raise ValueError(f"{len(towers)} towers have {len(modules)} modules: give one for each")
        self.embeddings = embeddings
        self.towers = nn.ModuleList(modules)
        self.widths = [int(module.out_features) for module in modules]
        self.out_features = sum(self.widths)
        self._dims = list(dims.values())
        self._features = [[place for place, name in enumerate(dims) if name in tower] for tower in towers]

    def forward(self, features: Any) -> KeyedTensor:
        """The towers' results for a batch of ids, Tensor [B, W] in order of the towers."""
        names = [f"tower{number}" for number in range(len(self.widths))]
        return KeyedTensor(names, self.widths, self.compressed(self.embeddings(features).values()))

    def compressed(self, pooled_BE: Tensor) -> Tensor:
        """The towers' results, Tensor [B, W], of all features' pooled rows, in order of ``embeddings``."""
        columns = torch.split(pooled_BE, self._dims, dim=1)
        parts = (torch.cat([columns[place] for place in places], dim=1) for places in self._features)
        return torch.cat([module(part) for module, part in zip(self.towers, parts, strict=True)], dim=1)
