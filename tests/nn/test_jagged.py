"""Jagged tensors by a plain list of lists, and features with different numbers of samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import JaggedTensor, KeyedJaggedTensor, optim

LISTS = {"a": [[1, 2], [], [3]], "b": [[], [4], [5, 6]], "c": [[7], [8], []]}
LENGTHS = torch.tensor([len(each) for lists in LISTS.values() for each in lists])
VALUES = torch.arange(1, 9)
WEIGHTS = VALUES / 2


def lists_of(jagged: JaggedTensor) -> list[list[int]]:
    return [each.tolist() for each in jagged.to_dense()]


@pytest.fixture(params=["lengths", "offsets"])
def batch(request: pytest.FixtureRequest) -> KeyedJaggedTensor:
    made = KeyedJaggedTensor.from_lengths_sync(list(LISTS), VALUES, LENGTHS, WEIGHTS)
    if request.param == "lengths":
        return made
    return KeyedJaggedTensor.from_offsets_sync(list(LISTS), VALUES, made.offsets(), WEIGHTS)


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
    (of_features, inverse), parts = lists(seed), []
    lengths = [len(each) for own in of_features for each in own]
    weights = iter(torch.arange(1.0, 1.0 + sum(lengths)).split(lengths))
    for own, chosen in zip(of_features, inverse.tolist(), strict=True):
        own_weights = [next(weights) for _ in own]
        parts += [(own[each], own_weights[each]) for each in chosen]
    ids, scales = zip(*parts, strict=True)
    each_length = torch.tensor([len(each) for each in ids])
    return KeyedJaggedTensor(NAMES, torch.cat(ids), torch.cat(scales), each_length)


def make(store: Any, kind: Any = tierstore.TieredEmbeddingBagCollection, **options: Any) -> Any:
    for name in NAMES:
        config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=optim.SGD(lr=0.1))
        store.create_table(config, **options)
    return kind(store)


@pytest.mark.parametrize("ddr", ["1MiB", "64MiB"])
@pytest.mark.parametrize("seed", range(4))
def test_results_and_training_are_those_of_samples_with_lists_of_their_own(seed: int, ddr: str) -> None:
    found = []
    for batch in (uneven(seed), even(seed)):
        with tierstore.open(cold="memory", ddr=ddr) as store:
            module = make(store)
            out = module(batch).values()
            (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
            rows = [store[name].read(torch.arange(ROWS)) for name in NAMES]
            found.append((out.detach(), *rows))
    assert found[0][0].shape == (SAMPLES, 3 * DIM)
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(one, other)


def test_prefetched_batches_give_the_same_and_as_many_samples_of_each_feature_need_no_inverse_indices() -> None:
    batches, ids, lengths = [uneven(seed) for seed in range(4)], torch.arange(6), torch.ones(6, dtype=torch.int64)
    with tierstore.open(cold="memory", ddr="1MiB") as store, torch.no_grad():
        module = make(store)
        plain = [module(batch).values() for batch in batches]
        for batch, expected in zip(tierstore.prefetch(batches, module), plain, strict=True):
            assert torch.equal(module(batch).values(), expected)
        found = module(KeyedJaggedTensor(NAMES, ids, lengths=lengths, stride_per_key_per_rank=[[2]] * 3))
        assert torch.equal(found.values(), module(KeyedJaggedTensor(NAMES, ids, lengths=lengths)).values())


def test_rows_of_each_id_need_no_inverse_indices() -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        found = make(store, tierstore.TieredEmbeddingCollection)(uneven(has_inverse=False))
        for name, feature in zip(NAMES, lists()[0], strict=True):
            assert found[name].lengths().tolist() == [len(each) for each in feature]
            assert torch.equal(found[name].values(), store[name].read(torch.cat(feature)))


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
    with pytest.raises(ValueError, match="10 bags cannot be divided among 3 features"):
        KeyedJaggedTensor(
            NAMES, torch.arange(10), lengths=torch.ones(10, dtype=torch.int64), stride_per_key_per_rank=[[2], [3], [3]]
        )


def test_parts_of_several_batches_keep_what_each_says_of_its_samples() -> None:
    def part(name: str, chosen: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            [name], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64), stride_per_key_per_rank=[[2]],
            inverse_indices=([name], torch.tensor([chosen])),
        )  # fmt: skip

    found = KeyedJaggedTensor.concat([part("a", [0, 1, 1]), part("b", [1, 0, 0])]).inverse_indices_or_none()
    assert found is not None
    assert found[0] == ["a", "b"]
    assert found[1].tolist() == [[0, 1, 1], [1, 0, 0]]
    plain = KeyedJaggedTensor(["c"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="give all some, or none"):
        KeyedJaggedTensor.concat([part("a", [0, 1, 1]), plain])


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
    assert [len(batch[name].lengths()) for name in NAMES] == STRIDES
