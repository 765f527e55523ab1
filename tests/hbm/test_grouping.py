"""Grouping a batch's ids: distinct keys by cache set, the positions of each in id-list order; twin and Triton."""

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.hbm import cache, launches, twin
from tierstore.hbm.kernel_types import Groups, mixed, sets_of
from tierstore.layout import KEY_ROW_BITS, MAX_ROWS, MAX_TABLES

LAST_KEY = (MAX_TABLES - 1) << KEY_ROW_BITS | (MAX_ROWS - 1)
MASK = 2**64 - 1
TILE = launches.SORTED_TILE
HAS_CUDA = torch.cuda.is_available()
KERNELS = [twin]
if HAS_CUDA or os.environ.get("TRITON_INTERPRET") == "1":
    KERNELS.append(launches)


@pytest.fixture(scope="module", params=KERNELS, ids=lambda module: module.__name__.rsplit(".")[-1])
def device(request: Any) -> Iterator[str]:
    """The device, with one of the two modules of kernels installed."""
    with pytest.MonkeyPatch.context() as patch:
        module: ModuleType = request.param
        patch.setattr(cache, "kernels_of", lambda _: module)
        yield "cuda" if HAS_CUDA else "cpu"


def mix_of(key: int) -> int:
    """In Python's integers, apart from the code."""
    mix = key & MASK
    mix = ((mix ^ mix >> 30) * 0xBF58476D1CE4E5B9) & MASK
    return ((mix ^ mix >> 27) * 0x94D049BB133111EB) & MASK


def check_groups(values: list[int], made: Groups, expected: list[int]) -> None:
    """``expected`` are the distinct values, in order."""
    distinct, groups = made.distinct, made
    positions: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(value, []).append(position)
    assert groups.num_unique.tolist() == [len(expected)]
    assert distinct[: len(expected)].tolist() == expected
    assert len(distinct) == len(values)
    order, starts = groups.order.tolist(), groups.starts[: len(expected) + 1].tolist()
    assert len(groups.starts) == len(values) + 1
    assert (starts[0], starts[-1]) == (0, len(values))
    for number, value in enumerate(expected):
        assert order[starts[number] : starts[number + 1]] == positions[value]
    dtypes = [each.dtype for each in (groups.order, groups.starts, groups.num_unique)]
    assert dtypes == [torch.int64, torch.int32, torch.int32]


def check_keys(keys: list[int], device: str) -> None:
    made = cache.group(torch.tensor(keys, device=device))
    expected = sorted(set(keys), key=mix_of)
    check_groups(keys, made, expected)
    assert made.inverse is not None
    assert made.distinct[made.inverse.long()].tolist() == keys
    assert (made.distinct.dtype, made.inverse.dtype) == (torch.int64, torch.int32)


def check_slots(slots: list[int], device: str) -> None:
    made = cache.group(torch.tensor(slots, dtype=torch.int32, device=device))
    check_groups(slots, made, sorted(set(slots)))
    assert made.distinct.dtype == torch.int32


keys = st.one_of(
    st.integers(0, 30), st.integers(0, LAST_KEY), st.sampled_from([0, MAX_ROWS - 1, MAX_ROWS, LAST_KEY, 2**63 - 1])
)


@given(some=st.lists(keys, min_size=1, max_size=120))
def test_any_keys(device: str, some: list[int]) -> None:
    check_keys(some, device)


@given(some=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1)), min_size=1, max_size=120))
def test_any_slots(device: str, some: list[int]) -> None:
    check_slots(some, device)


@given(
    edges=st.lists(st.integers(-2, 2), min_size=1, max_size=3),
    inner=st.lists(st.integers(1, TILE - 1), max_size=3),
    last=st.integers(1, 3),
)
def test_groups_that_begin_about_the_edges_of_tiles(device: str, edges: list[int], inner: list[int], last: int) -> None:
    """Sorted already; groups begin at, before and behind each edge, and some in between."""
    cuts = {(number + 1) * TILE + offset for number, offset in enumerate(edges)}
    cuts |= {(number % len(edges)) * TILE + offset for number, offset in enumerate(inner)}
    count = max(cuts) + last
    check_slots(np.searchsorted(sorted(cuts), np.arange(count), side="right").tolist(), device)


def test_more_tiles_than_one_step_of_the_sum_over_them_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles that are small, as the interpreter is slow."""
    monkeypatch.setattr(launches, "SORTED_TILE", 64)
    slots = torch.arange(64 * 64 + 64 + 1, dtype=torch.int32, device=device) // 70
    groups = cache.group(slots)
    distinct, count = groups.distinct, int(groups.num_unique)
    assert torch.equal(distinct[:count], torch.arange(count, dtype=torch.int32, device=device))
    assert torch.equal(groups.starts[:count], distinct[:count] * 70)


def test_mixing_loses_no_key_and_spreads_neighbours_over_sets() -> None:
    """Neighbouring rows of neighbouring tables, as the hottest rows of many tables are."""
    keys = torch.cat([torch.arange(2000) | table << KEY_ROW_BITS for table in range(26)])
    mix = mixed(keys)
    assert len(set(mix.tolist())) == len(keys)
    ordered = mix.sort().values
    assert torch.equal(sets_of(ordered, 999), sets_of(ordered, 999).sort().values)
    filled = torch.bincount(sets_of(mix, 1625), minlength=1625)
    # 32 a set on the average; a Poisson variable of that mean is above 64 once in ten million.
    assert filled.max() <= 64
    assert filled.min() >= 6
    assert abs(filled.double().var().item() / 32 - 1) < 0.15
