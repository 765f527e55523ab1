"""Kernels over quantized rows, compiled and as plain Python, against torch's operators, bit for bit."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.quantized import KINDS, OPERATORS, packed, rows_of_kind
from tierstore.kernels import floats, quantized
from tierstore.kernels import slots as kernels
from tierstore.kernels.jit import JIT_ENABLED, fused_multiply_add, kernel

pytestmark = pytest.mark.kernel
CODES = {"int8": floats.INT8, "int4": floats.INT4}
ROWS = 200 if JIT_ENABLED else 12
DIMS = (1, 2, 7, 16, 17, 32, 50, 64)
every_dtype = pytest.mark.parametrize("dtype", ["int8", "int4"])
every_dim = pytest.mark.parametrize("dim", DIMS)


@kernel
def multiply_add(one: Any, other: Any, term: Any) -> Any:
    return fused_multiply_add(np.float32(one), np.float32(other), np.float32(term))


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@given(one=numbers, other=numbers, term=numbers)
@example(one=255.0, other=1.0 + 2**-23, term=-255.0)
@example(one=1.0 + 2**-12, other=1.0 + 2**-12, term=2**-60)
def test_a_fused_multiply_add_is_the_nearest_float32(one: float, other: float, term: float) -> None:
    exact = Fraction(one) * Fraction(other) + Fraction(term)
    assume(exact == 0 or abs(exact) > 2.0**-100)
    found = np.float32(multiply_add(np.float32(one), np.float32(other), np.float32(term)))
    error = abs(Fraction(float(found)) - exact)
    for side in (-np.inf, np.inf):
        neighbour = np.nextafter(found, np.float32(side))
        other_error = abs(Fraction(float(neighbour)) - exact)
        assert error < other_error or (error == other_error and not found.view(np.uint32) & 1)


def arena(rows: torch.Tensor, dtype: str) -> Any:
    """The rows as torch packs them, each padded to whole words, as in a cache; behind them is what must not matter."""
    found = packed(rows, dtype).numpy()
    out = np.full((len(found), -(-found.shape[1] // 8) * 8), 0xA5, np.uint8)
    out[:, : found.shape[1]] = found
    return out


@every_dtype
@every_dim
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_packed_as_torch_packs_them(kind: str, dim: int, dtype: str) -> None:
    rows = rows_of_kind(kind, ROWS, dim)
    expected = packed(rows, dtype).numpy()
    found = np.full((ROWS + 1, -(-expected.shape[1] // 8) * 8), 0xA5, np.uint8)
    slots = np.random.default_rng(0).permutation(ROWS + 1)[:ROWS].astype(np.int32)
    assert quantized.pack_rows(rows.numpy(), slots, found, dim, CODES[dtype]) == -1
    assert np.array_equal(found[slots][:, : expected.shape[1]], expected)
    assert not found[slots][:, expected.shape[1] :].any()
    assert (np.delete(found, slots, 0) == 0xA5).all()


@pytest.mark.parametrize(
    ("dtype", "low", "high", "fits"),
    [
        ("int8", -1e38, 1e38, True),
        ("int8", -3e38, 3e38, False),
        ("int4", -60000.0, 60000.0, True),
        ("int4", -70000.0, 0.0, False),
        ("int4", 0.0, 2e6, False),
    ],
)
def test_a_row_beyond_its_scale_and_bias_is_not_packed(dtype: str, low: float, high: float, fits: bool) -> None:
    rows, slots = np.array([[low, high]], np.float32), np.zeros(1, np.int32)
    assert quantized.pack_rows(rows, slots, np.zeros((1, 16), np.uint8), 2, CODES[dtype]) == (-1 if fits else 0)


def unpacked(weights: Any, dim: int, dtype: str) -> Any:
    out = np.full((len(weights), dim), np.nan, np.float32)
    quantized.unpack_rows(np.arange(len(weights), dtype=np.int32), weights, dim, CODES[dtype], out)
    return out


def by_numpy(weights: Any, dim: int, dtype: str) -> tuple[Any, Any, Any]:
    """(levels, scale, bias), float32, of rows in torch's format."""
    if dtype == "int8":
        pair = weights[:, dim : dim + 8].copy().view(np.float32)
        return weights[:, :dim].astype(np.float32), pair[:, :1], pair[:, 1:]
    place = (dim + 1) // 2
    pair = weights[:, place : place + 4].copy().view(np.float16).astype(np.float32)
    levels = np.stack([weights[:, :place] & 15, weights[:, :place] >> 4], 2).reshape(len(weights), -1)[:, :dim]
    return levels.astype(np.float32), pair[:, :1], pair[:, 1:]


@every_dtype
@every_dim
def test_rows_are_unpacked_as_by_torch_and_by_numpy(dim: int, dtype: str) -> None:
    weights = arena(rows_of_kind("scales", ROWS, dim), dtype)
    found = unpacked(weights, dim, dtype)
    levels, scale, bias = by_numpy(weights, dim, dtype)
    # numpy rounds the product, then the sum; here the sum alone is rounded.
    bound = 2.0**-24 * (np.abs(levels * scale) + 2 * np.abs(found)) * 1.01
    assert (np.abs(found.astype(np.float64) - (levels * scale + bias)) <= bound).all()
    if dtype == "int8" or dim % 2 == 0:
        width = packed(torch.zeros(1, dim), dtype).shape[1]
        assert np.array_equal(found, OPERATORS[dtype][1](torch.from_numpy(weights[:, :width].copy())).numpy())


@given(bags=st.lists(st.integers(0, 5), min_size=1, max_size=6), batch=st.integers(1, 3))
def test_positions_are_ordered_by_sample(bags: list[int], batch: int) -> None:
    bags = bags[: len(bags) // batch * batch]
    sample_of = [number % batch for number, length in enumerate(bags) for _ in range(length)]
    order = np.empty(len(sample_of), np.int32)
    kernels.order_by_sample(np.cumsum([0, *bags], dtype=np.int64), batch, order)
    assert order.tolist() == sorted(range(len(sample_of)), key=lambda position: sample_of[position])
