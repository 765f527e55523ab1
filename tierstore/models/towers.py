"""Features in groups, towers, each compressed before they interact (Luo et al., "Disaggregated Multi-Tower: Topology-
aware Modeling Technique for Efficient Large-Scale Recommendation", MLSys 2024).

Shapes: B samples, F features of a tower, D columns of an embedding, W columns of all towers' results.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.jagged import KeyedTensor
from .dlrm import CrossNetwork, xavier


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
