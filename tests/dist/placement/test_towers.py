"""Towers of tables: planted groups are found, loads stay within their bound, the plane has the distances."""

import itertools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.runs import config_of
from tierstore.cli import main
from tierstore.dist.placement.towers import load_towers, partition, plane_of, similarity_of
from tierstore.settings.sections import to_toml
from tierstore.train import train

Array = Any
GROUPS = [3, 1, 0, 2, 2, 1, 0, 3, 1, 1, 0, 2]
NAMES = [f"t{i}" for i in range(len(GROUPS))]


def planted(seed: int, noise: float = 0.5) -> Array:
    """Similarities of tables whose vectors go along a direction of their group, either way."""
    generator = np.random.default_rng(seed)
    directions = np.linalg.qr(generator.normal(size=(16, 4)))[0].T
    ways = generator.choice([-1, 1], size=(300, len(GROUPS), 1))
    vectors = ways * directions[GROUPS] + noise / 4 * generator.normal(size=(300, len(GROUPS), 16))
    return similarity_of(map(torch.from_numpy, np.array_split(vectors, 7)), NAMES)


def within(similarity: Array, towers: Any) -> float:
    """Mean similarity of two tables of one tower."""
    pairs = [pair for tower in towers for pair in itertools.combinations(map(NAMES.index, tower), 2)]
    return float(np.mean([similarity[pair] for pair in pairs]))


@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found(seed: int) -> None:
    similarity, loads = planted(seed), np.ones((len(NAMES), 2))
    loads[[1, 5, 8, 9]] = 0.75  # the group of four has as much as those of two and three
    plan = partition(NAMES, similarity, loads, 4, slack=0.5, seed=seed)
    groups = {frozenset(name for name, own in zip(NAMES, GROUPS, strict=True) if own == each) for each in range(4)}
    assert set(map(frozenset, plan.towers)) == groups
    assert [tower[0] for tower in plan.towers] == ["t0", "t1", "t2", "t3"]
    assert 0 < plan.stress < 0.4
    assert plan.alike.diagonal().min() > plan.alike[~np.eye(4, dtype=bool)].max()
    again = partition(NAMES, similarity, loads, 4, slack=0.5, seed=seed)
    assert again.towers == plan.towers
    diverse = partition(NAMES, 1 - similarity, loads, 4, slack=0.5)
    assert within(similarity, diverse.towers) < within(similarity, plan.towers) / 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loads_stay_within_the_bound(data: st.DataObject) -> None:
    tables, kinds = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 2))
    count, seed = data.draw(st.integers(1, tables)), data.draw(st.integers(0, 9))
    load = st.floats(0, 100, allow_subnormal=False)
    loads = np.array([[data.draw(load) for _ in range(kinds)] for _ in range(tables)])
    similarity = np.random.default_rng(seed).random((tables, tables))
    similarity = (similarity + similarity.T) / 2
    plan = partition(NAMES[:tables], similarity, loads, count, seed=seed)
    assert sorted(itertools.chain(*plan.towers)) == NAMES[:tables]
    assert all(plan.towers)
    assert len(plan.towers) == count
    mean = loads.sum(axis=0) / count
    shares = np.divide(loads, mean, out=np.zeros_like(loads), where=mean > 0)
    fullest = {
        groups: np.array([shares[np.array(groups) == group].sum(axis=0) for group in range(count)]).max()
        for groups in itertools.product(range(count), repeat=tables)
        if len(set(groups)) == count
    }
    own = [np.array([shares[NAMES.index(name)] for name in tower]).sum(axis=0) for tower in plan.towers]
    np.testing.assert_allclose(plan.shares, own, atol=1e-9)
    # Bounds of Graham (1969) for one load, largest first, and of Garey and Graham (1975) for two.
    assert np.max(own) <= max(1.1, (4 / 3 if kinds == 1 else 3) * min(fullest.values())) + 1e-6


