"""Grouping a batch's ids: distinct keys by cache set, the positions of each in id-list order; twin and Triton."""

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.hbm import cache, launches, twin
from tierstore.hbm.kernel_types import mixed, sets_of
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
    mix = key & MASK
    mix = ((mix ^ mix >> 30) * 0xBF58476D1CE4E5B9) & MASK
    return ((mix ^ mix >> 27) * 0x94D049BB133111EB) & MASK


def check(values: list[int], dtype: torch.dtype, device: str) -> None:
    """Keys (int64) are grouped in the order of their mixes, and numbered; slots (int32) in their own."""
    made = cache.group(torch.tensor(values, dtype=dtype, device=device))
    expected = sorted(set(values), key=mix_of if dtype == torch.int64 else None)
    positions: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(value, []).append(position)
    assert made.num_unique.tolist() == [len(expected)]
    assert made.distinct[: len(expected)].tolist() == expected
    assert (len(made.distinct), len(made.starts)) == (len(values), len(values) + 1)
    order, starts = made.order.tolist(), made.starts[: len(expected) + 1].tolist()
    assert (starts[0], starts[-1]) == (0, len(values))
    for number, value in enumerate(expected):
        assert order[starts[number] : starts[number + 1]] == positions[value]
    dtypes = [each.dtype for each in (made.order, made.starts, made.num_unique, made.distinct)]
    assert dtypes == [torch.int64, torch.int32, torch.int32, dtype]
    if dtype == torch.int64:
        assert made.inverse.dtype == torch.int32
        assert made.distinct[made.inverse.long()].tolist() == values


keys = st.one_of(
    st.integers(0, 30), st.integers(0, LAST_KEY), st.sampled_from([0, MAX_ROWS - 1, MAX_ROWS, LAST_KEY, 2**63 - 1])
)


@given(
    keys=st.lists(keys, min_size=1, max_size=120),
    slots=st.lists(st.integers(0, 9) | st.integers(0, 2**31 - 1), min_size=1, max_size=120),
)
def test_any_keys_and_slots(device: str, keys: list[int], slots: list[int]) -> None:
    check(keys, torch.int64, device)
    check(slots, torch.int32, device)


@settings(max_examples=settings.default.max_examples // 5)  # each takes seconds in Triton's interpreter
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
    check(np.searchsorted(sorted(cuts), np.arange(count), side="right").tolist(), torch.int32, device)


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
