"""Click data from a known model, in Criteo's format: the best AUC that anyone can reach on it is known.

A category is a rank drawn from a bounded Zipf law, written as the hash of its column and rank. Categories and dense
features have weights; a label is 1 with the logistic function of their sum as probability. No model can rank rows
better than these probabilities do.
"""

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.arrays import Bytes, Float64s, Int64s
from ..kernels.hashing import mix64
from ..kernels.jit import kernel
from .metrics import Evaluation, Predictions
from .readers.categories import STEP

CARDINALITIES: Final = (
    *(400_000, 250_000, 150_000, 100_000, 60_000, 40_000, 25_000, 15_000, 10_000, 6_000, 4_000, 2_500, 1_500),
    *(1_000, 600, 400, 250, 150, 100, 60, 40, 25, 12, 8, 5, 3),
)
"""Categories of each column."""
_NUM_DENSE: Final = 13
_CHUNK_ROWS: Final = 16_384
_EXPONENT: Final = 1.1  # of the Zipf law: the chance of rank r falls as r to this power
_CATEGORY_STD: Final = 0.4
_DENSE_STD: Final = 0.15
_RARE_POWER: Final = 0.05  # weights fall as the rank to this power: rare categories say a little less
_BIAS: Final = -2.0
_MISSING_SHARE: Final = 0.04  # in every second column
_MISSING: Final = -1
_MISSING_WORD: Final = "0" * 8


class SyntheticData(NamedTuple):
    path: Path
    train_rows: int
    test_rows: int
    best: Evaluation  # of the true probabilities, on the test rows


class _Rows(NamedTuple):
    labels: Bytes
    dense: Int64s
    hashes: NDArray[np.uint32]  # of the categories; 0 where missing
    logits: Float64s


def write_synthetic(path: str | Path, *, train_rows: int, test_rows: int, seed: int = 0) -> SyntheticData:
    """Write rows to ``path``; the same seed writes the same bytes. ValueError: unless both numbers are at least 1."""
    if train_rows < 1 or test_rows < 1:
        raise ValueError(f"train_rows={train_rows} and test_rows={test_rows} must be at least 1")
    source = _Source(seed)
    best = Predictions()
    path = Path(path)
    with path.open("w", encoding="ascii", newline="\n") as file:
        for begin in range(0, train_rows + test_rows, _CHUNK_ROWS):
            rows = source.draw(min(_CHUNK_ROWS, train_rows + test_rows - begin))
            file.write(_text(rows))
            num_train = min(max(train_rows - begin, 0), len(rows.labels))
            if num_train < len(rows.labels):
                best.add(torch.from_numpy(rows.labels[num_train:]), torch.from_numpy(rows.logits[num_train:]))
    return SyntheticData(path, train_rows, test_rows, best.evaluate())


class _Source:
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
        hashes = np.zeros(ranks.shape, np.uint32)
        _hash(ranks, hashes)
        return _Rows(labels, dense, hashes, logits)


def _zipf(uniform: Float64s, size: int) -> Int64s:
    """Ranks from 0 to size - 1: the inverse of a power law's distribution function over [1, size + 1)."""
    power = 1 - _EXPONENT
    position = (((size + 1) ** power - 1) * uniform + 1) ** (1 / power)
    ranks: Int64s = np.minimum(position.astype(np.int64), size) - 1
    return ranks


def _text(rows: _Rows) -> str:
    words = rows.hashes.astype(">u4").tobytes().hex("\t", 4)
    width = len(words) // len(rows.hashes) + 1
    lines = []
    for row, numbers in enumerate(np.column_stack([rows.labels, rows.dense]).tolist()):
        categories = words[row * width : (row + 1) * width - 1].replace(_MISSING_WORD, "")
        lines.append("\t".join([*map(str, numbers), categories]))
    return "\n".join([*lines, ""])


@kernel
def _hash(ranks: Int64s, hashes: NDArray[np.uint32]) -> None:
    """The upper half of the hash of each rank and its column, [n, 26]; 0, which none of them has, where missing."""
    for column in range(ranks.shape[1]):
        for row in range(ranks.shape[0]):
            if ranks[row, column] >= 0:
                hashes[row, column] = mix64(np.uint64(ranks[row, column]) + np.uint64(column) * STEP) >> np.uint64(32)
