"""The checksums of kernels against the xxhash package."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierstore.io.checksum import row_checksum, two_row_checksums
from tierstore.kernels.jit import kernel

pytestmark = pytest.mark.kernel

SEEDS = st.integers(0, 2**64 - 1)


@kernel
def _one(words, start, count, seed):
    return row_checksum(words, start, count, seed)


@kernel
def _two(words, start_a, start_b, count, seed_a, seed_b):
    return two_row_checksums(words, start_a, start_b, count, seed_a, seed_b, np.empty(8, np.uint64))


@given(st.integers(0, 70), st.integers(0, 9), SEEDS, SEEDS)
def test_words_hash_as_their_bytes_do(count: int, start: int, seed: int, content: int) -> None:
    words = np.random.default_rng(content).integers(0, 2**64, start + count, np.uint64)
    expected = xxhash.xxh64_intdigest(words[start:].tobytes(), seed=seed)
    assert int(_one(words, start, count, np.uint64(seed))) == expected


@given(st.integers(0, 70), st.integers(0, 9), SEEDS, SEEDS)
def test_two_at_once_are_two_alone(count: int, gap: int, seed_a: int, seed_b: int) -> None:
    words = np.random.default_rng(count).integers(0, 2**64, 2 * count + gap, np.uint64)
    a, b = _two(words, 0, count + gap, count, np.uint64(seed_a), np.uint64(seed_b))
    assert int(a) == xxhash.xxh64_intdigest(words[:count].tobytes(), seed=seed_a)
    assert int(b) == xxhash.xxh64_intdigest(words[count + gap :].tobytes(), seed=seed_b)
