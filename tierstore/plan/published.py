"""Models whose tables and layers are published: their figures, and where these are from."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from .workload import OptimizerName, TableShape, Workload

__all__ = ["KAGGLE_ROWS", "MLPERF_MULTI_HOT", "MLPERF_ROWS", "PUBLISHED", "DenseShape", "mlp_flops"]

KAGGLE_ROWS: Final = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Rows of the 26 tables of the Criteo-Kaggle set, as published with its DLRM baseline (facebookresearch/dlrm)."""
MLPERF_ROWS: Final = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
"""Of DLRM-DCNv2: ``--num_embeddings_per_feature`` of mlcommons/training, recommendation_v2/torchrec_dlrm."""
MLPERF_MULTI_HOT: Final = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample of each of these tables: ``--multi_hot_sizes`` of the same."""


def mlp_flops(widths: Sequence[int]) -> int:
    """Of one sample through linear layers, forward: 2 a b for a layer of a inputs and b outputs, biases left out."""
    return sum(2 * inputs * outputs for inputs, outputs in pairwise(widths))


class DenseShape(NamedTuple):
    """A DLRM beside its tables (Naumov et al., 2019).

    Attributes:
        bottom: widths of the MLP of the dense features, from their number to the embeddings' dimension.
        top: widths of the MLP behind the interaction, without its input's.
        interaction: "cat" lays the vectors end to end; "dot" takes the dot products of all pairs; "dcn" is the cross
            network of DCN-v2.
    """

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: Literal["cat", "dot", "dcn"] = "cat"
    cross_layers: int = 0
    cross_rank: int = 0

    def flops(self, num_tables: int) -> int:
        """Of one sample, forward: of both MLPs and the interaction's matrix products.

        With N vectors of dimension D, those of the tables and the dense one, the products of all pairs are one matrix
        product of 2 N^2 D; a layer of rank r of a cross network takes 4 N D r.
        """
        vectors, dim = num_tables + 1, self.bottom[-1]
        width, own = vectors * dim, 0
        if self.interaction == "dot":
            width, own = dim + vectors * (vectors - 1) // 2, 2 * vectors**2 * dim
        elif self.interaction == "dcn":
            own = self.cross_layers * 4 * width * self.cross_rank
        return mlp_flops(self.bottom) + own + mlp_flops((width, *self.top))


def _workload(
    name: str, rows: Sequence[int], ids: Sequence[int], dense: DenseShape, batch: int, optimizer: OptimizerName = "none"
) -> Workload:
    tables = tuple(
        TableShape(name=f"t{number}", num_embeddings=own, embedding_dim=dense.bottom[-1], pooling_factor=pooling)
        for number, (own, pooling) in enumerate(zip(rows, ids, strict=True))
    )
    flops = dense.flops(len(rows))
    return Workload(name=name, tables=tables, batch_samples=batch, optimizer=optimizer, dense_flops=flops)


PUBLISHED: Final = (
    # Tables and layers: models/configs of harvard-acc/DeepRecSys, the code of Gupta et al., "DeepRecSys: A System for
    # Optimizing End-To-End At-scale Neural Recommendation Inference" (2020). They are looked up, not trained; the
    # batch is the largest that RecSSD (Wilkening et al., 2021) measures them with.
    _workload("rmc1", [4_000_000] * 8, [80] * 8, DenseShape((128, 64, 32), (256, 64, 1)), 128),
    _workload("rmc2", [500_000] * 32, [120] * 32, DenseShape((256, 128, 64), (128, 64, 1)), 128),
    _workload("rmc3", [2_000_000] * 10, [20] * 10, DenseShape((2560, 1024, 256, 32), (512, 256, 1)), 128),
    # bench/dlrm_s_criteo_kaggle.sh of facebookresearch/dlrm.
    _workload(
        "criteo-kaggle", KAGGLE_ROWS, [1] * 26, DenseShape((13, 512, 256, 64, 16), (512, 256, 1), "dot"), 128, "sgd"
    ),
    # The command lines in the README of mlcommons/training, recommendation_v2/torchrec_dlrm.
    _workload(
        "mlperf-dlrm-v2",
        MLPERF_ROWS,
        MLPERF_MULTI_HOT,
        DenseShape((13, 512, 256, 128), (1024, 1024, 512, 256, 1), "dcn", cross_layers=3, cross_rank=512),
        65_536,
        "adagrad",
    ),
)
