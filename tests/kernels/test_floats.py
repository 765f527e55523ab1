"""Half-precision conversion against torch's, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels import floats
from tierstore.kernels.jit import JIT_ENABLED, kernel

pytestmark = pytest.mark.kernel
HALVES = [(floats.FLOAT16, torch.float16), (floats.BFLOAT16, torch.bfloat16)]
every = 1 if JIT_ENABLED else 37


@kernel
def widen(bits: np.ndarray, out: np.ndarray, dtype_code: int) -> None:
    for i in range(bits.shape[0]):
        out[i] = floats.bits_to_float(bits[i], dtype_code)


@kernel
def narrow(values: np.ndarray, out: np.ndarray, dtype_code: int) -> None:
    for i in range(values.shape[0]):
        out[i] = floats.float_to_bits(values[i], dtype_code)


@pytest.mark.parametrize(("dtype_code", "dtype"), HALVES)
def test_every_bit_pattern_widens_as_in_torch(dtype_code: int, dtype: torch.dtype) -> None:
    bits = np.arange(0, 65536, every, dtype=np.uint16)
    out = np.empty(len(bits), np.float32)
    widen(bits, out, dtype_code)
    expected = torch.from_numpy(bits).view(dtype).float().numpy()
    number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(out), ~number)
    assert np.array_equal(out[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize(("dtype_code", "dtype"), HALVES)
@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_any_float_narrows_as_in_torch(dtype_code: int, dtype: torch.dtype, patterns: list[int]) -> None:
    check_narrow(np.array(patterns, np.uint32).view(np.float32), dtype_code, dtype)


@pytest.mark.parametrize(("dtype_code", "dtype"), HALVES)
def test_ties_and_their_neighbours_narrow_as_in_torch(dtype_code: int, dtype: torch.dtype) -> None:
    exact = torch.arange(0, 0x7C00, every * 3, dtype=torch.int32).to(torch.int16).view(torch.float16)
    lower = exact.to(dtype).float()
    upper = (exact.to(dtype).view(torch.int16) + 1).view(dtype).float()
    middle = ((lower.double() + upper.double()) / 2).float()
    bits = middle.view(torch.int32)
    around = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    check_narrow(torch.cat([around, -around]).numpy(), dtype_code, dtype)


def check_narrow(values: np.ndarray, dtype_code: int, dtype: torch.dtype) -> None:
    out = np.empty(len(values), np.uint16)
    narrow(values, out, dtype_code)
    expected = torch.from_numpy(values).to(dtype)
    nan = torch.from_numpy(out).view(dtype).isnan()
    assert torch.equal(nan, expected.isnan())
    assert np.array_equal(out[~nan.numpy()], expected[~nan].view(torch.int16).numpy().view(np.uint16))
