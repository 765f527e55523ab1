"""Features with different numbers of samples, each batch against the one where every sample has its own lists."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim

NAMES = ["user", "item", "shop"]
STRIDES = [2, 5, 3]
ROWS, DIM, SAMPLES = 40, 4, 6


def lists(seed: int = 0) -> tuple[list[list[Tensor]], Tensor]:
    """(of each feature the ids of its own samples; int64 [features, samples], which of them each sample has)."""
    random = torch.Generator().manual_seed(seed)
    of_features = [
        [torch.randint(ROWS, (int(torch.randint(4, (1,), generator=random)),), generator=random) for _ in range(stride)]
        for stride in STRIDES
    ]
    return of_features, torch.stack([torch.randint(stride, (SAMPLES,), generator=random) for stride in STRIDES])


def uneven(seed: int = 0, *, has_inverse: bool = True) -> tierstore.KeyedJaggedTensor:
    of_features, inverse = lists(seed)
    own = [each for feature in of_features for each in feature]
    return tierstore.KeyedJaggedTensor(
        NAMES, torch.cat(own), torch.arange(1.0, 1.0 + sum(map(len, own))),
        torch.tensor([len(each) for each in own]), stride_per_key_per_rank=[[stride] for stride in STRIDES],
        inverse_indices=(NAMES, inverse) if has_inverse else None,
    )  # fmt: skip


def even(seed: int = 0) -> tierstore.KeyedJaggedTensor:
    """The same samples, each with lists of its own."""
    (of_features, inverse), parts = lists(seed), []
    lengths = [len(each) for own in of_features for each in own]
    weights = iter(torch.arange(1.0, 1.0 + sum(lengths)).split(lengths))
    for own, chosen in zip(of_features, inverse.tolist(), strict=True):
        own_weights = [next(weights) for _ in own]
        parts += [(own[each], own_weights[each]) for each in chosen]
    ids, scales = zip(*parts, strict=True)
    each_length = torch.tensor([len(each) for each in ids])
    return tierstore.KeyedJaggedTensor(NAMES, torch.cat(ids), torch.cat(scales), each_length)


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


def test_prefetched_batches_give_the_same() -> None:
    batches = [uneven(seed) for seed in range(4)]
    with tierstore.open(cold="memory", ddr="1MiB") as store, torch.no_grad():
        module = make(store)
        plain = [module(batch).values() for batch in batches]
        for batch, expected in zip(tierstore.prefetch(batches, module), plain, strict=True):
            assert torch.equal(module(batch).values(), expected)


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
        tierstore.KeyedJaggedTensor(
            NAMES, torch.arange(10), lengths=torch.ones(10, dtype=torch.int64), stride_per_key_per_rank=[[2], [3], [3]]
        )


def test_as_many_samples_of_each_feature_need_no_inverse_indices() -> None:
    ids, lengths = torch.arange(6), torch.ones(6, dtype=torch.int64)
    with tierstore.open(cold="memory", ddr="1MiB") as store, torch.no_grad():
        module = make(store)
        found = module(tierstore.KeyedJaggedTensor(NAMES, ids, lengths=lengths, stride_per_key_per_rank=[[2]] * 3))
        assert torch.equal(found.values(), module(tierstore.KeyedJaggedTensor(NAMES, ids, lengths=lengths)).values())


def test_parts_of_several_batches_keep_what_each_says_of_its_samples() -> None:
    def part(name: str, chosen: list[int]) -> tierstore.KeyedJaggedTensor:
        return tierstore.KeyedJaggedTensor(
            [name], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64), stride_per_key_per_rank=[[2]],
            inverse_indices=([name], torch.tensor([chosen])),
        )  # fmt: skip

    found = tierstore.KeyedJaggedTensor.concat([part("a", [0, 1, 1]), part("b", [1, 0, 0])]).inverse_indices_or_none()
    assert found is not None
    assert found[0] == ["a", "b"]
    assert found[1].tolist() == [[0, 1, 1], [1, 0, 0]]
    plain = tierstore.KeyedJaggedTensor(["c"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="give all some, or none"):
        tierstore.KeyedJaggedTensor.concat([part("a", [0, 1, 1]), plain])


def test_features_keep_their_samples_when_they_are_taken_apart() -> None:
    batch = uneven()
    assert batch.stride() == SAMPLES
    assert uneven(has_inverse=False).stride() == max(STRIDES)
    again = tierstore.KeyedJaggedTensor.concat(batch.split([1, 2]))
    turned = batch.permute([2, 0, 1])
    assert turned.stride_per_key() == [3, 2, 5]
    for other in (again, turned.permute([1, 2, 0]), batch.to("cpu")):
        assert other.variable_stride_per_key()
        assert other.stride_per_key() == STRIDES
        assert torch.equal(other.values(), batch.values())
        assert torch.equal(other.offsets(), batch.offsets())
        assert other.inverse_indices_or_none() is batch.inverse_indices_or_none()
    assert [len(batch[name].lengths()) for name in NAMES] == STRIDES
