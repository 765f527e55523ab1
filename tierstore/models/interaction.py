"""How DLRM joins its dense vector and its embeddings: pairwise dot products, or a cross network.

Shapes: B samples, F sparse features, D columns of an embedding, N = F + 1 vectors of a sample.
"""

import torch
from torch import Tensor, nn

__all__ = ["CrossNetwork", "DotInteraction"]


class DotInteraction(nn.Module):
    """The dense vector, followed by the dot products of all pairs of the sample's vectors.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
    """

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

    def __init__(self, *, num_features: int, dim: int, layers: int, rank: int) -> None:
        super().__init__()
        width = (num_features + 1) * dim
        self.layers = nn.ModuleList(_cross_weight(width, rank) for _ in range(layers))
        self.out_features = width

    def forward(self, dense_BD: Tensor, sparse_BFD: Tensor) -> Tensor:
        """Returns Tensor [B, N * D]."""
        first = torch.cat([dense_BD, sparse_BFD.flatten(1)], dim=1)
        crossed = first
        for layer in self.layers:
            crossed = first * layer(crossed) + crossed
        return crossed


def _cross_weight(width: int, rank: int) -> nn.Module:
    if not rank:
        return _xavier(nn.Linear(width, width))
    return nn.Sequential(_xavier(nn.Linear(width, rank, bias=False)), _xavier(nn.Linear(rank, width)))


def _xavier(linear: nn.Linear) -> nn.Linear:
    nn.init.xavier_normal_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear
