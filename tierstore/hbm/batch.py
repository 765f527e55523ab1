"""Where the positions of one batch lie, as tensors on the device that holds the rows.

Shape legend: N positions (ids of the batch), U unique rows, F features, B samples, K = F * B bags.
"""

from typing import NamedTuple

from torch import Tensor


class Bags(NamedTuple):
    """Bags of positions, feature-major: bag ``k`` is feature ``k // batch`` of sample ``k % batch``.

    Attributes:
        bag_starts: int64 [K + 1]; bag ``k`` holds the positions ``[bag_starts[k], bag_starts[k + 1])``.
        bag_of: int32 [N], the bag of each position.
        columns: int32 [F], where each feature's result begins in the output's columns.
        batch: B.
        scale: float32 [N], per-sample weights, or None.
        column_step: a power of two that divides every one of ``columns``. It changes no result: with 4, a GPU reads
            and writes results 16 bytes at a time. (If it does not divide one, the GPU fails on a misaligned address.)
    """

    bag_starts: Tensor
    bag_of: Tensor
    columns: Tensor
    batch: int
    scale: Tensor | None = None
    column_step: int = 1


class Groups(NamedTuple):
    """Positions grouped by unique row, each group in id-list order.

    Attributes:
        order: int32 [N], positions.
        starts: int64 [U + 1]; the positions of unique row ``u`` are ``order[starts[u]:starts[u + 1]]``.
        num_unique: U.
    """

    order: Tensor
    starts: Tensor
    num_unique: int
