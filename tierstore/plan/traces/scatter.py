"""A seeded permutation of a table's rows that takes no memory: which row is the most frequent, the second, ..."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...kernels.hashing import mix64
from ...kernels.jit import inline, kernel
from ...rows import MAX_ROWS

__all__ = ["Scatter", "scatter", "scatter_of", "scattered"]

_ROUNDS: Final = 3
_WORD: Final = (1 << 64) - 1


class Scatter(NamedTuple):
    """A permutation of the numbers from 0 to ``rows - 1``, as kernels take it.

    Each round adds, multiplies and shifts numbers of as many bits as the rows need: each of these steps can be undone,
    so that no two numbers meet. A result that is no row is permuted again until it is one (cycle walking: Black,
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which takes two rounds on average at most.

    Attributes:
        mask: one less than the power of two that is not below ``rows``.
        keys: uint64 [2 rounds], what is added, and the odd number that is multiplied by.
    """

    rows: np.uint64
    mask: np.uint64
    shift: np.uint64
    keys: NDArray[np.uint64]


def scatter_of(rows: int, seed: int) -> Scatter:
    """Some permutation for each seed.

    Raises:
        ValueError, TypeError: ``rows`` is none.
    """
    require_int(rows, "rows", 1, MAX_ROWS)
    bits = max(1, (rows - 1).bit_length())
    start = (seed & _WORD) ^ rows
    words = [int(mix64(np.uint64((start + number) & _WORD))) for number in range(2 * _ROUNDS)]
    keys = np.array([word | (number & 1) for number, word in enumerate(words)], np.uint64)
    return Scatter(np.uint64(rows), np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2), keys)


@inline
def scattered(number: Any, rows: Any, mask: Any, shift: Any, keys: Any) -> Any:
    """The row of ``number``; the rest are a ``Scatter``'s fields. A helper of kernels."""
    place = np.uint64(number)
    while True:
        for step in range(0, keys.shape[0], 2):
            place = np.uint64((place + keys[step]) * keys[step + 1]) & mask
            place = np.uint64(place ^ (place >> shift))
        if place < rows:
            return np.int64(place)


@kernel
def _scatter(numbers: Any, rows: Any, mask: Any, shift: Any, keys: Any, out: Any) -> None:
    for position in range(numbers.shape[0]):
        out[position] = scattered(numbers[position], rows, mask, shift, keys)


def scatter(numbers: NDArray[np.int64], law: Scatter) -> NDArray[np.int64]:
    """The rows of some numbers, int64 [n] from 0 to ``rows - 1``."""
    out = np.empty_like(numbers)
    _scatter(numbers, *law, out)
    return out
