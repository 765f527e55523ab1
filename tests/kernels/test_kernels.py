"""Kernels whose results decide no bit of a row, so that no other test would see them go wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels import slots as kernels

pytestmark = pytest.mark.kernel


@given(bags=st.lists(st.integers(0, 5), min_size=1, max_size=6), batch=st.integers(1, 3))
def test_positions_are_ordered_by_sample(bags: list[int], batch: int) -> None:
    bags = bags[: len(bags) // batch * batch]
    sample_of = [number % batch for number, length in enumerate(bags) for _ in range(length)]
    order = np.empty(len(sample_of), np.int32)
    kernels.order_by_sample(np.cumsum([0, *bags], dtype=np.int64), batch, order)
    assert order.tolist() == sorted(range(len(sample_of)), key=lambda position: sample_of[position])
