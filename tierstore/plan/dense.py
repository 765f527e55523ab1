"""What a DLRM's dense part computes, from the shape of its tables and layers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

MLPERF_LAYERS: Final[dict[str, Any]] = {
    "num_dense": 13,
    "bottom_mlp": (512, 256),
    "top_mlp": (1024, 1024, 512, 256),
    "interaction": "dcn",
    "cross_layers": 3,
    "cross_rank": 512,
}
"""Of MLPerf's DLRM-DCNv2 (mlcommons/training, recommendation_v2/torchrec_dlrm), as ``models.DLRM`` takes them."""


class DenseWork(NamedTuple):
    """Forward: flops of a sample, products of matrices of a batch, values that are read and written, of a sample."""

    dense_flops: float
    dense_products: float
    dense_values: float


def dlrm_work(
    dims: Sequence[int],
    *,
    num_dense: int,
    bottom_mlp: Sequence[int],
    top_mlp: Sequence[int],
    interaction: str,
    cross_layers: int,
    cross_rank: int,
) -> DenseWork:
    """As ``models.DLRM`` computes it; flops are 2 a b for a layer of a inputs and b outputs."""
    dim, vectors = max(dims), len(dims) + 1
    if interaction == "dot":
        pairs = vectors * (vectors - 1) // 2
        crossing, width, products = 2 * vectors**2 * dim, dim + pairs, 1
        values = 4 * vectors * dim + 2 * vectors**2 + pairs + 2 * width
    else:
        width = dim + sum(dims)
        linears = [(width, cross_rank), (cross_rank, width)] if cross_rank else [(width, width)]
        crossing = cross_layers * sum(2 * inputs * outputs for inputs, outputs in linears)
        products = cross_layers * len(linears)
        values = 2 * width + cross_layers * (sum(map(sum, linears)) + 6 * width)
    layers = [*pairwise([num_dense, *bottom_mlp, dim]), *pairwise([width, *top_mlp, 1])]
    return DenseWork(
        float(sum(2 * inputs * outputs for inputs, outputs in layers) + crossing),
        float(len(layers) + products),
        float(sum(inputs + 3 * outputs for inputs, outputs in layers) + values),
    )
