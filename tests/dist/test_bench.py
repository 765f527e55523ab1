"""What bench.dist measures by."""

import torch

import tierstore
from bench.sharded.step_part import joined


def bags(batch: tierstore.KeyedJaggedTensor) -> list[list[int]]:
    return [part.tolist() for part in torch.split(batch.values(), batch.lengths().tolist())]


def test_batches_are_joined_bag_by_bag() -> None:
    one, other = (
        tierstore.KeyedJaggedTensor(["f0", "f1"], torch.arange(first, first + 6), lengths=torch.tensor([1, 2, 0, 3]))
        for first in (0, 10)
    )
    whole = joined([one, other])
    assert bags(whole) == [[0], [1, 2], [10], [11, 12], [], [3, 4, 5], [], [13, 14, 15]]
