"""Where the positions of one batch lie, as tensors on the device that holds the rows.

Shape legend: N positions (ids of the batch), U unique rows, F features, B samples, K = F * B bags.
"""

from typing import NamedTuple

from torch import Tensor


class Bags(NamedTuple):
    """Bags of positions, feature-major: bag ``k`` is feature ``k // batch`` of sample ``k % batch``.

    Attributes:
        bag_starts: int32 [K + 1]; bag ``k`` holds the positions ``[bag_starts[k], bag_starts[k + 1])``.
        bag_of: int32 [N], the bag of each position; ``number_bags`` of the kernels makes it.
        columns: int32 or int64 [F], where each feature's result begins in the output's columns.
        table_of: int32 [F], which row of ``hyper`` and ``code_of`` rules the rows of each feature.
        batch: B.
        scale: float32 [N], per-sample weights, or None.
        column_step: a power of two that divides every one of ``columns``. It changes no result: with 4, a GPU reads
            and writes results 16 bytes at a time. (If it does not divide one, the GPU fails on a misaligned address.)
    """

    bag_starts: Tensor
    bag_of: Tensor
    columns: Tensor
    table_of: Tensor
    batch: int
    scale: Tensor | None = None
    column_step: int = 1


class DeviceIds(NamedTuple):
    """Ids of a batch that are on the device already, not checked, the features in their order in ``Bags``.

    Attributes:
        ids: int64 or int32 [N], N > 0.
        offsets: int64 or int32 [K + 1], or [K] without the last, which is then N.
        scale: float32 [N], per-sample weights, or None.
    """

    ids: Tensor
    offsets: Tensor
    scale: Tensor | None


class Groups(NamedTuple):
    """Positions grouped by unique row, each group in id-list order. The host does not know U.

    Attributes:
        order: int64 [N], positions.
        starts: int32 [N + 1]; the positions of unique row ``u < U`` are ``order[starts[u]:starts[u + 1]]``;
            ``starts[U]`` is N, what follows is undefined.
        num_unique: int32 [1], U.
    """

    order: Tensor
    starts: Tensor
    num_unique: Tensor
