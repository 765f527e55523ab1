"""Traces of a workload."""

import numpy as np
import pytest

from tierstore.plan import TableShape, Workload
from tierstore.plan.traces import generate

SAMPLES = 5000
WORKLOAD = Workload(
    name="w",
    tables=(
        TableShape(name="whole", num_embeddings=100, embedding_dim=4, pooling_factor=3, exponent=1.2),
        TableShape(name="half", num_embeddings=1 << 40, embedding_dim=4, pooling_factor=2.5, exponent=0),
        TableShape(name="rare", num_embeddings=7, embedding_dim=8, pooling_factor=0.1),
        TableShape(name="none", num_embeddings=7, embedding_dim=8, pooling_factor=0),
    ),
    batch_samples=64,
)


def lengths(name: str, seed: int = 0) -> np.ndarray:
    return np.diff(generate(WORKLOAD, samples=SAMPLES, seed=seed).tables[name].offsets)


def test_whole_pooling_factors_are_exact() -> None:
    assert (lengths("whole") == 3).all()
    assert not lengths("none").any()


@pytest.mark.parametrize(("name", "low", "share"), [("half", 2, 0.5), ("rare", 0, 0.1)])
def test_other_pooling_factors_are_means(name: str, low: int, share: float) -> None:
    found = lengths(name)
    assert set(found.tolist()) == {low, low + 1}
    assert abs((found - low).mean() - share) < 4 * (share * (1 - share) / SAMPLES) ** 0.5


def test_seeds_give_other_samples_of_the_same_popularity() -> None:
    one, same, other = (generate(WORKLOAD, samples=SAMPLES, seed=seed).tables for seed in (-1, -1, 2))
    for name in one:
        assert np.array_equal(one[name].ids, same[name].ids)
        assert np.array_equal(one[name].offsets, same[name].offsets)
    assert not np.array_equal(one["whole"].ids, other["whole"].ids)
    assert np.bincount(one["whole"].ids).argmax() == np.bincount(other["whole"].ids).argmax()


@pytest.mark.parametrize("samples", [0, -1])
def test_no_samples(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples={samples} must be in"):
        generate(WORKLOAD, samples=samples, seed=0)
