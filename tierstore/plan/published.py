"""Models whose tables and layers are published: their figures, and where these are from."""

from collections.abc import Sequence
from typing import Final

from .workload import Assumed, OptimizerName, TableShape, Workload

KAGGLE_ROWS: Final = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Rows of the 26 tables of the Criteo-Kaggle set, as published with its DLRM baseline (facebookresearch/dlrm)."""
_MLPERF_ROWS: Final = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
"""Of DLRM-DCNv2: ``--num_embeddings_per_feature`` of mlcommons/training, recommendation_v2/torchrec_dlrm."""
_MLPERF_MULTI_HOT: Final = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample of each of these tables: ``--multi_hot_sizes`` of the same."""


def _workload(
    name: str, rows: Sequence[int], ids: Sequence[int], dim: int, flops: int, batch: int, optimizer: OptimizerName
) -> Workload:
    tables = tuple(
        TableShape(name=f"t{number}", num_embeddings=own, embedding_dim=dim, pooling_factor=pooling)
        for number, (own, pooling) in enumerate(zip(rows, ids, strict=True))
    )
    skew = Assumed("exponent", tuple(table.name for table in tables))  # no publication says how popular rows are
    return Workload(
        name=name, tables=tables, batch_samples=batch, optimizer=optimizer, dense_flops=flops, assumed=(skew,)
    )


PUBLISHED: Final = (
    # Tables and layers: models/configs of harvard-acc/DeepRecSys, the code of Gupta et al., "DeepRecSys: A System for
    # Optimizing End-To-End At-scale Neural Recommendation Inference" (2020). They are looked up, not trained; the
    # batch is the largest that RecSSD (Wilkening et al., 2021) measures them with.
    _workload("rmc1", [4_000_000] * 8, [80] * 8, 32, 200_832, 128, "none"),
    _workload("rmc2", [500_000] * 32, [120] * 32, 64, 639_104, 128, "none"),
    _workload("rmc3", [2_000_000] * 10, [20] * 10, 32, 6_406_656, 128, "none"),
    # bench/dlrm_s_criteo_kaggle.sh of facebookresearch/dlrm.
    _workload("criteo-kaggle", KAGGLE_ROWS, [1] * 26, 16, 972_064, 128, "sgd"),
    # The command lines in the README of mlcommons/training, recommendation_v2/torchrec_dlrm.
    _workload("mlperf-dlrm-v2", _MLPERF_ROWS, _MLPERF_MULTI_HOT, 128, 32_060_928, 65_536, "adagrad"),
)
"""Flops are of one sample, forward, 2 a b for a layer of a inputs and b outputs: of the layers that
docs/planning/traces.md lists, and of the interaction's matrix products."""
