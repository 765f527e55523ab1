"""Kernels over quantized rows, compiled and as plain Python, against torch's operators, bit for bit."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.quantized import KINDS, OPERATORS, packed, rows_of_kind
from tierstore import init
from tierstore.kernels import floats, quantized
from tierstore.kernels import slots as kernels
from tierstore.kernels.jit import JIT_ENABLED, fused_multiply_add, kernel

pytestmark = pytest.mark.kernel
CODES = {"int8": floats.INT8, "int4": floats.INT4}
ROWS = 200 if JIT_ENABLED else 12
DIMS = (1, 2, 7, 16, 17, 32, 50, 64)
NONE = np.empty(0, np.float32)
NO_MAX = np.empty((0, 0), np.int32)
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
    slots = np.arange(len(weights), dtype=np.int32)
    quantized.unpack_rows(slots, weights, dim, CODES[dtype], out)
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
        expected = OPERATORS[dtype][1](torch.from_numpy(weights[:, :width].copy())).numpy()
        assert np.array_equal(found, expected)


class Bags:
    """Bags of ten rows, some empty, and the results that the kernels write."""

    def __init__(self, dim: int, dtype: str) -> None:
        rng = np.random.default_rng(dim)
        self.dim, self.dtype = dim, dtype
        self.weights = arena(rows_of_kind("normal", 10, dim), dtype)
        self.starts = np.cumsum([0, 3, 0, 1, 20, 7]).astype(np.int64)
        self.ids = rng.integers(0, 10, 31)
        self.scale = rng.standard_normal(31).astype(np.float32)
        self.count = len(self.starts) - 1

    def pooled(self, mode: int, scale: Any, cut: int, middle: int) -> tuple[Any, Any]:
        """In two parts of positions, each in two parts of bags; the first column of the output stays free."""
        out = np.full((self.count, self.dim + 1), 7, np.float32)
        arg_max = np.full((self.count, self.dim), 9, np.int32) if mode == kernels.MAX else NO_MAX
        for first, last in ((0, cut), (cut, len(self.ids))):
            for begin, end in ((0, middle), (middle, self.count)):
                quantized.pool_rows(
                    begin, end, first, last, self.starts, self.ids[first:last].astype(np.int32), scale, mode,
                    self.weights, self.dim, CODES[self.dtype], np.ones(1, np.int32), self.count, out, arg_max,
                )  # fmt: skip
        assert (out[:, 0] == 7).all()
        return out[:, 1:], arg_max

    def by_torch(self, scale: Any) -> Any:
        width = packed(torch.zeros(1, self.dim), self.dtype).shape[1]
        weights = torch.from_numpy(self.weights[:, :width].copy())
        return OPERATORS[self.dtype][2](
            weights, torch.from_numpy(self.ids), torch.from_numpy(self.starts), False, 0, False,
            torch.from_numpy(scale) if len(scale) else None, include_last_offset=True,
        ).numpy()  # fmt: skip


@every_dtype
@pytest.mark.parametrize("dim", [2, 16, 18, 32, 50, 64])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("cut", [0, 12])
def test_sums_have_the_bits_of_torchs_operator(cut: int, is_weighted: bool, dim: int, dtype: str) -> None:
    bags = Bags(dim, dtype)
    scale = bags.scale if is_weighted else NONE
    assert np.array_equal(bags.pooled(kernels.SUM, scale, cut, 3)[0], bags.by_torch(scale))


@every_dtype
@every_dim
@pytest.mark.parametrize("cut", [0, 12])
def test_means_and_maxima(cut: int, dim: int, dtype: str) -> None:
    bags = Bags(dim, dtype)
    rows = unpacked(bags.weights, dim, dtype)[bags.ids]
    means = bags.pooled(kernels.MEAN, NONE, cut, 3)[0]
    maxima, where = bags.pooled(kernels.MAX, NONE, cut, 3)
    sums = bags.pooled(kernels.SUM, NONE, 0, 0)[0]
    for number, (start, stop) in enumerate(zip(bags.starts[:-1], bags.starts[1:], strict=True)):
        own = rows[start:stop]
        if start == stop:
            assert not means[number].any()
            assert not maxima[number].any()
            assert (where[number] == -1).all()
            continue
        assert np.array_equal(means[number], sums[number] / np.float32(stop - start))
        assert np.allclose(means[number], own.astype(np.float64).mean(0), rtol=1e-5, atol=1e-6)
        assert np.array_equal(maxima[number], own.max(0))
        assert np.array_equal(where[number], start + own.argmax(0))


@every_dtype
@every_dim
def test_gradients_of_per_sample_weights(dim: int, dtype: str) -> None:
    bags = Bags(dim, dtype)
    gradient = np.random.default_rng(0).standard_normal((bags.count, dim)).astype(np.float32)
    found = np.full(len(bags.ids), np.nan, np.float32)
    quantized.dot_rows(
        0, bags.count, 0, len(bags.ids), bags.starts, bags.ids.astype(np.int32), bags.weights, dim, CODES[dtype],
        np.zeros(1, np.int32), bags.count, gradient, found,
    )  # fmt: skip
    owners = np.repeat(np.arange(bags.count), np.diff(bags.starts))
    rows = unpacked(bags.weights, dim, dtype)[bags.ids].astype(np.float64)
    assert np.allclose(found, (rows * gradient[owners]).sum(1), rtol=1e-5, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("first", [init.Uniform(-0.5, 0.25, seed=3), init.Normal(std=2.0), init.Constant(0.3)])
def test_first_values_are_those_in_float32_packed(first: init.Initializer, dtype: str) -> None:
    count = 1500 if JIT_ENABLED else 20
    keys = np.random.default_rng(0).integers(0, 1 << 50, count)
    slots = np.random.default_rng(1).permutation(count).astype(np.int32)
    values = np.zeros((count, 9), np.float32)
    first.fill(keys, slots, values, 9, floats.FLOAT32)
    found = np.full((count, 24), 0xA5, np.uint8)
    quantized.fill_first_values(first, keys, slots, found, 9, CODES[dtype])
    expected = packed(torch.from_numpy(values), dtype).numpy()
    assert np.array_equal(found[:, : expected.shape[1]], expected)
