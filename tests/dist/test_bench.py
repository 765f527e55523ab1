"""What bench.dist measures by."""

import numpy as np
import torch

import tierstore
from bench.sharded.skew_part import _split
from bench.sharded.step_part import joined


def bags(batch: tierstore.KeyedJaggedTensor) -> list[list[int]]:
    return [part.tolist() for part in torch.split(batch.values(), batch.lengths().tolist())]


def test_batches_are_joined_and_split_bag_by_bag() -> None:
    one, other = (
        tierstore.KeyedJaggedTensor(["f0", "f1"], torch.arange(first, first + 6), lengths=torch.tensor([1, 2, 0, 3]))
        for first in (0, 10)
    )
    whole = joined([one, other])
    assert bags(whole) == [[0], [1, 2], [10], [11, 12], [], [3, 4, 5], [], [13, 14, 15]]
    cold, hot = _split(whole, [np.array([2, 10]), np.array([4, 5, 13])])
    assert bags(cold) == [[0], [1], [], [11, 12], [], [3], [], [14, 15]]
    assert bags(hot) == [[], [0], [1], [], [], [0, 1], [], [2]]
