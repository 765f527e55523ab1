"""Jagged tensors by a plain list of lists, and features with different numbers of samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import KeyedJaggedTensor, optim

LISTS = {"a": [[1, 2], [], [3]], "b": [[], [4], [5, 6]], "c": [[7], [8], []]}
LENGTHS = torch.tensor([len(each) for lists in LISTS.values() for each in lists])
VALUES = torch.arange(1, 9)
WEIGHTS = VALUES / 2


def lists_of(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [each.tolist() for each in jagged.to_dense()] for key, jagged in batch.to_dict().items()}


@pytest.mark.parametrize("given", ["lengths", "offsets"])
def test_each_feature_has_its_lists_and_what_is_split_can_be_joined_again(given: str) -> None:
    batch = KeyedJaggedTensor.from_lengths_sync(list(LISTS), VALUES, LENGTHS, WEIGHTS)
    if given == "offsets":
        batch = KeyedJaggedTensor.from_offsets_sync(list(LISTS), VALUES, batch.offsets(), WEIGHTS)
    assert lists_of(batch) == LISTS
    assert batch["b"].weights().tolist() == [2.0, 2.5, 3.0]
    assert (batch.offset_per_key(), batch.length_per_key()) == ([0, 3, 6, 8], [3, 3, 2])
    assert (batch.stride(), batch.lengths().tolist()) == (3, LENGTHS.tolist())
    assert batch["a"].to_padded_dense(1, 9.0).tolist() == [[1], [9], [3]]
    for segments in ([1, 2], [0, 3, 0], [1, 1, 1]):
        parts = batch.split(segments)
        assert [len(part.keys()) for part in parts] == segments
        assert {key: lists for part in parts for key, lists in lists_of(part).items()} == LISTS
        joined = KeyedJaggedTensor.concat(parts)
        assert joined.keys() == list(LISTS)
        assert torch.equal(joined.offsets(), batch.offsets())
        assert torch.equal(joined.weights(), WEIGHTS)
    with pytest.raises(ValueError, match=r"segments=\[1, 1\] are 2 features, not 3"):
        batch.split([1, 1])
    plain = KeyedJaggedTensor(["d"], VALUES, lengths=torch.tensor([8]))
    with pytest.raises(ValueError, match=r"\[1, 3\] samples, 1 of 2 have weights"):
        KeyedJaggedTensor.concat([batch, plain])
    with pytest.raises(ValueError, match="no weights"):
        plain.weights()


NAMES = ["user", "item", "shop"]
STRIDES = [2, 5, 3]
ROWS, DIM, SAMPLES = 40, 4, 6


def lists(seed: int = 0) -> tuple[list[list[Tensor]], Tensor]:
    random = torch.Generator().manual_seed(seed)
    of_features = [
        [torch.randint(ROWS, (int(torch.randint(4, (1,), generator=random)),), generator=random) for _ in range(stride)]
        for stride in STRIDES
    ]
    return of_features, torch.stack([torch.randint(stride, (SAMPLES,), generator=random) for stride in STRIDES])


def uneven(seed: int = 0, *, has_inverse: bool = True) -> KeyedJaggedTensor:
    of_features, inverse = lists(seed)
    own = [each for feature in of_features for each in feature]
    return KeyedJaggedTensor(
        NAMES, torch.cat(own), torch.arange(1.0, 1.0 + sum(map(len, own))),
        torch.tensor([len(each) for each in own]), stride_per_key_per_rank=[[stride] for stride in STRIDES],
        inverse_indices=(NAMES, inverse) if has_inverse else None,
    )  # fmt: skip


def even(seed: int = 0) -> KeyedJaggedTensor:
    """Samples with lists of their own, for ``uneven``."""
    (of_features, inverse), first, ids, weights = lists(seed), 1.0, list[Tensor](), list[Tensor]()
    for own, chosen in zip(of_features, inverse.tolist(), strict=True):
        ends = torch.tensor([len(each) for each in own]).cumsum(0).tolist()
        own_weights = [torch.arange(first + end - len(each), first + end) for each, end in zip(own, ends, strict=True)]
        ids += [own[each] for each in chosen]
        weights += [own_weights[each] for each in chosen]
        first += ends[-1]
    return KeyedJaggedTensor(NAMES, torch.cat(ids), torch.cat(weights), torch.tensor([len(each) for each in ids]))


def make(store: Any, kind: Any = tierstore.TieredEmbeddingBagCollection, **options: Any) -> Any:
    for name in NAMES:
        config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=optim.SGD(lr=0.1))
        store.create_table(config, **options)
    return kind(store)


@pytest.mark.parametrize("seed", range(3))
def test_results_and_training_are_those_of_samples_with_lists_of_their_own(seed: int) -> None:
    found = []
    for batch in (uneven(seed), even(seed)):
        with tierstore.open(cold="memory", ddr="1MiB") as store:
            module = make(store)
            for each in tierstore.prefetch([batch], module):
                with torch.no_grad():
                    out = module(each).values()
            assert torch.equal(module(batch).values(), out)
            out = module(batch).values()
            (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
            found.append((out.detach(), *(store[name].read(torch.arange(ROWS)) for name in NAMES)))
    assert found[0][0].shape == (SAMPLES, 3 * DIM)
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other)


def test_as_many_samples_of_each_feature_and_rows_of_each_id_need_no_inverse_indices() -> None:
    ids, lengths = torch.arange(6), torch.ones(6, dtype=torch.int64)
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        module = make(store)
        found = module(KeyedJaggedTensor(NAMES, ids, lengths=lengths, stride_per_key_per_rank=[[2]] * 3))
        assert torch.equal(found.values(), module(KeyedJaggedTensor(NAMES, ids, lengths=lengths)).values())
        rows = tierstore.TieredEmbeddingCollection(store)(uneven(has_inverse=False))
        for name, feature in zip(NAMES, lists()[0], strict=True):
            assert rows[name].lengths().tolist() == [len(each) for each in feature]
            assert torch.equal(rows[name].values(), store[name].read(torch.cat(feature)))


def test_a_batch_without_a_way_to_side_by_side_is_refused() -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        module, batch = make(store), uneven()
        with pytest.raises(ValueError, match="give inverse_indices"):
            module(uneven(has_inverse=False))
        batch._inverse = (NAMES[:2], batch._inverse[1][:2])  # type: ignore[index]
        with pytest.raises(ValueError, match="inverse_indices lack feature 'shop'"):
            module(batch)
        batch._inverse = (NAMES, torch.full((3, SAMPLES), 2))
        with pytest.raises(ValueError, match="'user' must be from 0 to 1"):
            module(batch)
    with pytest.raises(ValueError, match="6 bags cannot be divided among 3 features"):
        KeyedJaggedTensor(NAMES, VALUES[:6], lengths=LENGTHS[:6], stride_per_key_per_rank=[[2], [3], [3]])


def test_features_keep_their_samples_when_they_are_taken_apart() -> None:
    batch = uneven()
    assert batch.stride() == SAMPLES
    assert uneven(has_inverse=False).stride() == max(STRIDES)
    again = KeyedJaggedTensor.concat(batch.split([1, 2]))
    turned = batch.permute([2, 0, 1])
    assert turned.stride_per_key() == [3, 2, 5]
    for other in (again, turned.permute([1, 2, 0]), batch.to("cpu")):
        assert other.variable_stride_per_key()
        assert other.stride_per_key() == STRIDES
        assert torch.equal(other.values(), batch.values())
        assert torch.equal(other.offsets(), batch.offsets())
        assert other.inverse_indices_or_none() is batch.inverse_indices_or_none()
    ones = torch.ones(2, dtype=torch.int64)
    parts = [
        KeyedJaggedTensor(
            [name], ones, lengths=ones, stride_per_key_per_rank=[[2]], inverse_indices=([name], torch.tensor([chosen]))
        )
        for name, chosen in (("a", [0, 1, 1]), ("b", [1, 0, 0]))
    ]
    names, inverse = KeyedJaggedTensor.concat(parts).inverse_indices_or_none() or ((), ones)
    assert (names, inverse.tolist()) == (["a", "b"], [[0, 1, 1], [1, 0, 0]])
    plain = KeyedJaggedTensor(["c"], VALUES[:3], lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="give all some, or none"):
        KeyedJaggedTensor.concat([parts[0], plain])