def test_no_swap_of_what_is_allowed_is_better() -> None:
    """The partition of a plane is no worse than any other within the bound, of tables few enough to try all."""
    generator = np.random.default_rng(3)
    points = generator.normal(size=(7, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    plan = partition(NAMES[:7], 1 - distances, np.ones((7, 1)), 3, slack=0.3)
    assert plan.shares.max() <= 1.3

    def spread(groups: Any) -> float:
        parts = [points[np.array(groups) == group] for group in range(3)]
        if not all(0 < len(part) <= 3 for part in parts):
            return float("inf")
        return sum(float(((part - part.mean(axis=0)) ** 2).sum()) for part in parts)

    own = [next(tower for tower, names in enumerate(plan.towers) if name in names) for name in NAMES[:7]]
    best = min(itertools.product(range(3), repeat=7), key=spread)
    assert spread(own) == pytest.approx(spread(best))
    assert plan.stress < 1e-6


def test_a_plane_has_the_distances_of_points_in_it() -> None:
    points = np.random.default_rng(0).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    found, stress = plane_of(distances)
    assert stress < 1e-6
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=2), distances, atol=1e-6)
    assert [plane_of(np.zeros((size, size)))[1] for size in (1, 2, 3)] == [0, 0, 0]
    # What no plane has: five points, each as far from all others. Classical scaling alone is 0.5 off.
    equal = 1 - np.eye(5)
    found, stress = plane_of(equal)
    apart = np.linalg.norm(found[:, None] - found[None], axis=2)
    assert stress == pytest.approx(np.sqrt(((equal - apart) ** 2).sum() / 20))
    assert stress < 0.35


def test_similarity_of_tables_by_hand() -> None:
    """Empty bags count for nothing; a table of two features is as alike as these on average."""
    vectors = torch.tensor([
        [[1.0, 0], [2, 0], [0, 3]],
        [[1.0, 1], [-5, 0], [0, 0]],
        [[0.0, 0], [1, 2], [3, 4]],
    ])  # fmt: skip
    root = np.sqrt(0.5)
    pair_01, pair_02, pair_12 = (1 + root) / 2, 0.0, (0 + 11 / (5 * np.sqrt(5))) / 2
    found = similarity_of([vectors[:2], vectors[2:]], ["a", "b", "c"])
    np.testing.assert_allclose(found, [[1, pair_01, pair_02], [pair_01, 1, pair_12], [pair_02, pair_12, 1]], atol=1e-9)
    found = similarity_of([vectors], ["a", "b", "a"])
    both = (pair_01 + pair_12) / 2
    np.testing.assert_allclose(found, [[1, both], [both, 1]], atol=1e-9)


@pytest.mark.parametrize("count", [0, 4])
def test_too_many_towers_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 3"):
        partition(NAMES[:3], np.eye(3), np.ones((3, 1)), count)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, "store", train__epochs=1)
    train(config)
    (tmp_path / "run.toml").write_text(to_toml(config))
    words = ["shard", "towers", "run.toml", "towers.json", "--towers", "3", "--rows", "100"]
    assert main([*words, "--svg", "towers.svg"]) == 0
    out, towers = capsys.readouterr().out, load_towers("towers.json")
    assert json.loads((tmp_path / "towers.json").read_text()) == {"towers": [list(tower) for tower in towers]}
    assert sorted(itertools.chain(*towers)) == sorted(config.data.sparse_columns)
    assert all(name in out for name in config.data.sparse_columns)
    texts = [each.text for each in ElementTree.parse("towers.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert set(config.data.sparse_columns) <= set(texts)
    assert main(words) == 1
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--force", "--svg", "run.toml"]) == 1
    assert main([*words, "--force", "--store", "nowhere"]) == 1
    assert main([*words[:-4], "--towers", "27", "--force"]) == 2
    capsys.readouterr()
    trained = ["train", "run.toml", "--store", "with-towers", "--set", "model.towers=towers.json"]
    assert main(trained) == 0
