"""Jagged tensors by a plain list of lists."""

from typing import Any

import pytest
import torch

import tierstore
from tierstore import KeyedJaggedTensor

LISTS = {"a": [[1, 2], [], [3]], "b": [[], [4], [5, 6]], "c": [[7], [8], []]}
LENGTHS = torch.tensor([len(each) for lists in LISTS.values() for each in lists])
VALUES = torch.arange(1, 9)
WEIGHTS = VALUES / 2


def lists_of(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [each.tolist() for each in jagged.to_dense()] for key, jagged in batch.to_dict().items()}


@pytest.mark.parametrize("given", ["lengths", "offsets", "offsets without the end"])
def test_each_feature_has_its_lists_whole_and_split(given: str) -> None:
    batch = KeyedJaggedTensor.from_lengths_sync(list(LISTS), VALUES, LENGTHS, WEIGHTS)
    if given != "lengths":
        offsets = batch.offsets()[: None if given == "offsets" else -1]
        batch = KeyedJaggedTensor(list(LISTS), VALUES, WEIGHTS, offsets=offsets, stride=3)
    assert lists_of(batch) == LISTS
    assert batch["b"].weights().tolist() == [2.0, 2.5, 3.0]
    assert (batch.offset_per_key(), batch.length_per_key()) == ([0, 3, 6, 8], [3, 3, 2])
    assert (batch.stride(), batch.lengths().tolist()) == (3, LENGTHS.tolist())
    assert batch["a"].to_padded_dense(1, 9.0).tolist() == [[1], [9], [3]]
    for segments in ([1, 2], [0, 3, 0], [1, 1, 1]):
        parts = batch.split(segments)
        assert [len(part.keys()) for part in parts] == segments
        assert {key: lists for part in parts for key, lists in lists_of(part).items()} == LISTS
    with pytest.raises(ValueError, match=r"segments=\[1, 1\] are 2 features, not 3"):
        batch.split([1, 1])
    plain = KeyedJaggedTensor(["d"], VALUES, lengths=torch.tensor([8]))
    with pytest.raises(ValueError, match="no weights"):
        plain.weights()
    with pytest.raises(ValueError, match="8 bags cannot be divided among 3 features"):
        KeyedJaggedTensor(list(LISTS), VALUES, lengths=LENGTHS[:8])
    with pytest.raises(ValueError, match=r"\+ 1\], with the end, or with stride=B also \[F \* B\]"):
        KeyedJaggedTensor(list(LISTS), VALUES, offsets=batch.offsets()[:-1])
    assert KeyedJaggedTensor(["a", "b"], VALUES[:0], lengths=LENGTHS[:0]).offset_per_key() == [0, 0, 0]


@pytest.mark.parametrize("kind", [tierstore.TieredEmbeddingBagCollection, tierstore.TieredEmbeddingCollection])
def test_features_with_different_numbers_of_samples_are_refused(kind: Any) -> None:
    """As TorchRec's batches may have them."""
    batch: Any = KeyedJaggedTensor(["a"], VALUES, lengths=torch.tensor([8]))
    batch.variable_stride_per_key = lambda: True
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        store.create_table(tierstore.TableConfig(name="a", num_embeddings=9, embedding_dim=4))
        with pytest.raises(ValueError, match="different numbers of samples: give those with as many"):
            kind(store)(batch)
        with pytest.raises(ValueError, match=r"They are taken with the end, \[bags \+ 1\]$"):
            kind(store)(KeyedJaggedTensor(["a"], VALUES, offsets=torch.tensor([0, 9])))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lists_are_cut_to_their_last_values_with_weights_and_gradients(count: int) -> None:
    batch = KeyedJaggedTensor(list(LISTS), VALUES, WEIGHTS, lengths=LENGTHS)
    kept = batch.last(count)
    assert lists_of(kept) == {key: [each[-count:] for each in lists] for key, lists in LISTS.items()}
    assert kept.weights().tolist() == (kept.values() / 2).tolist()
    assert (kept.keys(), kept.stride(), kept.lengths().tolist()) == (batch.keys(), 3, LENGTHS.clamp(max=count).tolist())
    rows = torch.arange(16.0).view(8, 2).requires_grad_()
    tierstore.JaggedTensor(rows, lengths=LENGTHS).last(count).values().sum().backward()
    assert rows.grad[:, 0].tolist() == [float(each in kept.values().tolist()) for each in VALUES.tolist()]
    with pytest.raises(ValueError, match="count=0 must be in"):
        batch.last(0)
    all_kept = KeyedJaggedTensor(list(LISTS), VALUES, lengths=LENGTHS.int()).last(2**31)
    assert (lists_of(all_kept), all_kept.lengths().dtype) == (LISTS, torch.int32)
    both = tierstore.JaggedTensor(VALUES, lengths=torch.tensor([1, 1]), offsets=torch.tensor([0, 5, 8]))
    assert (both.lengths().tolist(), both.last(count).lengths().tolist()) == ([5, 3], [count, count])
