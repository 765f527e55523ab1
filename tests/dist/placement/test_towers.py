"""Towers of tables: planted groups are found, loads stay within their bound, the plane has the distances."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.dist.placement.towers import partition, plane_of, similarity_of

Array = Any
GROUPS = [3, 1, 0, 2, 2, 1, 0, 3, 1, 1, 0, 2]
NAMES = [f"t{i}" for i in range(len(GROUPS))]


def distances_of(points: Array) -> Array:
    return np.linalg.norm(points[:, None] - points[None], axis=2)


@pytest.mark.parametrize("seed", range(2))
def test_planted_groups_are_found(seed: int) -> None:
    """Of tables whose vectors go along a direction of their group, either way."""
    generator, loads = np.random.default_rng(seed), np.ones((len(NAMES), 2))
    directions = np.linalg.qr(generator.normal(size=(16, 4)))[0].T
    ways = generator.choice([-1, 1], size=(300, len(GROUPS), 1))
    vectors = ways * directions[GROUPS] + generator.normal(size=(300, len(GROUPS), 16)) / 8
    similarity = similarity_of(map(torch.from_numpy, np.array_split(vectors, 7)), NAMES)
    loads[[1, 5, 8, 9]] = 0.75  # the group of four
    towers = partition(NAMES, similarity, loads, 4, slack=0.5, seed=seed)
    expected = [[name for name, own in zip(NAMES, GROUPS, strict=True) if own == each] for each in (3, 1, 0, 2)]
    assert list(map(list, towers)) == expected

    def alike(tower: Sequence[str]) -> Any:
        places = [NAMES.index(name) for name in tower]
        return similarity[np.ix_(places, places)][~np.eye(len(places), dtype=bool)].mean()

    unlike = partition(NAMES, 1 - similarity, loads, 4, slack=0.5)
    assert min(map(alike, unlike)) < min(map(alike, towers)) / 2
    with pytest.raises(ValueError, match="13 towers of 12 tables: expected 1 to 12"):
        partition(NAMES, similarity, loads, 13)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_loads_stay_within_the_bound(data: st.DataObject) -> None:
    tables, kinds = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    count, seed = data.draw(st.integers(1, tables)), data.draw(st.integers(0, 9))
    load = st.floats(0, 100, allow_subnormal=False)
    loads = np.array([[data.draw(load) for _ in range(kinds)] for _ in range(tables)])
    similarity = np.random.default_rng(seed).random((tables, tables))
    towers, again = (partition(NAMES[:tables], similarity + similarity.T, loads, count, seed=seed) for _ in range(2))
    assert towers == again
    assert sorted(itertools.chain(*towers)) == NAMES[:tables]
    assert [bool(tower) for tower in towers] == [True] * count
    mean = loads.sum(axis=0) / count
    shares = np.divide(loads, mean, out=np.zeros_like(loads), where=mean > 0)
    own = [sum(shares[NAMES.index(name)] for name in tower) for tower in towers]
    dealt, sizes = np.zeros((count, kinds)), [0] * count  # the largest first
    for row in sorted(shares, key=lambda row: -float(row.max())):
        tower = min(range(count), key=lambda tower: (max(dealt[tower] + row), sizes[tower]))
        dealt[tower] += row
        sizes[tower] += 1
    assert np.max(own) <= max(1.1, dealt.max()) + 1e-6


@pytest.mark.parametrize(("most", "seed"), [(3, 0), (3, 1), (5, 2), (5, 3)])
def test_few_tables_are_parted_as_no_other_way_is_better(most: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(7, 2)) ** 3
    towers = partition(NAMES[:7], 1 - distances_of(points), np.ones((7, 1)), 3, slack=most * 3 / 7 - 1)

    def spread(groups: Any) -> float:
        parts = [points[np.array(groups) == group] for group in range(3)]
        allowed = all(0 < len(part) <= most for part in parts)
        return sum(float(((part - part.mean(axis=0)) ** 2).sum()) for part in parts) if allowed else np.inf

    own = [next(tower for tower, names in enumerate(towers) if name in names) for name in NAMES[:7]]
    assert spread(own) == pytest.approx(min(map(spread, itertools.product(range(3), repeat=7))))


def test_a_plane_has_the_distances() -> None:
    distances = distances_of(np.random.default_rng(0).normal(size=(9, 2)))
    found, stress = plane_of(distances)
    assert stress < 1e-6
    np.testing.assert_allclose(distances_of(found), distances, atol=1e-6)
    assert [plane_of(np.zeros((size, size)))[1] for size in (1, 2, 3)] == [0, 0, 0]
    # Five points as far from each other as no five of a plane are. Classical scaling alone has a stress of 0.5.
    found, stress = plane_of(1 - np.eye(5))
    assert stress == pytest.approx(np.sqrt(((1 - np.eye(5) - distances_of(found)) ** 2).sum() / 20))
    assert stress < 0.35


def test_similarity_of_tables_by_hand() -> None:
    """Empty bags count for nothing; a table of two features is as alike as these on average."""
    samples = [[[1, 0], [2, 0], [0, 3]], [[1, 1], [-5, 0], [0, 0]], [[0, 0], [1, 2], [3, 4]]]
    vectors = torch.tensor(samples, dtype=torch.float32)
    ab, ac, bc = (1 + np.sqrt(0.5)) / 2, 0.0, (0 + 11 / (5 * np.sqrt(5))) / 2
    found = similarity_of([vectors[:2], vectors[2:]], ["a", "b", "c"])
    np.testing.assert_allclose(found, [[1, ab, ac], [ab, 1, bc], [ac, bc, 1]], atol=1e-9)
    found = similarity_of([vectors], ["a", "b", "a"])
    np.testing.assert_allclose(found, [[1, (ab + bc) / 2], [(ab + bc) / 2, 1]], atol=1e-9)
