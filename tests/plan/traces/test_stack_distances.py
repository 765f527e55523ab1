"""Accesses by stack distances, measured by a list."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.data import find_criteo
from tests.plan.traces.chi_square import deviation
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.traces import StackDistances, draw_stack_distances, read_stack_distances

pytestmark = pytest.mark.kernel


def measured(keys: list[int]) -> list[int]:
    """Each access's distance: 0 for a first use, else 1 for the row that was used last, and so on."""
    stack: list[int] = []
    distances = []
    for key in keys:
        if key in stack:
            distances.append(len(stack) - stack.index(key))
            stack.remove(key)
        else:
            distances.append(0)
        stack.append(key)
    return distances


def profile(chances: dict[int, float]) -> StackDistances:
    return StackDistances(np.array(list(chances)), np.cumsum(list(chances.values())))


def counts_of(distances: list[int], chances: dict[int, float]) -> NDArray[np.int64]:
    assert set(distances) <= set(chances)
    return np.array([distances.count(distance) for distance in chances])


@pytest.mark.parametrize(
    "chances",
    [
        {0: 0.2, 1: 0.1, 2: 0.2, 7: 0.25, 30: 0.25},
        {0: 0.03, 3: 0.96, 100: 0.01},
        {0: 1.0},
        {0: 0.5, 1: 0.5},
    ],
)
def test_distances_are_those_of_the_profile(chances: dict[int, float]) -> None:
    """As soon as there are rows enough for the largest; the tree is filled and made anew several times."""
    count = 8000
    accesses = draw_stack_distances(profile(chances), count, seed=1)
    assert (accesses.tables, accesses.num_batches) == (("t0",), count)
    keys = accesses.keys.tolist()
    distances = measured(keys)
    rows_before = np.cumsum([not distance for distance in distances])
    filled = int(np.argmax(rows_before > max(chances))) + 1
    assert filled < count // 2
    if len(chances) > 1:
        assert abs(deviation(counts_of(distances[filled:], chances), np.array(list(chances.values())))) < 4
    else:
        assert set(distances) == {0}


def test_without_first_uses_in_the_profile_there_are_as_few_as_possible() -> None:
    chances = {1: 0.3, 2: 0.3, 5: 0.4}
    keys = draw_stack_distances(profile(chances), 2000, seed=2).keys.tolist()
    assert len(set(keys)) == 5
    distances = measured(keys)
    filled = max(n for n in range(2000) if not distances[n]) + 1
    assert abs(deviation(counts_of(distances[filled:], chances), np.array(list(chances.values())))) < 4


@pytest.mark.parametrize("rows", [1, 2, 10, 40])
def test_when_all_rows_are_in_use_the_longest_unused_comes_again(rows: int) -> None:
    chances = {0: 0.4, 1: 0.3, 4: 0.3}
    accesses = draw_stack_distances(profile(chances), 3000, seed=3, rows=rows)
    keys = accesses.keys.tolist()
    assert set(keys) == set(range(rows))
    distances = measured(keys)
    filled = max(n for n in range(3000) if not distances[n]) + 1
    assert set(distances[filled:]) <= {min(1, rows), min(4, rows), rows}
    share = distances[filled:].count(rows) / (3000 - filled)
    expected = 0.4 + (0.3 if rows <= 4 else 0) + (0.3 if rows == 1 else 0)
    assert abs(share - expected) < 4 * 0.5 / 3000**0.5


def test_seeds_and_batches() -> None:
    law = profile({0: 0.5, 2: 0.5})
    one, same, other = (draw_stack_distances(law, 300, seed=seed, batch_accesses=7) for seed in (1, 1, 2))
    assert np.array_equal(one.keys, same.keys)
    assert not np.array_equal(one.keys, other.keys)
    assert one.starts.tolist() == [*range(0, 300, 7), 300]
    assert not len(draw_stack_distances(law, 0, seed=1).keys)


def test_a_file_of_two_lines(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text("0, 9, 22\n0.5, 0.75, 1.000000000000024\n")
    found = read_stack_distances(path)
    assert found.distances.tolist() == [0, 9, 22]
    assert found.cumulated.tolist() == pytest.approx([0.5, 0.75, 1], abs=1e-12)
    assert found.cumulated[-1] == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has 0 bytes"),
        (b"0, 1\n", "1 lines, where two are expected"),
        (b"0, 1\n0.5, x\n", "could not convert"),
        (b"0, 1\n0.5\n", "2 distances and 1 shares"),
        (b"1, 0\n0.5, 1\n", "distances must ascend"),
        (b"-1, 0\n0.5, 1\n", "distances must ascend"),
        (b"0, 1\n0.5, 0.4\n", "shares must ascend from 0 to 1; the last is 0.4"),
        (b"0, 1\n0.5, nan\n", "shares must ascend"),
        (b"0, 1\n0.2, 0.7\n", "shares must ascend"),
        (b"0, 99999999999999999999\n0.5, 1\n", "no profile"),
        (b"\xff\xfe\n\x00\n", "no profile"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "profile.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as raised:
        read_stack_distances(path)
    assert str(path) in str(raised.value)


@pytest.mark.skipif(not JIT_ENABLED, reason="too many accesses")
def test_the_published_profile() -> None:
    """It is of ids drawn evenly from ten million: nearly all are first uses within 10,000 accesses."""
    data = find_criteo()
    path = None if data is None else data.parent / "profiles" / "deeprecsys_stack_distance_cdf.txt"
    if path is None or not path.is_file():
        pytest.skip("no published profile")
    law = read_stack_distances(path)
    assert len(law.distances) == 941
    assert law.cumulated[0] == pytest.approx(0.999022, abs=1e-9)
    keys = draw_stack_distances(law, 500_000, seed=4).keys
    again = len(keys) - len(np.unique(keys))
    expected = (1 - law.cumulated[0]) * len(keys)
    assert abs(again - expected) < 4 * expected**0.5 + (1 - law.cumulated[0]) * law.distances[-1]
