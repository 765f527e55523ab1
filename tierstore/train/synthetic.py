"""Click data from a known model, in Criteo's format: the best AUC that anyone can reach on it is known.

A category is a rank drawn from a bounded Zipf law, written as the hash of its column and rank. Every category has a
weight of its own, every dense feature one. A label is 1 with the probability that a logistic model gives to the sum
of its row's weights; no model can rank rows better than these probabilities do.
"""

from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import torch

from ..kernels.arrays import Bytes, Float64s, Int64s
from ..kernels.jit import inline, kernel
from .metrics import Evaluation, Predictions
from .readers.hashing import GOLDEN, splitmix64

__all__ = ["CARDINALITIES", "SyntheticData", "write_synthetic"]

CARDINALITIES: Final = (
    *(400_000, 250_000, 150_000, 100_000, 60_000, 40_000, 25_000, 15_000, 10_000, 6_000, 4_000, 2_500, 1_500),
    *(1_000, 600, 400, 250, 150, 100, 60, 40, 25, 12, 8, 5, 3),
)
"""Categories of each column."""
_NUM_DENSE: Final = 13
_CHUNK_ROWS: Final = 16_384
_EXPONENT: Final = 1.1
"""Of the Zipf law: the chance of rank r falls as r to this power."""
_CATEGORY_STD: Final = 0.4
_DENSE_STD: Final = 0.15
_RARE_POWER: Final = 0.05
"""Weights fall as the rank to this power: rare categories say a little less."""
_BIAS: Final = -2.0
_MISSING_SHARE: Final = 0.04
"""In every second column."""
_MISSING: Final = -1
_CATEGORY_DIGITS: Final = 8
_MAX_DECIMAL_DIGITS: Final = 19
_MAX_LINE_BYTES: Final = 2 + 13 * (_MAX_DECIMAL_DIGITS + 1) + 26 * (_CATEGORY_DIGITS + 1)
_TAB: Final = 9
_NEWLINE: Final = 10
_ZERO: Final = 48
_A: Final = 97
_CATEGORY_SHIFT: Final = np.uint64(32)


class SyntheticData(NamedTuple):
    """What was written."""

    path: Path
    train_rows: int
    test_rows: int
    best: Evaluation
    """Of the true probabilities, on the test rows."""


class _Rows(NamedTuple):
    labels: Bytes
    dense: Int64s
    ranks: Int64s
    logits: Float64s


def write_synthetic(path: str | Path, *, train_rows: int, test_rows: int, seed: int = 0) -> SyntheticData:
    """Write ``train_rows + test_rows`` rows to ``path``; the same seed writes the same bytes.

    Raises:
        ValueError: unless both numbers are at least 1.
    """
    if train_rows < 1 or test_rows < 1:
        raise ValueError(f"train_rows={train_rows} and test_rows={test_rows} must be at least 1")
    source = _Source(seed)
    best = Predictions()
    path = Path(path)
    with path.open("wb") as file:
        for begin in range(0, train_rows + test_rows, _CHUNK_ROWS):
            rows = source.draw(min(_CHUNK_ROWS, train_rows + test_rows - begin))
            _write(file, rows)
            num_train = min(max(train_rows - begin, 0), len(rows.labels))
            if num_train < len(rows.labels):
                best.add(torch.from_numpy(rows.labels[num_train:]), torch.from_numpy(rows.logits[num_train:]))
    return SyntheticData(path, train_rows, test_rows, best.evaluate())


class _Source:
    """The known model, and rows drawn from it."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._dense_weights = self._random.normal(0, _DENSE_STD, _NUM_DENSE)
        self._category_weights = [self._draw_weights(size) for size in CARDINALITIES]

    def _draw_weights(self, size: int) -> Float64s:
        """One weight a category; their mean over draws is 0, so that every seed gives about the same click rate."""
        weights = self._random.normal(0, _CATEGORY_STD, size) * np.arange(1, size + 1) ** -_RARE_POWER
        chances = np.diff(np.arange(1, size + 2) ** (1 - _EXPONENT)) / ((size + 1) ** (1 - _EXPONENT) - 1)
        centred: Float64s = weights - weights @ chances
        return centred

    def draw(self, count: int) -> _Rows:
        random = self._random
        size = random.normal(1, 1.5, (count, _NUM_DENSE))
        logits = _BIAS + (size - 1) @ self._dense_weights
        dense = np.floor(np.exp(size)).astype(np.int64)
        ranks = np.empty((count, len(CARDINALITIES)), np.int64)
        for column, weights in enumerate(self._category_weights):
            drawn = _zipf(random.random(count), len(weights))
            if column % 2:
                drawn[random.random(count) < _MISSING_SHARE] = _MISSING
            logits += np.where(drawn == _MISSING, 0.0, weights[drawn])
            ranks[:, column] = drawn
        labels = (random.random(count) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
        return _Rows(labels, dense, ranks, logits)


def _zipf(uniform: Float64s, size: int) -> Int64s:
    """Ranks from 0 to size - 1: the inverse of a power law's distribution function over [1, size + 1)."""
    power = 1 - _EXPONENT
    position = (((size + 1) ** power - 1) * uniform + 1) ** (1 / power)
    ranks: Int64s = np.minimum(position.astype(np.int64), size) - 1
    return ranks


def _write(file: BinaryIO, rows: _Rows) -> None:
    text = np.empty(len(rows.labels) * _MAX_LINE_BYTES, np.uint8)
    end = _format_rows(rows.labels, rows.dense, rows.ranks, text)
    file.write(text[:end].data)


@kernel
def _format_rows(labels: Bytes, dense: Int64s, ranks: Int64s, text: Bytes) -> int:
    """Write one line a row into ``text``; returns the number of bytes.

    Args:
        labels: [n], 0 or 1.
        dense: [n, 13], 0 or more.
        ranks: [n, 26]; written as the upper half of the hash of column and rank, or empty where negative.
        text: at least n * _MAX_LINE_BYTES.
    """
    at = 0
    for row in range(len(labels)):
        text[at] = _ZERO + labels[row]
        at += 1
        for column in range(dense.shape[1]):
            text[at] = _TAB
            at = _format_decimal(dense[row, column], text, at + 1)
        for column in range(ranks.shape[1]):
            text[at] = _TAB
            at += 1
            if ranks[row, column] >= 0:
                hashed = splitmix64(np.uint64(ranks[row, column]) + np.uint64(column + 1) * GOLDEN)
                at = _format_hexadecimal(int(hashed >> _CATEGORY_SHIFT), text, at)
        text[at] = _NEWLINE
        at += 1
    return at


@inline
def _format_decimal(number: int, text: Bytes, at: int) -> int:
    digits = 1
    rest = number // 10
    while rest:
        digits += 1
        rest //= 10
    for i in range(digits):
        text[at + digits - 1 - i] = _ZERO + number % 10
        number //= 10
    return at + digits


@inline
def _format_hexadecimal(number: int, text: Bytes, at: int) -> int:
    for i in range(_CATEGORY_DIGITS):
        digit = number & 15
        text[at + _CATEGORY_DIGITS - 1 - i] = (_ZERO + digit) if digit < 10 else (_A + digit - 10)
        number >>= 4
    return at + _CATEGORY_DIGITS
