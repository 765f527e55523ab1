"""Jagged tensors: what TorchRec's have, by a plain list of lists."""

import pytest
import torch

from tierstore import JaggedTensor, KeyedJaggedTensor

LISTS = {"a": [[1, 2], [], [3]], "b": [[], [4], [5, 6]], "c": [[7], [8], []]}
LENGTHS = torch.tensor([len(each) for lists in LISTS.values() for each in lists])
VALUES = torch.arange(1, 9)
WEIGHTS = VALUES / 2


def lists_of(jagged: JaggedTensor) -> list[list[int]]:
    return [each.tolist() for each in jagged.to_dense()]


@pytest.fixture(params=["lengths", "offsets"])
def batch(request: pytest.FixtureRequest) -> KeyedJaggedTensor:
    if request.param == "lengths":
        return KeyedJaggedTensor.from_lengths_sync(list(LISTS), VALUES, LENGTHS, WEIGHTS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    return KeyedJaggedTensor.from_offsets_sync(list(LISTS), VALUES, offsets, WEIGHTS)


def test_each_feature_has_its_lists(batch: KeyedJaggedTensor) -> None:
    assert {key: lists_of(jagged) for key, jagged in batch.to_dict().items()} == LISTS
    assert lists_of(batch["b"]) == LISTS["b"]
    assert batch["b"].weights().tolist() == [2.0, 2.5, 3.0]
    assert batch.offset_per_key() == [0, 3, 6, 8]
    assert (batch.stride(), batch.lengths().tolist()) == (3, LENGTHS.tolist())


@pytest.mark.parametrize("segments", [[1, 2], [0, 3, 0], [2, 1], [1, 1, 1]])
def test_what_is_split_can_be_joined_again(batch: KeyedJaggedTensor, segments: list[int]) -> None:
    parts = batch.split(segments)
    assert [len(part.keys()) for part in parts] == segments
    for part in parts:
        assert all(lists_of(jagged) == LISTS[key] for key, jagged in part.to_dict().items())
    joined = KeyedJaggedTensor.concat(parts)
    assert joined.keys() == list(LISTS)
    assert torch.equal(joined.offsets(), batch.offsets())
    assert torch.equal(joined.weights(), WEIGHTS)


def test_what_does_not_fit_together_is_refused(batch: KeyedJaggedTensor) -> None:
    with pytest.raises(ValueError, match=r"segments=\[1, 1\] are 2 features, not 3"):
        batch.split([1, 1])
    plain = KeyedJaggedTensor(["d"], VALUES, lengths=torch.tensor([8]))
    with pytest.raises(ValueError, match=r"\[1, 3\] samples, 1 of 2 have weights"):
        KeyedJaggedTensor.concat([batch, plain])
    with pytest.raises(ValueError, match="no weights"):
        plain.weights()
