"""Floating-point operations of a DLRM's dense part, from the shape of its tables."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

MLPERF_LAYERS: Final[dict[str, Any]] = {
    "num_dense": 13,
    "bottom_mlp": (512, 256),
    "top_mlp": (1024, 1024, 512, 256),
    "interaction": "dcn",
    "cross_layers": 3,
    "cross_rank": 512,
}
"""Of MLPerf's DLRM-DCNv2 (mlcommons/training, recommendation_v2/torchrec_dlrm), as ``models.DLRM`` takes them."""


def dlrm_flops(
    dims: Sequence[int],
    *,
    num_dense: int,
    bottom_mlp: Sequence[int],
    top_mlp: Sequence[int],
    interaction: str,
    cross_layers: int,
    cross_rank: int,
) -> float:
    """Of one sample, forward, as ``models.DLRM`` computes it: 2 a b for a layer of a inputs and b outputs.

    Args:
        dims: columns of each table. Where they differ, the bottom MLP ends in the largest.
    """
    dim, vectors = max(dims), len(dims) + 1
    if interaction == "dot":
        crossing, width = 2 * vectors**2 * dim, dim + vectors * (vectors - 1) // 2
    else:
        width = dim + sum(dims)
        crossing = cross_layers * (4 * width * cross_rank if cross_rank else 2 * width**2)
    return float(_mlp_flops([num_dense, *bottom_mlp, dim]) + crossing + _mlp_flops([width, *top_mlp, 1]))


def _mlp_flops(widths: Sequence[int]) -> int:
    return sum(2 * inputs * outputs for inputs, outputs in pairwise(widths))
